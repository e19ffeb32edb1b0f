"""What a priority is worth in seconds, from what was achieved lately (HFX, Algorithm 3; arXiv 2508.15919, 3.3.2).

The last completed latencies are sorted. Sequences of higher priority take the first of them, as many as there were of
these lately, and a class its share after those, in the order in which its sequences wait; so the higher a priority, the
lower the quantile that it is promised.
Targets follow the load, between the bounds of each class: in an idle cluster the lowest class gets the low bound, and
under competition the high one.

There, the low bound is lifted while no higher priority waits, so that an idle cluster serves its lowest class as fast
as it can. Here it always holds. Whatever can be served at once is served at once anyway; and a target that follows what
was achieved below what anybody asked for is one that most miss by definition, and a request that misses it is put
behind all others: with HFX's dispatch, targets would fall until almost nothing is admitted. No priority is higher than
the highest, whose bound would never hold, so that it falls first. docs/scheduling.md has figures.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass

from penstock.core.errors import ConfigError
from penstock.core.service_level import Bounds, Range

WINDOW = 512  # completed sequences


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

    def target(self, priority: int, ahead: int) -> tuple[float, float]:
        bounds = self._bounds[min(self._bounds, key=lambda p: (abs(p - priority), p))]
        return (
            _within(bounds.ttft, self._ttfts.provisional(priority, ahead)),
            _within(bounds.tpot, self._tpots.provisional(priority, ahead)),
        )


def _within(bounds: Range, seconds: float | None) -> float:
    """A target in its bounds; before anything was measured, the easiest."""
    return bounds.high if seconds is None else min(bounds.high, max(bounds.low, seconds))


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

    def provisional(self, priority: int, ahead: int) -> float | None:
        """The latency at a sequence's place in the window, without what its reference waited longer than the newest of
        the same priority did: a wave that is over. None when the window is empty.

        Args:
            ahead: sequences of the same priority that wait before it.
        """
        if not self._sorted:
            return None
        higher = sum(count for other, count in self._counts.items() if other < priority)
        index = higher + min(ahead, max(0, self._counts[priority] - 1))  # not beyond its own class
        reference = self._sorted[min(index, len(self._sorted) - 1)]
        newest = self._last.get(priority)
        extra = 0.0 if newest is None else max(0.0, reference.queued - newest.queued)
        return max(0.0, reference.seconds - extra)
