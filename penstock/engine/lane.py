"""The thread that computes: a runner's steps in the order in which they are given, one right after the other."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

from penstock.core.clock import Clock
from penstock.core.plan import StepPlan, StepResult

Run = Callable[[StepPlan], StepResult]


@dataclass(frozen=True, slots=True)
class Ran:
    """What came of a step, and when it was computed, in seconds of the engine's clock."""

    result: StepResult
    began: float
    ended: float


def timed(run: Run, plan: StepPlan, clock: Clock) -> Ran:
    began = clock.now()
    result = run(plan)
    return Ran(result, began, clock.now())


class Lane:
    """One thread gives it steps and takes what came of them; another one computes. Python gives that one its turn in
    between, so whoever waits should wait in a call and not in a loop.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="penstock-step")
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        weakref.finalize(self, os.close, self._bell)

    def fileno(self) -> int:
        """Readable when a step has ended since the last `quiet`; to wait with others."""
        return self._bell

    def quiet(self) -> None:
        """Stop ringing. To be called before looking at what has ended."""
        with suppress(BlockingIOError):
            os.eventfd_read(self._bell)

    def give(self, run: Run, plan: StepPlan) -> Future[Ran]:
        future = self._thread.submit(timed, run, plan, self._clock)
        future.add_done_callback(self._ring)
        return future

    def _ring(self, _: Future[Ran]) -> None:
        os.eventfd_write(self._bell, 1)
