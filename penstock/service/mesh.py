"""Which instance can hand over to which: peer links are made in advance, and retried when they fail."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import get_args

from penstock.core.wire.engine import LinkPeer, Peer, Role, UnlinkPeer
from penstock.sched.cluster import hands_over
from penstock.service.events import Action, Notice, ToEngine
from penstock.service.session import InstanceSession

RELINK_AFTER = 5.0  # seconds until a failed link is tried again
PROBATION = 1.0  # seconds without a failure until it is used again


@dataclass(slots=True)
class _Failure:
    """Of a link from one instance to another.

    Attributes:
        since: when it was told.
        retried: whether the instance was told to connect once more since.
    """

    since: float
    retried: bool = False


_Pair = tuple[str, str]  # instances: from, to


class Mesh:
    """
    Args:
        sessions: that serve now, by name; kept by the owner.
        everybody: whether every instance may hand over to every other, as roles change.
    """

    def __init__(self, sessions: Mapping[str, InstanceSession], *, everybody: bool) -> None:
        self._sessions = sessions
        self._everybody = everybody
        self._failed: dict[_Pair, _Failure] = {}

    def connect(self, session: InstanceSession) -> list[Action]:
        """Make the links that an instance should have, in both directions."""
        others: Iterable[InstanceSession] = self._sessions.values()
        if not self._everybody:  # without roles no instance may need a link: skip the scan
            mine = session.role
            linked = {role for role in get_args(Role) if hands_over(mine, role) or hands_over(role, mine)}
            others = [other for other in others if other.role in linked or _meet(session, other)]
        return [
            action
            for other in others
            if other is not session
            for action in (*self._connect(session, other), *self._connect(other, session))
        ]

    def _connect(self, source: InstanceSession, target: InstanceSession) -> list[Action]:
        name = target.name
        if not self._may_link(source, target) or name in source.links:
            return []
        if why := _mismatch(source, target):
            source.unlinked[name] = why
            return []
        source.links[name] = target.peer
        source.peers.add(name)
        return [ToEngine(source.name, LinkPeer(source.peer.incarnation, target.peer))]

    def _may_link(self, source: InstanceSession, target: InstanceSession) -> bool:
        """Whether one should be able to hand over to the other."""
        linkable = bool(source.peer.address and target.peer.address)
        return linkable and (self._everybody or hands_over(source.role, target.role) or _meet(source, target))

    def leave(self, name: str) -> list[Action]:
        """An instance was lost."""
        actions: list[Action] = []
        for other, session in self._sessions.items():
            if name in session.links:
                actions.append(ToEngine(other, UnlinkPeer(session.peer.incarnation, session.links[name])))
            session.disconnect(name)
        for pair in [pair for pair in self._failed if name in pair]:
            del self._failed[pair]
        return actions

    def fail(self, now: float, session: InstanceSession, peer: Peer, message: str) -> list[Action]:
        """An instance reports that its link to a peer has failed."""
        if session.links.get(peer.name) != peer:
            return []
        self._failed[session.name, peer.name] = _Failure(now)
        session.peers.discard(peer.name)
        session.unlinked[peer.name] = message
        return [Notice(f"{session.name} cannot hand over to {peer.name}: {message}")]

    def retry(self, now: float) -> list[Action]:
        """Retry failed links, and use again those that have held."""
        actions: list[Action] = []
        for (name, other), failure in list(self._failed.items()):
            source = self._sessions[name]
            if now - failure.since < RELINK_AFTER:
                continue
            if not failure.retried:
                failure.retried = True
                actions.append(ToEngine(name, LinkPeer(source.peer.incarnation, source.links[other])))
            elif now - failure.since >= RELINK_AFTER + PROBATION:
                del self._failed[name, other], source.unlinked[other]
                source.peers.add(other)
        return actions

    def check(self) -> None:
        """Raise AssertionError unless links are between those that are there."""
        for name, session in self._sessions.items():
            failed = {other for source, other in self._failed if source == name}
            assert session.peers == session.links.keys() - failed, "links are miscounted"
            assert session.links.keys() | session.unlinked.keys() <= self._sessions.keys(), "a link to nobody"


def _meet(one: InstanceSession, other: InstanceSession) -> bool:
    """Whether they wait for each other in every step, and so may have to give each other what they run."""
    return bool(one.ready.meets) and one.ready.meets == other.ready.meets


def may_fetch(here: InstanceSession, there: InstanceSession) -> bool:
    """Whether one can be sent blocks that the other has."""
    if here is there or not (here.peer.address and there.peer.address):
        return False
    return not (there.name in here.unlinked or here.name in there.unlinked or _mismatch(here, there))


def _mismatch(source: InstanceSession, target: InstanceSession) -> str:
    """How the KV layouts of two instances differ; "" when they do not."""
    mine, theirs = source.ready.layout, target.ready.layout
    if mine is None or theirs is None:
        return "it has no KV layout"
    if mine == theirs and source.ready.root_key != target.ready.root_key:
        return f"prefix keys: {source.ready.root_key.hex()} here, {target.ready.root_key.hex()} there"
    return "" if mine == theirs else mine.difference(theirs)
