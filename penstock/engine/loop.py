"""The engine: a scheduler that decides, a runner that computes, and the time that both took."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from penstock.core.clock import Clock
from penstock.core.plan import StepPlan, StepResult
from penstock.core.request import Request, Timing, TokenOutput
from penstock.engine.cache_log import CacheLog
from penstock.engine.recent import Recent
from penstock.kv.pool import Published
from penstock.sched.local import Scheduler


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


@dataclass(slots=True)
class _Milestones:
    """When a request arrived, first ran and first answered, in the clock's seconds."""

    arrival: float
    started: float | None = None
    answered: float | None = None


class Engine:
    """Requests in, tokens out, one step at a time. Not thread-safe: one loop owns it.

    Args:
        ledger: None where blocks do not outlive the engine.
    """

    def __init__(self, scheduler: Scheduler, runner: Computes, clock: Clock, ledger: Ledger | None = None) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.recent = Recent()
        self.steps = 0
        self.cache_log: CacheLog | None = None  # where somebody wants to know
        self._clock = clock
        self._ledger = ledger
        self._milestones: dict[str, _Milestones] = {}

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def add(self, request: Request, *, departs: bool = False) -> None:
        """Raises PromptTooLong or InvalidRequest; then nothing has changed."""
        self.scheduler.add(request, departs=departs)
        self._milestones[request.id] = _Milestones(self._clock.now())

    def adopt(self, request_id: str, queue: float, prefill: float) -> None:
        """A sequence has come from another engine, where it waited and read its prompt for so many seconds."""
        now = self._clock.now()
        self._milestones[request_id] = _Milestones(now - prefill - queue, now - prefill, now)

    def spent(self, request_id: str) -> tuple[float, float]:
        """Seconds that a request that has answered waited, and read its prompt."""
        m = self._milestones[request_id]
        assert m.started is not None
        assert m.answered is not None
        return m.started - m.arrival, m.answered - m.started

    def forget(self, request_id: str) -> None:
        """The scheduler does not have it any longer."""
        self._milestones.pop(request_id, None)

    def cancel(self, request_ids: Iterable[str]) -> None:
        """Let requests go. Ids that are not here are passed over: they may have just finished."""
        for request_id in request_ids:
            self.scheduler.cancel(request_id)
            self.forget(request_id)

    def step(self) -> tuple[list[TokenOutput], int]:
        """Run one step. Returns what it brought, and how many tokens it computed; 0 when there is no room to work."""
        plan = self.plan()
        return self.run(plan), plan.num_tokens

    def plan(self) -> StepPlan:
        """The next step; without sequences when there is no room to work."""
        plan = self.scheduler.schedule()
        now = self._clock.now()
        for s in plan.sequences:
            milestones = self._milestones[s.request_id]
            if milestones.started is None:
                milestones.started = now
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
        self.recent.step(plan, now, now - began)
        for output in outputs:
            self._stamp(output, now)
        return outputs

    def write_down(self) -> None:
        """Tell ledger and cache log what can be found in the cache since the last time, and what no longer can."""
        added, removed = self.scheduler.pool.take_changes()
        if self._ledger is not None:
            for published in added:
                self._ledger.write(published)
        if self.cache_log is not None:
            self.cache_log.note([p.key for p in added], removed)

    def _stamp(self, output: TokenOutput, now: float) -> None:
        milestones = self._milestones[output.request_id]
        if milestones.answered is None:
            milestones.answered = now
            self.recent.ttft(now - milestones.arrival)
        if output.finish is not None:
            del self._milestones[output.request_id]
            assert milestones.started is not None
            output.timing = Timing(
                queue=milestones.started - milestones.arrival,
                prefill=milestones.answered - milestones.started,
                decode=now - milestones.answered,
            )
            self.recent.finished(output.timing, output.start)

    def check(self) -> None:
        """Raise AssertionError unless everything that runs is accounted for."""
        self.scheduler.check()
        self.runner.check()
        held = self.scheduler.num_running + self.scheduler.num_waiting + self.scheduler.num_leaving
        assert len(self._milestones) == held
