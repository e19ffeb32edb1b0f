"""Several stages of a model, each of which computes another plan: rank 0's worker is of the first, and what comes of a
plan is heard from the last. And data-parallel groups, whose steps are computed together."""

from __future__ import annotations

import weakref
from collections import deque
from contextlib import suppress
from functools import partial
from threading import Lock, Thread
from typing import Protocol
from weakref import ref

from penstock.core.clock import Clock
from penstock.core.errors import ConfigError, RankFailed
from penstock.core.plan import StepPlan
from penstock.engine.executor.base import Computes, ExpertLoad, MaskCosts, Pending, Ran
from penstock.engine.executor.groups import Groups
from penstock.engine.executor.inline import Bell, Job, StepThread
from penstock.engine.executor.plans import Answer

NOTHING = StepPlan(())  # of its own, in a step of other groups


class Others(Protocol):
    """The other ranks, as `RankProcesses` has them."""

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
    """Computes with rank 0's worker in a thread, and with the other ranks beside it.

    Args:
        groups: that compute their steps together; None without any. A step that another group has begun this one takes
            part in, with nothing of its own, unless it begins one itself.
    """

    def __init__(
        self,
        own: Computes,
        others: Others,
        clock: Clock,
        *,
        stages: int,
        groups: Groups | None = None,
        ahead: bool = True,
    ) -> None:
        self.answers, self.ahead = Answers(clock), ahead or stages > 1
        self._own, self._others, self._clock, self._groups = own, others, clock, groups
        self._answers_here = stages == 1
        self._thread: StepThread[float] = StepThread()
        self._lock, self._begun = Lock(), 0
        self._close = weakref.finalize(self, others.close)
        if groups is not None:
            Thread(target=_accompany, args=(ref(self), groups), name="penstock-steps", daemon=True).start()

    @property
    def mask_costs(self) -> MaskCosts:
        return self.answers.costs

    @property
    def expert_load(self) -> ExpertLoad:
        return self._others.expert_load

    def launch(self, plan: StepPlan, *, stoppable: bool = False) -> Pending:
        self._others.expect_alive()
        with self._lock:
            job, number = self._begin(plan), self.answers.expect()
        return _Staged(self.answers, number, job, self._others)

    def _begin(self, plan: StepPlan) -> Job[float]:
        self._begun += 1
        if self._groups is not None:
            self._groups.memory.steps.begin_step(self._begun)
        return self._thread.give(partial(self._compute, self._others.post(plan)))

    def accompany(self, begun: int) -> int:
        """Somebody has begun the step after these: so does this group. From any thread. Returns how many it has."""
        with self._lock:
            if self._begun == begun:
                self._begin(NOTHING)
            return self._begun

    def fileno(self) -> int | None:
        return self.answers.bell.fd

    def expect_alive(self) -> None:
        self._others.expect_alive()

    def settle(self) -> None:
        self._thread.settle()
        self.answers.wait(self.answers.last)

    def close(self) -> None:
        if self._groups is not None:
            with suppress(RankFailed, ConfigError):  # then nobody is to wait for this one
                self._others.expect_alive()
                self._groups.leave()
        self._thread.settle()
        self._close()

    def counts(self) -> dict[str, int]:
        return {**self._own.counts(), **self.answers.counts}

    def check(self) -> None:
        self.settle()
        self._own.check()

    def _compute(self, plan: StepPlan) -> float:
        """The first stage of a plan, in the thread. Returns when it began."""
        began, own = self._clock.now(), self._own
        try:
            result = own.run(plan)
            self._others.expect_alive()  # else a device has what ranks that are no more have sent it
        except BaseException as error:
            self._others.fail(0, RankFailed(f"rank 0 has failed: {type(error).__name__}: {error}"))
            raise
        if self._answers_here and not plan.empty:
            self.answers.put(Answer(result, own.mask_costs, own.counts()))
        return began


def _accompany(executor: ref[PipelineExecutor], groups: Groups) -> None:
    begun = 0
    with suppress(RankFailed):  # as the end is
        while True:
            groups.memory.steps.await_step(begun + 1)
            if (one := executor()) is None:
                return
            begun = one.accompany(begun)
            del one


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
