"""One worker in the engine's process: in a thread beside the loop, or in turn with it."""

from __future__ import annotations

import os
import select
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import Any, Generic, TypeVar, cast

from penstock.core.clock import Clock
from penstock.core.plan import StepPlan
from penstock.core.stop import Stop
from penstock.engine.executor.base import NO_LOAD, Computes, MaskCosts, Pending, Ran

# seconds; beside shorter steps of a CPU the loop's work would take a core from the kernels, and handing over the
# interpreter costs more than what is gained: a decode step of the demo model takes 5 to 10 % longer
SHORT = 5e-3
Outcome = TypeVar("Outcome")


class InlineExecutor:
    """Computes with a worker of this process.

    Args:
        ahead: in a thread of its own, for workers that know placeholders. Without it a step is computed by who asks for
            its result.
        beside: at least what is stoppable is computed in that thread.
        short: seconds; when the last step took less, the next one is computed by who asks for it all the same.
    """

    expert_load = NO_LOAD

    def __init__(
        self, worker: Computes, clock: Clock, *, ahead: bool = False, beside: bool = False, short: float = SHORT
    ) -> None:
        self.worker = worker
        self.thread: StepThread[Ran] | None = StepThread() if ahead or beside else None
        self._looks_ahead = ahead
        self.took = short  # the last step
        self._short = short
        self._clock = clock

    @property
    def ahead(self) -> bool:
        return self._looks_ahead and self.took >= self._short

    @property
    def mask_costs(self) -> MaskCosts:
        return self.worker.mask_costs

    def launch(self, plan: StepPlan, *, stoppable: bool = False) -> Pending:
        self.worker.prepare(plan)
        stop = Stop() if stoppable and self.thread is not None else None
        compute = partial(self._run, plan, stop)
        job = self.thread.give(compute) if self.thread is not None and (self.ahead or stop is not None) else None
        return _Launched(self, compute, job, stop)

    def fileno(self) -> int | None:
        return None if self.thread is None else self.thread.fileno()

    def expect_alive(self) -> None:
        """Its worker cannot fail apart from this process."""

    def settle(self) -> None:
        if self.thread is not None:
            self.thread.settle()

    def close(self) -> None:
        self.settle()

    def counts(self) -> dict[str, int]:
        return self.worker.counts()

    def check(self) -> None:
        self.settle()
        self.worker.check()

    def _run(self, plan: StepPlan, stop: Stop | None) -> Ran:
        """In whichever thread."""
        began = self._clock.now()
        result = self.worker.run(plan) if stop is None else self.worker.run(plan, stop)
        return Ran(result, began, self._clock.now())


class _Launched:
    """A step. Without a job it is computed when its result is asked for."""

    def __init__(
        self, executor: InlineExecutor, compute: Callable[[], Ran], job: Job[Ran] | None, stop: Stop | None
    ) -> None:
        self._executor, self._compute, self._job, self._stop = executor, compute, job, stop

    def done(self) -> bool:
        return self._job is None or self._job.done()

    def result(self) -> Ran:
        ran = self._compute() if self._job is None else self._job.result()
        if not ran.result.interrupted:
            self._executor.took = ran.ended - ran.began
        return ran

    def stop(self) -> bool:
        if self._stop is not None:
            self._stop.set()
        return self._stop is not None


# --- the thread


class Bell:
    """A notification from the step thread to the engine's loop.

    Two threads share one interpreter. A queued job starts as soon as the one before ends, and the earlier outcome is
    announced only when the new job says that it is in kernels and does not need the interpreter. So handling the
    outcome hardly delays the job.
    """

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.due = False  # an outcome has not been announced
        self.lock = threading.Lock()  # an outcome is there and, unless another job follows, announced
        self._waiter = select.poll()
        self._waiter.register(self.fd, select.POLLIN)

    def computing(self) -> None:
        """The running job is in kernels and does not need the interpreter."""
        if self.due:
            self.due = False
            self.ring()

    def ring(self) -> None:
        os.eventfd_write(self.fd, 1)

    def hush(self) -> None:
        with suppress(BlockingIOError):
            os.eventfd_read(self.fd)

    def wait(self) -> None:
        """Return when it has rung."""
        self._waiter.poll()

    def close(self) -> None:
        os.close(self.fd)


class Job(Generic[Outcome]):
    """A computation that was given to the thread."""

    def __init__(self, compute: Callable[[], Outcome], bell: Bell) -> None:
        self._compute: Callable[[], Outcome] | None = compute
        self._bell = bell
        self._outcome: Outcome | None = None
        self._error: BaseException | None = None
        self._ended = False

    def done(self) -> bool:
        """Whether it has ended. After False, the bell rings when it has."""
        with self._bell.lock:
            self._bell.hush()
            return self._ended

    def wait(self) -> None:
        while not self.done():
            self._bell.wait()

    def result(self) -> Outcome:
        """Wait for the outcome. Raises what the computation raised."""
        self.wait()
        if self._error is not None:
            raise self._error
        return cast(Outcome, self._outcome)

    def run(self) -> None:
        """In the thread."""
        assert self._compute is not None
        try:
            self._outcome = self._compute()
        except BaseException as error:
            self._error = error
        self._compute = None

    def end(self) -> None:
        """In the thread, after `run`."""
        self._ended = True


class StepThread(Generic[Outcome]):
    """Takes jobs from one thread, and computes them in its own, in the same order.

    Attributes:
        bell: for jobs to say that they are in kernels.
    """

    def __init__(self) -> None:
        self.bell = Bell()
        self._given: SimpleQueue[Job[Outcome] | None] = SimpleQueue()
        self._last: Job[Outcome] | None = None
        # Python must not end while the thread is in a kernel: `_stop` waits for it
        thread = threading.Thread(target=_work, args=(self._given, self.bell), name="penstock-step", daemon=True)
        weakref.finalize(self, _stop, thread, self._given, self.bell)
        thread.start()

    def fileno(self) -> int:
        """Readable when a job has ended since `Job.done` was last called."""
        return self.bell.fd

    def give(self, compute: Callable[[], Outcome]) -> Job[Outcome]:
        self._last = Job(compute, self.bell)
        self._given.put(self._last)
        return self._last

    def settle(self) -> None:
        """Return when everything that was given has ended."""
        if self._last is not None:
            self._last.wait()


def _work(given: SimpleQueue[Job[Any] | None], bell: Bell) -> None:
    while (job := given.get()) is not None:
        job.run()
        bell.computing()  # in case the job did not call it
        with bell.lock:
            job.end()
            bell.due = True
            if given.empty():
                bell.computing()
        del job


def _stop(thread: threading.Thread, given: SimpleQueue[Job[Any] | None], bell: Bell) -> None:
    given.put(None)
    if thread is not threading.current_thread():
        thread.join()
    bell.close()
