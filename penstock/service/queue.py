"""Sequences that wait for a place at the master: under overload ten thousands, so little here goes through them all."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from penstock.core.wire.master import Place
from penstock.sched.cluster import Demand, Key, ViewQueue

REMEMBERED = 8  # comings and goings for each who waits, and at least MEMORY, after which they are forgotten
MEMORY = 256


@dataclass(frozen=True, slots=True)
class Waiting:
    """One of them, with the question that brought it."""

    demand: Demand
    place: Place


class Queue(dict[Key, Waiting]):
    """In order of arrival. Whoever comes again has to be taken out before.

    Args:
        shown: of how many, the first, policies are told; None is all.
    """

    def __init__(self, shown: int | None = None) -> None:
        super().__init__()
        self._shown = shown
        self._demands: Sequence[Demand] | None = ()
        self._line: list[Demand] = []
        self._history: list[Demand | int] = []  # see `ViewQueue`
        self._order: list[int] = []  # their numbers, which rise
        self._numbers: dict[Key, int] = {}
        self._came = 0
        self._longest = 0  # tokens of the longest that has come since nobody was here
        self._picky: dict[Key, None] = {}  # those that exclude an instance

    @property
    def demands(self) -> Sequence[Demand]:
        """What policies see; it does not change."""
        if self._demands is None:
            if len(self._history) > max(MEMORY, REMEMBERED * len(self._line)):
                self._history = []
            whole = self._shown is None
            self._demands = ViewQueue(self._line, self._history) if whole else self._line[: self._shown]
        return self._demands

    def doubtful(self, shortest: int) -> Iterable[Key]:
        """Those for which not every instance will do.

        Args:
            shortest: no instance takes fewer tokens.
        """
        if self._longest <= shortest:
            return list(self._picky)
        return [key for key, waiting in self.items() if waiting.demand.tokens > shortest or waiting.demand.exclude]

    def __setitem__(self, key: Key, waiting: Waiting) -> None:
        assert key not in self
        super().__setitem__(key, waiting)
        self._demands = None
        self._numbers[key] = self._came
        self._order.append(self._came)
        self._line.append(waiting.demand)
        self._history.append(waiting.demand)
        self._came += 1
        self._longest = max(self._longest, waiting.demand.tokens)
        if waiting.demand.exclude:
            self._picky[key] = None

    def pop(self, key: Key) -> Waiting | None:  # type: ignore[override]
        """None when it is not there."""
        waiting = super().pop(key, None)
        if waiting is not None:
            self._demands = None
            place = bisect_left(self._order, self._numbers.pop(key))
            del self._order[place], self._line[place]
            self._history.append(place)
            self._picky.pop(key, None)
            if not self:
                self._longest = 0
        return waiting

    def check(self) -> None:
        """Raise AssertionError unless everything is about those that wait."""
        assert self._line == [waiting.demand for waiting in self.values()]
        assert self._order == [self._numbers[key] for key in self] == sorted(self._numbers.values())
        assert list(self._picky) == [key for key, waiting in self.items() if waiting.demand.exclude]
        assert all(waiting.demand.tokens <= self._longest for waiting in self.values())
