"""Sequences that wait for a place at the master."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from penstock.core.wire.master import Place
from penstock.sched.cluster import Demand, Key


@dataclass(frozen=True, slots=True)
class Waiting:
    """One of them, with the question that brought it."""

    demand: Demand
    place: Place


class Queue(dict[Key, Waiting]):
    """In order of arrival.

    Args:
        shown: of how many, the first, policies are told; None is all.
    """

    def __init__(self, shown: int | None = None) -> None:
        super().__init__()
        self._shown = shown
        self._demands: Sequence[Demand] | None = ()

    @property
    def demands(self) -> Sequence[Demand]:
        """What policies see; it does not change."""
        if self._demands is None:
            self._demands = [waiting.demand for waiting in islice(self.values(), self._shown)]
        return self._demands

    def __setitem__(self, key: Key, waiting: Waiting) -> None:
        super().__setitem__(key, waiting)
        self._demands = None

    def pop(self, key: Key) -> Waiting | None:  # type: ignore[override]
        """None when it is not there."""
        waiting = super().pop(key, None)
        if waiting is not None:
            self._demands = None
        return waiting
