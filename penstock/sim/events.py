"""What happens next: a heap of events in the order of (time, priority, counter)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import IntEnum
from heapq import heappop, heappush
from typing import NamedTuple


class Priority(IntEnum):
    """Who goes first among events of one moment; those of one priority go in the order in which they were added."""

    FAULT = 0
    MESSAGE = 1
    ARRIVAL = 2
    STEP = 3  # after the messages, so that a step begins with all that has come
    CLOCK = 4  # what is done by the clock sees everything else of its moment


class Due(NamedTuple):
    """Something that will happen.

    Attributes:
        at: seconds.
        act: makes it happen; it is given the time, and returns what follows from it.
    """

    at: float
    priority: Priority
    act: Callable[[float], Iterable[Due]]


class Timeline:
    """Runs events in order.

    Attributes:
        now: seconds since the start.
        happened: events so far.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.happened = 0
        self._heap: list[tuple[float, int, int, Callable[[float], Iterable[Due]]]] = []
        self._added = 0

    def add(self, dues: Iterable[Due]) -> None:
        """None of them may lie in the past."""
        for at, priority, act in dues:
            assert at >= self.now, f"an event at {at} s is added at {self.now} s"
            heappush(self._heap, (at, priority, self._added, act))
            self._added += 1

    def run(self, over: Callable[[], bool]) -> None:
        """Let everything happen until `over` says so, which is asked after every event, or nothing is left."""
        heap = self._heap
        while heap and not over():
            self.now, _, _, act = heappop(heap)
            self.happened += 1
            self.add(act(self.now))
