"""Sequences that have a place at the master: where each is prefilled and decodes, and where it goes on."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from penstock.core.wire.master import Relocate
from penstock.sched.cluster import Migration, Resident
from penstock.sched.cluster.base import Key
from penstock.service.events import Action, ToFrontend
from penstock.service.fleet import Fleet
from penstock.service.queue import Tracked
from penstock.service.recorder import Recorder
from penstock.service.session import InstanceSession

SETTLES = 10.0  # seconds after which a hand-off counts as over although nothing was said of it


class PlacedSequences:
    """
    Args:
        recorder: gets every relocation.

    Attributes:
        sequences: all, by key.
        prefilled: those whose prompts have ended and of which it is open who decodes them.
    """

    def __init__(self, fleet: Fleet, recorder: Recorder | None) -> None:
        self._fleet, self._recorder = fleet, recorder
        self.sequences: dict[Key, Tracked] = {}
        self.prefilled: dict[Key, Tracked] = {}

    def begin(self, now: float, key: Key) -> Tracked | None:
        """Its first token has come. None when it has no place."""
        flight = self.sequences.get(key)
        if flight is not None:
            if flight.place.images:
                self._fleet.images.seen(key)
            flight.prefiller.prompt_done(now, key)
            flight.home.begin(key)
            flight.since = now
            if flight.open:
                self.prefilled[key] = flight
        return flight

    def end(self, now: float, key: Key) -> Tracked | None:
        """It is over, or goes on in another attempt. None when it has no place."""
        self.prefilled.pop(key, None)
        over = self.sequences.pop(key, None)
        if over is None:
            return None
        if over.place.images:
            self._fleet.images.seen(key)
        over.prefiller.prompt_done(now, key)
        over.home.leave(key)
        if over.place.keys:
            self._fleet.index.unexpect(over.prefiller.name, over.place.keys)
        return over

    def settle(self, key: Key, session: InstanceSession) -> None:
        """It is there, and is not being handed over."""
        flight = self.sequences[key]
        flight.moving = -inf
        self._rehouse(key, flight, session)

    @property
    def open(self) -> list[Resident]:
        """Those of which it is open who decodes them, and whose instance is there."""
        sessions = self._fleet.sessions
        return [f.resident for f in self.prefilled.values() if sessions.get(f.home.name) is f.home]

    def residents(self, now: float, name: str) -> Sequence[Resident]:
        """What decodes on an instance and is not being handed over."""
        session = self._fleet.sessions[name]
        flights = (self.sequences[k] for k in session.homes if k in session.begun and k not in self.prefilled)
        return [flight.resident for flight in flights if flight.moving < now]

    def relocate(self, now: float, migration: Migration) -> Action:
        """It is to go on there."""
        key, session = migration.key, self._fleet.sessions[migration.to]
        flight = self.sequences[key]
        self.prefilled.pop(key, None)
        flight.open = False
        if self._recorder is not None:
            self._recorder.relocated(now, flight.home.name, migration)
        if session is not flight.home:
            flight.moving = now + SETTLES
        self._rehouse(key, flight, session)
        return ToFrontend(key[0], Relocate(key[1], flight.place.generation, session.peer, migration.reason))

    def evacuate(self, now: float) -> list[Action]:
        """Have others take over what instances that drain still run: those with the most room first."""
        actions: list[Action] = []
        for session in self._fleet.sessions.values():
            if not session.leaving or not session.begun:
                continue
            for key in session.begun & self.prefilled.keys():  # the policy sees no instance that drains
                del self.prefilled[key]
            for resident in self.residents(now, session.name):
                able = [s for s in self._fleet.roster.able(now) if s.name in session.peers]
                if able := [s for s in able if s.takes(resident.demand)]:
                    to = max(able, key=lambda s: (s.view().free_blocks / s.view().num_blocks, s.name)).name
                    why = "is to stop" if session.drains else "is to sleep"
                    migration = Migration(key=resident.demand.key, to=to, reason=f"drain: {session.name} {why}")
                    actions.append(self.relocate(now, migration))
        return actions

    def _rehouse(self, key: Key, flight: Tracked, session: InstanceSession) -> None:
        """It decodes there from now on."""
        if flight.home is not session:
            began = key in flight.home.begun
            flight.home.leave(key)
            flight.home = session
            session.house(flight.demand)
            if began:
                session.begin(key)

    def check(self) -> None:
        """Raise AssertionError unless every sequence is counted once on each side."""
        for session in self._fleet.sessions.values():
            homes = {key for key, flight in self.sequences.items() if flight.home is session}
            assert session.homes.keys() == homes, "requests are miscounted"
            assert all(self.sequences[key].prefiller is session for key in session.prompts), "a request that is over"
        assert all(self.sequences.get(key) is flight for key, flight in self.prefilled.items()), "it is over"
