"""Calls that may hang, as those of a foreign library or of a file system that has gone: they are waited for no longer
than is said."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any, TypeVar

from penstock.core.errors import Unavailable

T = TypeVar("T")


class _Batch:
    """
    Attributes:
        left: calls that are not over.
        error: the first that a call raised.
        given_up: nobody waits for it, and no more of it begins.
    """

    def __init__(self, calls: Sequence[Callable[[], Any]]) -> None:
        self.calls = calls
        self.results: list[Any] = [None] * len(calls)
        self.left = len(calls)
        self.error: BaseException | None = None
        self.given_up = False


class Crew:
    """Threads that make calls, several at once. One thread gives them, and waits.

    A call cannot be ended. One that is given up goes on, with the memory that it was given, and until it is over no
    other begins: so what is handed to calls must be memory that nobody else uses.

    Args:
        name: of what is called, for messages.
        seconds: that calls given together may take.
    """

    def __init__(self, name: str, threads: int, seconds: float) -> None:
        self._name, self._seconds = name, seconds
        self._changed = threading.Condition()
        self._running = 0
        self._orders: SimpleQueue[tuple[_Batch, int] | None] = SimpleQueue()
        self._threads = [threading.Thread(target=self._work, name="block-store", daemon=True) for _ in range(threads)]
        for thread in self._threads:
            thread.start()

    @property
    def is_stuck(self) -> bool:
        """Whether a call that was given up is not over."""
        with self._changed:
            return self._running > 0

    def run(self, calls: Sequence[Callable[[], T]]) -> list[T]:
        """Their results, in order. Raises the first error of a call when all are over; Unavailable when they are not in
        time, or one that was given up before is not yet."""
        batch = _Batch(calls)
        with self._changed:
            if self._running:
                raise Unavailable(f"{self._name} still does not answer")
            for number in range(len(calls)):
                self._orders.put((batch, number))
            if not self._changed.wait_for(lambda: not batch.left, self._seconds):
                batch.given_up = True
                raise Unavailable(f"{self._name} has not answered for {self._seconds:g} s")
        if batch.error is not None:
            raise batch.error
        return batch.results

    def close(self) -> None:
        """Calls that were given up are left to themselves."""
        for _ in self._threads:
            self._orders.put(None)
        if not self.is_stuck:
            for thread in self._threads:
                thread.join()

    def _work(self) -> None:
        while (order := self._orders.get()) is not None:
            batch, number = order
            with self._changed:
                if batch.given_up:
                    continue
                self._running += 1
            error = result = None
            try:
                result = batch.calls[number]()
            except BaseException as raised:
                error = raised
            with self._changed:
                self._running -= 1
                batch.results[number] = result
                batch.error = batch.error or error
                batch.left -= 1
                self._changed.notify_all()
