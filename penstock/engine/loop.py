"""The engine: a scheduler that decides, a runner that computes, and the time that both took."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Protocol

from penstock.core.clock import Clock
from penstock.core.plan import StepPlan, StepResult
from penstock.core.request import Request, TokenOutput
from penstock.engine.cache_log import CacheLog
from penstock.kv.pool import Published
from penstock.sched.local import Scheduler
from penstock.sched.local.budget import StepBudget
from penstock.sched.local.recent import Recent


class Computes(Protocol):
    """What an engine needs of a runner."""

    def run(self, plan: StepPlan) -> StepResult: ...

    def counts(self) -> dict[str, int]:
        """What it holds and did, for whoever inspects the engine."""
        ...

    def check(self) -> None:
        """Raise AssertionError unless everything it holds is accounted for."""
        ...


class Ledger(Protocol):
    """Where it is written down what blocks hold, for a next life of this engine."""

    def clear(self, blocks: Iterable[int]) -> None:
        """These will be written anew."""
        ...

    def write(self, published: Published) -> None:
        """This block is full."""
        ...


class Engine:
    """Requests in, tokens out, one step at a time. Not thread-safe: one loop owns it.

    Args:
        ledger: None where blocks do not outlive the engine.
        budget: finds out how many tokens a step may hold; None where that is known.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Computes,
        clock: Clock,
        ledger: Ledger | None = None,
        budget: StepBudget | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.recent = Recent()
        self.steps = 0
        self.cache_log: CacheLog | None = None  # where somebody wants to know
        self._clock = clock
        self._ledger = ledger
        self._budget = budget

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def add(self, request: Request, *, departs: bool = False) -> None:
        """Raises PromptTooLong or InvalidRequest; then nothing has changed."""
        now = self._clock.now()
        self.scheduler.add(request, departs=departs, now=now)
        self.recent.arrived(request.id, now, len(request.generated))

    def cancel(self, request_ids: Iterable[str]) -> None:
        """Let requests go. Ids that are not here are passed over: they may have just finished."""
        for request_id in request_ids:
            self.scheduler.cancel(request_id)
            self.recent.forget(request_id)

    def step(self) -> tuple[list[TokenOutput], int]:
        """Run one step. Returns what it brought, and how many tokens it computed; 0 when there is no room to work."""
        plan = self.plan()
        return self.run(plan), plan.num_tokens

    def plan(self) -> StepPlan:
        """The next step; without sequences when there is no room to work."""
        now = self._clock.now()
        plan = self.scheduler.schedule(now)
        self.recent.started(plan, now)
        return plan

    def run(self, plan: StepPlan) -> list[TokenOutput]:
        """Run what was planned."""
        if not plan.sequences:
            return []
        began = self._clock.now()
        if self._ledger is not None:
            self._ledger.clear(plan.fresh_blocks)
        outputs = self.scheduler.update(plan, self.runner.run(plan))
        self.steps += 1
        self.write_down()
        now = self._clock.now()
        if self.recent.ran(plan, began, [now]) and (times := self.recent.times):
            self.scheduler.predict_by(times)
        if self._budget is not None and self._budget.ran(plan.num_tokens, now - began):
            self.scheduler.limits = replace(self.scheduler.limits, token_budget=self._budget.tokens)
        for output in outputs:
            self.recent.stamp(output, now)
        return outputs

    def write_down(self) -> None:
        """Tell ledger and cache log what can be found in the cache since the last time, and what no longer can."""
        added, removed = self.scheduler.pool.take_changes()
        if self._ledger is not None:
            for published in added:
                self._ledger.write(published)
        if self.cache_log is not None:
            self.cache_log.note([p.key for p in added], removed)

    def check(self) -> None:
        """Raise AssertionError unless everything that runs is accounted for."""
        self.scheduler.check()
        self.runner.check()
        held = self.scheduler.num_running + self.scheduler.num_waiting + self.scheduler.num_leaving
        assert len(self.recent) == held
