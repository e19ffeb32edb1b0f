"""The thread that computes steps: one right after the other, in the order in which they are given."""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

Outcome = TypeVar("Outcome")


class Lane(Generic[Outcome]):
    """Takes jobs from one thread, computes them in its own, and has their outcomes ready in the same order.

    A job that is given while another one is computed begins as soon as that ends, before anybody is told that it has.
    The two threads share the interpreter: whoever waits for outcomes should do so in `take`, or in a poll of `fileno`.
    """

    def __init__(self) -> None:
        self._given: SimpleQueue[Callable[[], Outcome] | None] = SimpleQueue()
        self._ended: SimpleQueue[Outcome | BaseException] = SimpleQueue()
        self._come: deque[Outcome | BaseException] = deque()  # out of that queue, and not taken
        self._out = 0  # given, and not in `_come`
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # Python does not end while the thread is in a kernel: what is ending waits for it
        thread = threading.Thread(
            target=_work, args=(self._given, self._ended, self._bell), name="penstock-step", daemon=True
        )
        weakref.finalize(self, _stop, thread, self._given, self._bell)
        thread.start()

    def fileno(self) -> int:
        """Readable when a job has ended since the last `hush`."""
        return self._bell

    def hush(self) -> None:
        """Stop ringing. To be called before looking at what has ended."""
        with suppress(BlockingIOError):
            os.eventfd_read(self._bell)

    def give(self, job: Callable[[], Outcome]) -> None:
        self._out += 1
        self._given.put(job)

    def take(self, wait: bool) -> Outcome | None:
        """What came of the oldest job; None when it has not ended and is not to be waited for. Raises what it did."""
        if not self._come:
            try:
                self._receive(wait)
            except Empty:
                return None
        outcome = self._come.popleft()
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def settle(self) -> None:
        """Return when everything that was given has ended."""
        while self._out:
            self._receive(wait=True)

    def clear(self) -> None:
        """Forget everything that was given, when it has ended."""
        self.settle()
        self._come.clear()

    def _receive(self, wait: bool) -> None:
        self._come.append(self._ended.get(wait))
        self._out -= 1


def _work(
    given: SimpleQueue[Callable[[], Outcome] | None], ended: SimpleQueue[Outcome | BaseException], bell: int
) -> None:
    while (job := given.get()) is not None:
        try:
            ended.put(job())
        except BaseException as error:
            ended.put(error)
        del job
        os.eventfd_write(bell, 1)


def _stop(thread: threading.Thread, given: SimpleQueue[Callable[[], Outcome] | None], bell: int) -> None:
    given.put(None)
    if thread is not threading.current_thread():
        thread.join()
    os.close(bell)
