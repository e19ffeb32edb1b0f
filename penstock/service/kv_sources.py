"""Where KV of a prompt is in the cluster, and whether an instance shall bring it from there: what the master knows for
`sched.cluster.reuse`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from heapq import nsmallest
from math import inf

from msgspec.structs import replace

from penstock.core.plan import BLOCK_TOKENS
from penstock.core.wire.engine import Source
from penstock.kv.index import ClusterIndex
from penstock.sched.cluster import Demand
from penstock.sched.cluster.base import Holder, Way
from penstock.sched.cluster.reuse import block_ms, cheapest
from penstock.service.mesh import may_fetch
from penstock.service.session import InstanceSession, Roster

COMPARED = 64  # instances to which what an interrupted sequence had may be brought: those that are idle first
FRESH = 4  # blocks that a peer may have filled since it told of any
LENDERS = 2  # that are named of a prompt: one more than whom an instance may not reach


class KVSources:
    """
    Args:
        index: of the caches; and `sessions` that serve now, by name; kept by the owner, as is their `roster`.
    """

    def __init__(self, index: ClusterIndex, sessions: Mapping[str, InstanceSession], roster: Roster) -> None:
        self._index, self._sessions, self._roster = index, sessions, roster
        self._lend_until: dict[str, float] = {}  # when each has sent what was ordered, as predicted

    def lenders(self, now: float, keys: Sequence[bytes]) -> list[Holder]:
        """Those that have most of a prompt on their devices, but for those that may have failed; first those that have
        the least to send to others.

        Args:
            keys: of its full blocks.
        """
        devices = self._index.on_devices(keys)
        while devices:
            most = max(devices.values())
            names = [name for name, blocks in devices.items() if blocks == most]
            able = [n for n in names if (s := self._sessions.get(n)) is not None and s.peer.address]
            able = [name for name in able if not self._sessions[name].silent(now)]
            if able:
                until = self._lend_until
                first = nsmallest(LENDERS, able, key=lambda name: (max(now, until.get(name, -inf)), name))
                return [Holder(name, most * BLOCK_TOKENS, until.get(name, -inf)) for name in first]
            devices = {name: blocks for name, blocks in devices.items() if blocks < most}
        return []

    def with_brought(self, now: float, demand: Demand, keys: Sequence[bytes]) -> Demand:
        """Let policies know what of an interrupted sequence each instance could bring from elsewhere, what failed ones
        left included."""
        if not demand.interrupted or not keys:
            return demand
        able = nsmallest(COMPARED, self._roster.able(now), key=lambda session: session.view().idle_at)
        return brought_by(demand, {s.name: self.way(now, demand, keys, s) for s in able})

    def way(self, now: float, demand: Demand, keys: Sequence[bytes], session: InstanceSession) -> Way:
        """How a prompt's KV comes to be on an instance soonest."""
        holders = [*self._peers(now, session, demand.lenders), *self._left(session, keys)]
        return cheapest(session.view(), now, brought_by(demand, {}), holders)

    def source(self, now: float, demand: Demand, way: Way, session: InstanceSession) -> Source | None:
        """What to tell the instance. From a peer it takes a little more than was known, if that is there by then."""
        if way.how == "recompute":
            return None
        worth = way.bring_ms + max(0.0, way.recompute_ms - way.ms)
        if not way.source:
            return Source(None, way.tokens // BLOCK_TOKENS, way.bring_ms, worth)
        holder = next(holder for holder in demand.lenders if holder.name == way.source)
        blocks = (way.tokens - min(way.tokens, demand.hits.get(session.name, 0))) // BLOCK_TOKENS
        sends = blocks * block_ms(session.view(), holder) / 1e3
        self._lend_until[way.source] = max(now, self._lend_until.get(way.source, -inf)) + sends
        most = min(way.tokens // BLOCK_TOKENS + FRESH, (demand.prompt_tokens - 1) // BLOCK_TOKENS)
        return Source(self._sessions[way.source].peer, most, way.bring_ms, worth)

    def forget(self, name: str) -> None:
        """An instance was lost."""
        self._lend_until.pop(name, None)

    def _peers(self, now: float, session: InstanceSession, lenders: Sequence[Holder]) -> Iterator[Holder]:
        """Those that it could fetch from, but for those that may have failed."""
        for holder in lenders:
            other = self._sessions.get(holder.name)
            if other is not None and not other.silent(now) and may_fetch(session, other):
                yield holder

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
