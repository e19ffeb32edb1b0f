"""The engine: a scheduler that decides, a runner that computes, and the time that both took."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from penstock.core.clock import Clock
from penstock.core.plan import StepPlan, StepResult
from penstock.core.request import Request, TokenOutput
from penstock.engine.cache_log import CacheLog
from penstock.engine.lane import Lane
from penstock.kv.pool import Published
from penstock.sched.local import Scheduler
from penstock.sched.local.budget import StepBudget
from penstock.sched.local.recent import Recent

SHORT = 5e-3  # seconds: for shorter steps, another thread costs more than it hides


class Computes(Protocol):
    """What an engine needs of a runner."""

    def run(self, plan: StepPlan) -> StepResult: ...

    def counts(self) -> dict[str, int]:
        """What it holds and did, for whoever inspects the engine."""
        ...

    def check(self) -> None:
        """Raise AssertionError unless everything it holds is accounted for."""
        ...


class Expects(Protocol):
    """Who prepares blocks before they are used."""

    @property
    def size(self) -> int:
        """How many."""
        ...

    def use(self, blocks: Sequence[int]) -> bool:
        """These are used from now on. Returns whether it is time to tell of others."""
        ...

    def expect(self, coming: Iterable[int], *, hurry: bool = False) -> None:
        """These are next: soon, with hurry; else nothing runs any more."""
        ...


class Ledger(Protocol):
    """Where it is written down what blocks hold, for a next life of this engine."""

    def clear(self, blocks: Iterable[int]) -> None:
        """These will be written anew."""
        ...

    def write(self, published: Published) -> None:
        """This block is full."""
        ...


@dataclass(frozen=True, slots=True)
class Ran:
    """What a runner made of a step, and when, in seconds of the engine's clock."""

    result: StepResult
    began: float
    ended: float


@dataclass(frozen=True, slots=True)
class Step:
    """One that has ended, and what it brought."""

    plan: StepPlan
    outputs: list[TokenOutput]


class Engine:
    """Requests in, tokens out. Not thread-safe: one loop owns it.

    That loop begins steps as long as it may, and takes what has ended:

        while engine.begin(): ...
        step = engine.end()

    Args:
        ledger: None where blocks do not outlive the engine.
        budget: finds out how many tokens a step may hold; None where that is known.
        reserve: prepares blocks; None where that is nothing to anybody.
        ahead: the runner computes in a thread of its own, and the next step is scheduled meanwhile
            (`sched.local.ahead`); for runners that know placeholders. Without it a step is computed in `end`.
        short: seconds; when the last step took less, the next one is computed in `end` all the same.

    Attributes:
        steps: that have ended.
        busy: seconds that they took.
        idle: seconds between them in which the runner did nothing although there was work.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Computes,
        clock: Clock,
        ledger: Ledger | None = None,
        budget: StepBudget | None = None,
        reserve: Expects | None = None,
        *,
        ahead: bool = False,
        short: float = SHORT,
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.recent = Recent()
        self.steps = 0
        self.busy = self.idle = 0.0
        self.cache_log: CacheLog | None = None  # where somebody wants to know
        self.lane: Lane[Ran] | None = Lane() if ahead else None
        self._clock = clock
        self._ledger = ledger
        self._budget = budget
        self._reserve = reserve
        self.short = short
        self._took = short  # the last step
        self._flying: deque[StepPlan] = deque()
        self._given = False  # whether the lane has these
        self._began = 0.0  # the first of them, as far as is known
        self._free_since: float | None = None  # when the runner had ended a step and there was more to do
        self._expect()

    @property
    def has_work(self) -> bool:
        return bool(self._flying) or self.scheduler.has_work

    @property
    def tokens_in_flight(self) -> int:
        """Tokens of the steps that are being computed now, or will be without anybody's doing."""
        return sum(plan.num_tokens for plan in self._flying) if self._given else 0

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
        """Run one step to its end. Returns what it brought, and how many tokens it computed; 0 when there is no room to
        work."""
        while self.begin():
            pass
        step = self.end(wait=True)
        return (step.outputs, step.plan.num_tokens) if step is not None else ([], 0)

    def begin(self) -> StepPlan | None:
        """Schedule the next step. None when the runner has enough to do, or when there is no work or no room."""
        lane = self.lane if self._took >= self.short else None
        if self._flying and (lane is None or not self._given or not self.scheduler.foresee()):
            return None
        now = self._clock.now()
        plan = self.scheduler.schedule(now, self._wait(now))
        if not plan.sequences:
            return None
        if self._ledger is not None:
            self._ledger.clear(plan.fresh_blocks)
        if not self._flying:
            self._began = now
        self._flying.append(plan)
        self._given = lane is not None
        if lane is not None:
            self.scheduler.launch(plan)
            lane.give(partial(self._compute, plan))
        if self._reserve is not None and plan.fresh_blocks and self._reserve.use(plan.fresh_blocks):
            self._expect(hurry=True)
        return plan

    def _expect(self, *, hurry: bool = False) -> None:
        if self._reserve is not None:
            self._reserve.expect(self.scheduler.pool.coming(self._reserve.size), hurry=hurry)

    def _wait(self, now: float) -> float:
        """Seconds until the step in flight has ended, as far as can be said."""
        times = self.recent.times
        if not self._flying or times is None:
            return 0.0
        return max(0.0, self._began + times.step_ms(*self._flying[0].work) / 1e3 - now)

    def _compute(self, plan: StepPlan) -> Ran:
        """In whichever thread."""
        began = self._clock.now()
        result = self.runner.run(plan)
        return Ran(result, began, self._clock.now())

    def end(self, *, wait: bool = False) -> Step | None:
        """The oldest step in flight. None when there is none, or when it has not ended and is not to be waited for.

        Raises whatever the runner did; then the steps in flight have never been.
        """
        if not self._flying:
            return None
        try:
            ran = self.lane.take(wait) if self.lane is not None and self._given else self._compute(self._flying[0])
        except BaseException:
            if self.lane is not None:
                self.lane.clear()
            self._flying.clear()
            self.scheduler.abandon()
            raise
        if ran is None:
            return None
        plan = self._flying.popleft()
        self._began = ran.ended
        return Step(plan, self._record(plan, ran))

    def _record(self, plan: StepPlan, ran: Ran) -> list[TokenOutput]:
        outputs = self.scheduler.update(plan, ran.result)
        self.steps += 1
        self._took = ran.ended - ran.began
        self.busy += self._took
        if self._free_since is not None:
            self.idle += ran.began - self._free_since
        self._free_since = ran.ended if self.has_work else None
        if not self.has_work:
            self._expect()
        self.write_down()
        self.recent.started(plan, ran.began)
        if self.recent.ran(plan, ran.began, [ran.ended]) and (times := self.recent.times):
            self.scheduler.predict_by(times)
        if self._budget is not None and self._budget.ran(plan.num_tokens, self._took):
            self.scheduler.limits = replace(self.scheduler.limits, token_budget=self._budget.tokens)
        for output in outputs:
            self.recent.stamp(output, ran.ended)
        return outputs

    def write_down(self) -> None:
        """Tell ledger and cache log what can be found in the cache since the last time, and what no longer can."""
        added, removed = self.scheduler.pool.take_changes()
        if self._ledger is not None:
            for published in added:
                self._ledger.write(published)
        if self.cache_log is not None:
            self.cache_log.note([p.key for p in added], removed)

    def settle(self) -> None:
        """Return when the runner does nothing any longer. What it has computed can still be had from `end`."""
        if self.lane is not None:
            self.lane.settle()

    def check(self) -> None:
        """Raise AssertionError unless everything that runs is accounted for."""
        self.scheduler.check()
        self.settle()
        self.runner.check()
        held = self.scheduler.num_running + self.scheduler.num_waiting + self.scheduler.num_leaving
        assert len(self.recent) == held
