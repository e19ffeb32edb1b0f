"""Who may be given work, and what policies see of them: kept from one view to the next, for little changes between two
and there may be a thousand instances."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf

from penstock.sched.cluster import InstanceLoad, Instances
from penstock.service.session import SUSPECT_AFTER, InstanceSession

DEAD_AFTER = 60.0  # seconds without a Snapshot after which it gets none although there is nobody else
REMEMBERED = 8  # changes of each instance, on average, after which what changed is forgotten


class Roster:
    """
    Args:
        sessions: that serve now, by name; kept by whoever owns this, who says when one has come or gone.
        touched: names of sessions of which something has changed, also that they were silent; they are given it, and it
            is emptied here.
    """

    def __init__(self, sessions: Mapping[str, InstanceSession], touched: set[str]) -> None:
        self._sessions, self._touched = sessions, touched
        self._able: list[InstanceSession] = []
        self._loads: list[InstanceLoad] = []  # of those, in the same order
        self._history: list[int] = []  # places of those that changed; see `Instances`
        self._places: dict[str, int] = {}  # in both
        self._unseen: set[str] = set()  # touched since the last view
        self._oldest = -inf  # no report of these is older; -inf: they are to be found anew
        self._shortest = 0

    def sessions_changed(self) -> None:
        """One has come or gone."""
        self._oldest = -inf

    def able(self, now: float) -> list[InstanceSession]:
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
        taking = [session for session in self._sessions.values() if not session.leaving]
        fresh = [session for session in taking if now - session.heard <= SUSPECT_AFTER]
        self._oldest = min((session.heard for session in fresh), default=-inf)
        self._able = fresh or [session for session in taking if now - session.heard <= DEAD_AFTER]
        self._loads, self._history = [session.view() for session in self._able], []
        self._places = {session.name: place for place, session in enumerate(self._able)}
        self._shortest = min((session.ready.max_model_len for session in self._able), default=0)

    def _is_misplaced(self, name: str) -> bool:
        """Whether one may be given work that was not, or the other way round."""
        session = self._sessions.get(name)
        return session is not None and (name in self._places) == session.leaving

    def check(self) -> None:
        """Raise AssertionError unless what is kept is what would be found anew."""
        for place, session in enumerate(self._able):
            assert self._places[session.name] == place, "an instance is elsewhere"
            assert session.name in self._touched | self._unseen or self._loads[place] is session.load, (
                "policies see what is over"
            )
