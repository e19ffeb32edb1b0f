"""What a priority is worth in seconds, from what was achieved lately (HFX, Algorithm 3; arXiv 2508.15919, 3.3.2).

The last completed latencies are sorted. Sequences of higher priority take the first of them, as many as there were of
these lately, and a class its share after those; so the higher a priority, the lower the quantile that it is promised.
Promises follow the load by themselves: what an idle cluster achieves for its lowest class becomes that class's target,
and once others compete, the lowest class is put off to what its bounds allow.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass

from penstock.core.errors import ConfigError

WINDOW = 512  # completed sequences


@dataclass(frozen=True, slots=True)
class Range:
    """Of a target, in seconds."""

    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Bounds:
    """Of the targets of one priority."""

    ttft: Range
    tpot: Range


class PriorityMapping:
    """A `PrioritySLO`.

    Args:
        bounds: by priority, 0 the highest. A priority that is not there has those of the nearest one that is.
        window: completed sequences that count.

    Raises ConfigError for bounds that are empty or upside down.
    """

    def __init__(self, bounds: Mapping[int, Bounds], window: int = WINDOW) -> None:
        if not bounds:
            raise ConfigError("priorities: there are no bounds, at least one priority needs them", "priorities")
        for priority, both in bounds.items():
            for name, range_ in (("ttft", both.ttft), ("tpot", both.tpot)):
                if not 0 < range_.low <= range_.high:
                    raise ConfigError(
                        f"priorities: {name} of priority {priority} is from {range_.low} to {range_.high}, "
                        "0 < low <= high is needed",
                        "priorities",
                    )
        self._bounds = dict(bounds)
        self._ttfts = _Window(window)
        self._tpots = _Window(window)

    def observe(self, priority: int, ttft: float, tpot: float | None, queued: float) -> None:
        self._ttfts.add(priority, ttft, queued)
        if tpot is not None:
            self._tpots.add(priority, tpot, 0.0)  # waiting for a place does not slow tokens down

    def target(self, priority: int, pending: Mapping[int, int]) -> tuple[float, float]:
        bounds = self._bounds[min(self._bounds, key=lambda p: (abs(p - priority), p))]
        contended = any(count > 0 and other < priority for other, count in pending.items())
        return (
            _within(bounds.ttft, self._ttfts.provisional(priority), contended),
            _within(bounds.tpot, self._tpots.provisional(priority), contended),
        )


def _within(bounds: Range, seconds: float | None, contended: bool) -> float:
    """A target in its bounds. The low one holds only while higher priorities wait: it keeps a class from competing with
    them, and without them it may as well be served sooner. Before anything was measured, the easiest."""
    if seconds is None:
        return bounds.high
    return min(bounds.high, max(bounds.low if contended else 0.0, seconds))


@dataclass(frozen=True, slots=True, order=True)
class _Completed:
    """One latency; ordered by it, and then by when it came.

    Attributes:
        queued: seconds of it before the sequence was sent to an instance.
    """

    seconds: float
    number: int
    priority: int
    queued: float


class _Window:
    """The newest latencies of one kind, in order of arrival and of size."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._seen = 0
        self._newest: deque[_Completed] = deque()
        self._sorted: list[_Completed] = []
        self._counts: Counter[int] = Counter()
        self._last: dict[int, _Completed] = {}  # the newest in the window of each priority

    def add(self, priority: int, seconds: float, queued: float) -> None:
        self._seen += 1
        completed = _Completed(seconds, self._seen, priority, queued)
        self._newest.append(completed)
        insort(self._sorted, completed)
        self._counts[priority] += 1
        self._last[priority] = completed
        if len(self._newest) > self._size:
            oldest = self._newest.popleft()
            del self._sorted[bisect_left(self._sorted, oldest)]
            self._counts[oldest.priority] -= 1
            if self._last[oldest.priority] is oldest:
                del self._last[oldest.priority]

    def provisional(self, priority: int) -> float | None:
        """The latency at a priority's place in the window, without what its reference waited longer than the newest of
        the same priority did: a wave that is over. None when the window is empty."""
        if not self._sorted:
            return None
        higher = sum(count for other, count in self._counts.items() if other < priority)
        index = higher + self._counts[priority] // 2  # the middle of its class
        reference = self._sorted[min(index, len(self._sorted) - 1)]
        newest = self._last.get(priority)
        extra = 0.0 if newest is None else max(0.0, reference.queued - newest.queued)
        return max(0.0, reference.seconds - extra)
