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
    """Rung by the thread that works.

    Two threads share one interpreter. A job that is given while another one is computed begins as soon as that ends,
    and what comes of the other is only told when the new one says that it computes and needs no interpreter for a
    while. So what is done about the one hardly delays the other.
    """

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.due = False  # something has ended and was not told

    def computing(self) -> None:
        """The job that runs leaves the interpreter to others for a while."""
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
        bell: for jobs, which may tell that they compute.
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
        """Readable when something has been told since the last look."""
        return self.bell.fd

    @property
    def ready(self) -> bool:
        """Whether there is something to take."""
        return bool(self._come) or not self._ended.empty()

    def give(self, job: Callable[[], Outcome]) -> None:
        self._out += 1
        self._given.put(job)

    def take(self, wait: bool) -> Outcome | None:
        """What came of the oldest job; None when it has not ended and is not to be waited for. Raises what it did."""
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
        """Forget everything that was given, when it has ended."""
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
        bell.computing()  # the job may not have said so
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
