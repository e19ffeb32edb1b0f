"""Where KV of a prompt is in the cluster, and whether an instance shall bring it from there: what the master knows for
`sched.cluster.reuse`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from heapq import nsmallest

from msgspec.structs import replace

from penstock.core.plan import BLOCK_TOKENS
from penstock.core.wire.engine import Source
from penstock.kv.index import ClusterIndex
from penstock.sched.cluster import Demand
from penstock.sched.cluster.base import Way
from penstock.sched.cluster.reuse import Holder, cheapest
from penstock.service.mesh import may_fetch
from penstock.service.session import InstanceSession, Roster

COMPARED = 64  # instances to which what an interrupted sequence had may be brought: those that are idle first


class KVSources:
    """
    Args:
        index: of the caches; and `sessions` that serve now, by name; kept by the owner, as is their `roster`.
    """

    def __init__(self, index: ClusterIndex, sessions: Mapping[str, InstanceSession], roster: Roster) -> None:
        self._index, self._sessions, self._roster = index, sessions, roster

    def with_brought(self, now: float, demand: Demand, keys: Sequence[bytes]) -> Demand:
        """Let policies know what of an interrupted sequence each instance could bring from elsewhere.

        Args:
            keys: of its full blocks.
        """
        if not demand.interrupted or not keys:
            return demand
        devices = self._index.on_devices(keys)
        able = nsmallest(COMPARED, self._roster.able(now), key=lambda session: session.view().idle_at)
        return brought_by(demand, {s.name: self._way(now, demand, keys, s, devices) for s in able})

    def way(self, now: float, demand: Demand, keys: Sequence[bytes], session: InstanceSession) -> Way:
        """How a prompt's KV comes to be on an instance soonest. Arguments as of `with_brought`."""
        return self._way(now, demand, keys, session, self._index.on_devices(keys))

    def source(self, way: Way) -> Source | None:
        """What to tell the instance."""
        if way.how == "recompute":
            return None
        peer = self._sessions[way.source].peer if way.source else None
        return Source(peer, way.tokens // BLOCK_TOKENS, way.bring_ms)

    def _way(
        self,
        now: float,
        demand: Demand,
        keys: Sequence[bytes],
        session: InstanceSession,
        devices: Mapping[str, int],
    ) -> Way:
        holders = [*self._peers(now, session, devices), *self._left(session, keys)]
        return cheapest(session.view(), now, brought_by(demand, {}), holders)

    def _peers(self, now: float, session: InstanceSession, devices: Mapping[str, int]) -> Iterator[Holder]:
        """Those that it could fetch from, but for those that may have failed."""
        for name, blocks in devices.items():
            other = self._sessions.get(name)
            if other is not None and not other.silent(now) and may_fetch(session, other):
                yield Holder(name, blocks * BLOCK_TOKENS)

    def _left(self, session: InstanceSession, keys: Sequence[bytes]) -> Iterator[Holder]:
        """What lost instances left; only those who take part in hand-offs find it."""
        blocks = self._index.with_left(session.name, session.ready.kv_pool, keys) if session.peer.address else 0
        if blocks:
            yield Holder("", blocks * BLOCK_TOKENS)


def brought_by(demand: Demand, ways: Mapping[str, Way]) -> Demand:
    """With what instances bring, by these ways and by no others."""
    brought = {name: way for name, way in ways.items() if way.how != "recompute"}
    if not brought and not demand.brought:
        return demand
    return replace(
        demand,
        brought={name: way.tokens for name, way in brought.items()},
        brought_in={name: way.bring_ms / 1e3 for name, way in brought.items()},
    )
