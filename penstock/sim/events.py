"""The event queue: a heap in the order of (time, priority, counter)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from enum import IntEnum
from heapq import heappop, heappush

from msgspec import Struct


class Priority(IntEnum):
    """The order of simultaneous events; those of one priority go in the order in which they were added."""

    FAULT = 0
    MESSAGE = 1
    ARRIVAL = 2
    STEP = 3  # after the messages, so that a step begins with all that has come
    CLOCK = 4  # periodic work comes after everything else of its time


class Due(Struct, frozen=True):
    """An event.

    Attributes:
        at: seconds.
        act: makes it happen; it is given the time, and returns what follows from it.
        lane: a number that it shares with others that mostly come in the order in which they are added; None when it
            has no such company.
    """

    at: float
    priority: Priority
    act: Callable[[float], Iterable[Due]]
    lane: int | None = None


_Entry = tuple[float, int, int, Callable[[float], Iterable[Due]]]


class Timeline:
    """Runs events in order.

    Most events come in some order by themselves: messages have equal latency, and idle instances report at equal
    intervals. Only the first of each lane has to be compared, so that the heap stays small.

    Args:
        lanes: how many there are.

    Attributes:
        now: seconds since the start.
        happened: events so far.
    """

    def __init__(self, lanes: int = 0) -> None:
        self.now = 0.0
        self.happened = 0
        self._heap: list[_Entry] = []
        self._lanes: list[deque[_Entry]] = [deque() for _ in range(lanes)]
        self._added = 0

    def add(self, dues: Iterable[Due]) -> None:
        """None of them may lie in the past."""
        for due in dues:
            at, lane = due.at, due.lane
            assert at >= self.now, f"an event at {at} s is added at {self.now} s"
            entry = at, due.priority, self._added, due.act
            self._added += 1
            if lane is not None:
                before = self._lanes[lane]
                if not before or before[-1] < entry:
                    before.append(entry)
                    continue
            heappush(self._heap, entry)

    def run(self, over: Callable[[], bool]) -> None:
        """Let everything happen until `over` says so, which is asked after every event, or nothing is left."""
        heap, lanes = self._heap, self._lanes
        while not over():
            first = heap[0] if heap else None
            source = None
            for lane in lanes:
                if lane and (first is None or lane[0] < first):
                    first, source = lane[0], lane
            if first is None:
                return
            if source is None:
                heappop(heap)
            else:
                source.popleft()
            self.now, _, _, act = first
            self.happened += 1
            self.add(act(self.now))
