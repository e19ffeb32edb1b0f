"""A long simulation cut into slices of time, which can be simulated beside each other.

A slice is about the requests that come in its time. It begins earlier, with those that came before them, so that its
own meet queues, batches and caches as they would be; and others go on coming after its own, until those are over. What
a cluster learned before the warm-up is not known in a slice: prefix caches need the longest one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf


@dataclass(frozen=True, slots=True)
class Slice:
    """
    Attributes:
        number: of it; 0 is the first.
        of: how many there are.
        seconds: of arrivals in all of them; only where there are several.
        warm_up: seconds of arrivals that it sees before its own and, at most, after them.
    """

    number: int
    of: int
    seconds: float
    warm_up: float

    @property
    def last(self) -> bool:
        return self.number + 1 == self.of

    @property
    def length(self) -> float:
        return self.seconds / self.of

    @property
    def begin(self) -> float:
        """It is about the arrivals of [begin, end), in seconds."""
        return self.seconds * self.number / self.of

    @property
    def end(self) -> float:
        return inf if self.last else self.seconds * (self.number + 1) / self.of

    @property
    def since(self) -> float:
        """It sees those of [since, until)."""
        return max(0.0, self.begin - self.warm_up)

    @property
    def until(self) -> float:
        return self.end + self.warm_up


WHOLE = Slice(0, 1, 0.0, 0.0)


def cut(seconds: float, count: int, warm_up: float) -> Iterator[Slice]:
    """All of them, in order."""
    return (Slice(number, count, seconds, warm_up) for number in range(count))
