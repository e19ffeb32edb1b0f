"""Who may be given work, and what policies see of them: kept from one view to the next, for little changes between two
and there may be a thousand instances."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf

from penstock.sched.cluster import InstanceLoad, Instances
from penstock.service.life import SUSPECT_AFTER, Life

DEAD_AFTER = 60.0  # seconds without a Snapshot after which it gets none although there is nobody else
REMEMBERED = 8  # changes of each instance, on average, after which what changed is forgotten


class Roster:
    """
    Args:
        lives: that serve now, by name; kept by whoever owns this, who says when one has come or gone.
        touched: names of lives of which something has changed, also that they were silent; they are given it, and it
            is emptied here.
    """

    def __init__(self, lives: Mapping[str, Life], touched: set[str]) -> None:
        self._lives, self._touched = lives, touched
        self._able: list[Life] = []
        self._loads: list[InstanceLoad] = []  # of those, in the same order
        self._history: list[int] = []  # places of those that changed; see `Instances`
        self._places: dict[str, int] = {}  # in both
        self._unseen: set[str] = set()  # touched since the last view
        self._oldest = -inf  # no report of these is older; -inf: they are to be found anew
        self._shortest = 0

    def lives_changed(self) -> None:
        """One has come or gone."""
        self._oldest = -inf

    def able(self, now: float) -> list[Life]:
        """Instances that may be given work. Silent ones are among them only when all are: a single engine in the middle
        of a long step still takes requests, for there is nobody else who could."""
        if now - self._oldest > SUSPECT_AFTER or any(map(self._is_misplaced, self._touched)):
            self._choose(now)
        self._unseen |= self._touched
        self._touched.clear()
        return self._able

    def loads(self, now: float) -> Instances:
        """What policies see of them, as it is now."""
        self.able(now)
        if len(self._history) > REMEMBERED * len(self._loads):
            self._history = []
        for name in self._unseen:
            place = self._places.get(name)
            if place is not None and (load := self._able[place].view()) is not self._loads[place]:
                self._loads[place] = load
                self._history.append(place)
        self._unseen.clear()
        return Instances(self._loads, self._history)

    @property
    def shortest(self) -> int:
        """The least `max_model_len` of them; 0 without any."""
        return self._shortest

    def _choose(self, now: float) -> None:
        taking = [life for life in self._lives.values() if not life.leaving]
        fresh = [life for life in taking if now - life.heard <= SUSPECT_AFTER]
        self._oldest = min((life.heard for life in fresh), default=-inf)
        self._able = fresh or [life for life in taking if now - life.heard <= DEAD_AFTER]
        self._loads, self._history = [life.view() for life in self._able], []
        self._places = {life.name: place for place, life in enumerate(self._able)}
        self._shortest = min((life.ready.max_model_len for life in self._able), default=0)

    def _is_misplaced(self, name: str) -> bool:
        """Whether one may be given work that was not, or the other way round."""
        life = self._lives.get(name)
        return life is not None and (name in self._places) == life.leaving

    def check(self) -> None:
        """Raise AssertionError unless what is kept is what would be found anew."""
        for place, life in enumerate(self._able):
            assert self._places[life.name] == place, "an instance is elsewhere"
            assert life.name in self._touched | self._unseen or self._loads[place] is life.load, (
                "policies see what is over"
            )
