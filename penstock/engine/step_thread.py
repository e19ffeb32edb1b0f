"""The thread that computes steps: one right after the other, in the order in which they are given."""

from __future__ import annotations

import os
import select
import threading
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Generic, TypeVar

Outcome = TypeVar("Outcome")


class Bell:
    """A notification from the step thread to the engine's loop.

    Two threads share one interpreter. A queued job starts as soon as the one before ends, and the earlier outcome is
    announced only when the new job says that it is in kernels and does not need the interpreter. So handling the
    outcome hardly delays the job.
    """

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.due = False  # an outcome has not been announced

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

    def close(self) -> None:
        os.close(self.fd)


class StepThread(Generic[Outcome]):
    """Takes jobs from one thread, computes them in its own, and has their outcomes ready in the same order.

    Attributes:
        bell: for jobs to say that they are in kernels.
    """

    def __init__(self) -> None:
        self.bell = Bell()
        self._given: SimpleQueue[Callable[[], Outcome] | None] = SimpleQueue()
        self._ended: SimpleQueue[Outcome | BaseException] = SimpleQueue()
        self._come: deque[Outcome | BaseException] = deque()  # out of that queue, and not taken
        self._out = 0  # given, and not in `_come`
        self._waiter = select.poll()
        self._waiter.register(self.bell.fd, select.POLLIN)
        # Python must not end while the thread is in a kernel: `_stop` waits for it
        thread = threading.Thread(
            target=_work, args=(self._given, self._ended, self.bell), name="penstock-step", daemon=True
        )
        weakref.finalize(self, _stop, thread, self._given, self.bell)
        thread.start()

    def fileno(self) -> int:
        """Readable when an outcome was announced since the last check."""
        return self.bell.fd

    @property
    def ready(self) -> bool:
        """Whether there is something to take."""
        return bool(self._come) or not self._ended.empty()

    def give(self, job: Callable[[], Outcome]) -> None:
        self._out += 1
        self._given.put(job)

    def take(self, wait: bool) -> Outcome | None:
        """The oldest job's outcome; None when it has not ended and `wait` is False. Raises what the job raised."""
        self._look()
        while not self._come:
            if not wait:
                return None
            self._waiter.poll()
            self._look()
        outcome = self._come.popleft()
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def settle(self) -> None:
        """Return when everything that was given has ended."""
        self._look()
        while self._out:
            self._waiter.poll()
            self._look()

    def clear(self) -> None:
        """Wait for all jobs and discard their outcomes."""
        self.settle()
        self._come.clear()

    def _look(self) -> None:
        self.bell.hush()  # before looking, so that whatever comes after it rings again
        while not self._ended.empty():
            self._come.append(self._ended.get())
            self._out -= 1


def _work(
    given: SimpleQueue[Callable[[], Outcome] | None], ended: SimpleQueue[Outcome | BaseException], bell: Bell
) -> None:
    while (job := given.get()) is not None:
        outcome: Outcome | BaseException
        try:
            outcome = job()
        except BaseException as error:
            outcome = error
        bell.computing()  # in case the job did not call it
        ended.put(outcome)
        bell.due = True
        del job, outcome
        if given.empty():
            bell.computing()


def _stop(thread: threading.Thread, given: SimpleQueue[Callable[[], Outcome] | None], bell: Bell) -> None:
    given.put(None)
    if thread is not threading.current_thread():
        thread.join()
    bell.close()
