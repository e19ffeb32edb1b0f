"""Several stages of a model, each of which computes another plan: rank 0's worker is of the first, and what comes of a
plan is heard from the last."""

from __future__ import annotations

import weakref
from collections import deque
from functools import partial
from threading import Lock
from typing import Protocol

from penstock.core.clock import Clock
from penstock.core.errors import ConfigError, RankFailed
from penstock.core.plan import StepPlan
from penstock.engine.executor.base import Computes, ExpertLoad, MaskCosts, Pending, Ran
from penstock.engine.executor.inline import Bell, Job, StepThread
from penstock.engine.executor.plans import Answer


class Others(Protocol):
    """The other ranks, as `RankProcesses` has them."""

    @property
    def can_settle(self) -> bool: ...

    @property
    def expert_load(self) -> ExpertLoad: ...

    def post(self, plan: StepPlan) -> StepPlan: ...

    def expect_alive(self) -> None: ...

    def fail(self, rank: int, error: RankFailed | ConfigError) -> None: ...

    def close(self) -> None: ...


class Answers:
    """What comes of plans, in their order: from the thread that hears it to the one that waits for it.

    Attributes:
        costs, counts: of the worker that answers, as it last said.
    """

    def __init__(self, clock: Clock) -> None:
        self.bell = Bell()
        self.costs, self.counts = MaskCosts(), dict[str, int]()
        self._clock, self._lock = clock, Lock()
        self._come: deque[tuple[Answer, float]] = deque()
        self._awaited = self._taken = 0
        self._failed = False

    def expect(self) -> int:
        """One more. Returns its number."""
        with self._lock:
            self._awaited += 1
            return self._awaited

    @property
    def awaited(self) -> bool:
        """Whether one has not come. From any thread."""
        return self._awaited > self._taken + len(self._come)

    def put(self, answer: Answer | None) -> None:
        """The next one; or none will come any more. From any thread."""
        with self._lock:
            if answer is None:
                self._failed = True
            else:
                self._come.append((answer, self._clock.now()))
                self.costs, self.counts = answer.costs, dict(answer.counts)
        self.bell.ring()

    def come(self, number: int) -> bool:
        """Whether one has come, or none will. After False, the bell rings when that changes."""
        with self._lock:
            self.bell.hush()
            return self._failed or self._taken + len(self._come) >= number

    def wait(self, number: int) -> None:
        while not self.come(number):
            self.bell.wait()

    def take(self) -> tuple[Answer, float] | None:
        """The next one, and when it came; None where none will."""
        with self._lock:
            if not self._come:
                return None
            self._taken += 1
            return self._come.popleft()

    @property
    def last(self) -> int:
        return self._awaited


class PipelineExecutor:
    """Computes with rank 0's worker in a thread, and with the other stages beside it."""

    ahead = True

    def __init__(self, own: Computes, others: Others, clock: Clock) -> None:
        self.answers = Answers(clock)
        self._own, self._others, self._clock = own, others, clock
        self._thread: StepThread[float] = StepThread()
        self._close = weakref.finalize(self, others.close)

    @property
    def mask_costs(self) -> MaskCosts:
        return self.answers.costs

    @property
    def expert_load(self) -> ExpertLoad:
        return self._others.expert_load

    def launch(self, plan: StepPlan, *, stoppable: bool = False) -> Pending:
        self._others.expect_alive()
        plan = self._others.post(plan)
        job = self._thread.give(partial(_compute, self._own, self._others, self._clock, plan))
        return _Staged(self.answers, self.answers.expect(), job, self._others)

    def fileno(self) -> int | None:
        return self.answers.bell.fd

    def expect_alive(self) -> None:
        self._others.expect_alive()

    def settle(self) -> None:
        self._thread.settle()
        self.answers.wait(self.answers.last)

    def close(self) -> None:
        if self._others.can_settle:
            self._thread.settle()
        self._close()

    def counts(self) -> dict[str, int]:
        return {**self._own.counts(), **self.answers.counts}

    def check(self) -> None:
        self.settle()
        self._own.check()


def _compute(own: Computes, others: Others, clock: Clock, plan: StepPlan) -> float:
    """The first stage of a plan. Returns when it began."""
    began = clock.now()
    try:
        own.run(plan)
    except BaseException as error:
        others.fail(0, RankFailed(f"rank 0 has failed: {type(error).__name__}: {error}"))
        raise
    return began


class _Staged:
    """A step on its way through the stages."""

    def __init__(self, answers: Answers, number: int, job: Job[float], others: Others) -> None:
        self._answers, self._number, self._job, self._others = answers, number, job, others
        self._ran: Ran | None = None

    def done(self) -> bool:
        return self._ran is not None or self._answers.come(self._number)

    def stop(self) -> bool:
        return False

    def result(self) -> Ran:
        if self._ran is None:
            self._answers.wait(self._number)
            if (taken := self._answers.take()) is None:
                self._others.expect_alive()
                raise RankFailed("the engine is closed")
            answer, ended = taken
            self._ran = Ran(answer.result, self._job.result(), ended)
        return self._ran
