"""Latencies of messages and blocks: between instances, between a device and the tiers below it, and of what failed
instances have left."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from math import inf
from typing import Literal, NamedTuple

from penstock.core.wire.engine import Peer
from penstock.core.wire.handoff import Commit, EmbeddingPart, PeerMessage, Push
from penstock.kv.connector import Move, Moved
from penstock.kv.depot import DepotSource
from penstock.kv.pool import Published
from penstock.sched.local.offload import Order, Store

TransportKind = Literal["shared", "copy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportModel:
    """How requests are handed over.

    Attributes:
        kind: "shared": a block only changes who holds it; "copy": its bytes travel.
        bandwidth: bytes per second into and out of each instance, of "copy".
        latency: seconds that any message takes.
        lease: seconds of silence after which a hand-off is over.
    """

    kind: TransportKind
    bandwidth: float
    latency: float
    lease: float


class PeerArrival(NamedTuple):
    """What a peer sent; see `sched.local.handoff.Arrival`."""

    peer: Peer
    message: PeerMessage


class Wires:
    """Of all instances. Each instance has one link out and one in, which transfer blocks in sequence."""

    def __init__(self, transport: TransportModel) -> None:
        self._transport = transport
        self._out: dict[str, float] = defaultdict(float)  # when the way out of an instance is free
        self._into: dict[str, float] = defaultdict(float)
        self._pushed: dict[tuple[str, str], float] = defaultdict(float)  # when the last block arrives

    def arrival(self, now: float, source: str, target: str, message: PeerMessage, size: int) -> float:
        """When a message that is sent now arrives, with a block or an embedding of so many bytes. A commit does not
        overtake the blocks before it. Embeddings always travel, as no pool has them."""
        latency = self._transport.latency
        travels = isinstance(message, EmbeddingPart) or (self._transport.kind == "copy" and isinstance(message, Push))
        if travels:
            start = max(now, self._out[source], self._into[target])
            self._out[source] = self._into[target] = start + size / self._transport.bandwidth
            at = self._out[source] + latency
            if isinstance(message, Push):
                self._pushed[source, target] = at
            return at
        if isinstance(message, Commit):
            return max(now + latency, self._pushed[source, target])
        return now + latency


class MemoryCarrier:
    """A `sched.local.handoff.HandoffTransport`: keeps messages until they are taken.

    Args:
        source: this instance's end of the pool that all share; None when blocks are copied.
    """

    def __init__(self, source: DepotSource | None) -> None:
        self._source = source
        self._sent: list[tuple[Peer, PeerMessage]] = []
        self._pulled: list[Moved] = []

    @property
    def shares(self) -> bool:
        return self._source is not None

    def send(self, peer: Peer, message: PeerMessage) -> None:
        self._sent.append((peer, message))

    def take(self) -> list[tuple[Peer, PeerMessage]]:
        """What was sent since the last call."""
        sent, self._sent = self._sent, []
        return sent

    def stamp(self, block: int) -> tuple[int, int]:
        return (0 if self._source is None else self._source.depot.generation(block)), 0

    def pull(self, arrival: PeerArrival, into: int) -> int:
        """A message takes as long as its block: what has arrived is there."""
        push = arrival.message
        assert isinstance(push, Push)
        if self._source is None:
            blocks: tuple[int, ...] = (into,)
        else:
            blocks = (push.block,) if self._source.hold([(push.block, push.generation)], [into]) else ()
        self._pulled.append(Moved(len(self._pulled), blocks, 0.0))
        return len(self._pulled) - 1

    def poll(self) -> list[Moved]:
        pulled, self._pulled = self._pulled, []
        return pulled


class LoadedBlocks(NamedTuple):
    """A completed load.

    Attributes:
        at: when; `seconds` that it took on the way.
    """

    at: float
    number: int
    blocks: int
    seconds: float


class RemappedBlocks(NamedTuple):
    """What was to be taken over from failed instances is looked at.

    Attributes:
        at: when.
    """

    at: float
    handle: int


class Orphan(NamedTuple):
    """A block that a failed instance has left, as it was then."""

    of: Published
    generation: int


class SharedOrphans:
    """What failed instances have left in the pool that all share, for one instance: a `sched.local.handoff.Orphans`. No
    bytes travel; each block is summed up before it is believed, one after the other.

    Args:
        left: by instance, and by key; kept by the owner.
        seconds: that a block takes.
    """

    def __init__(self, left: Mapping[str, Mapping[bytes, Orphan]], source: DepotSource, seconds: float) -> None:
        self._left, self._source, self._seconds = left, source, seconds
        self._handles = 0
        self._ordered: list[int] = []
        self._moves: dict[int, Sequence[Move]] = {}
        self._looked_at: list[int] = []
        self._free = 0.0  # when the next one can be looked at

    def find(self, keys: Sequence[bytes]) -> list[tuple[int, int] | None]:
        return [self._find(key) for key in keys]

    def _find(self, key: bytes) -> tuple[int, int] | None:
        for had in self._left.values():
            orphan = had.get(key)
            if orphan is not None and self._source.depot.generation(orphan.of.block) == orphan.generation:
                return orphan.of.block, orphan.generation  # and not that of another use since
        return None

    def pull(self, moves: Sequence[Move], source: None = None) -> int:
        self._handles += 1
        self._moves[self._handles] = moves
        self._ordered.append(self._handles)
        return self._handles

    def take(self, now: float) -> list[RemappedBlocks]:
        """When what was asked for since the last call is looked at."""
        found = []
        for handle in self._ordered:
            self._free = max(now, self._free) + self._seconds * len(self._moves[handle])
            found.append(RemappedBlocks(self._free, handle))
        self._ordered = []
        return found

    def looked_at(self, arrival: RemappedBlocks) -> None:
        self._looked_at.append(arrival.handle)

    def poll(self) -> list[Moved]:
        handles, self._looked_at = self._looked_at, []
        return [Moved(handle, self._hold(self._moves.pop(handle)), 0.0) for handle in handles]

    def _hold(self, moves: Sequence[Move]) -> tuple[int, ...]:
        """All of it, or if somebody was quicker, what is left of it."""
        if self._source.hold([(move.slot, move.generation) for move in moves], [move.block for move in moves]):
            return tuple(move.slot for move in moves)
        taken = takewhile(lambda move: self._source.hold([(move.slot, move.generation)], [move.block]), moves)
        return tuple(move.slot for move in taken)


class TierWay:
    """Between one instance's device and a tier below it.

    Args:
        seconds: that a block takes, either way.
    """

    def __init__(self, seconds: float) -> None:
        self._block = seconds
        self._in_free = self._out_free = 0.0  # when each way is
        self._stores: deque[tuple[float, int]] = deque()  # (over, number), in order

    def send(self, now: float, orders: Iterable[Order]) -> list[LoadedBlocks]:
        """Begin what is ordered. Returns when the loads of it will be there."""
        arrivals = []
        for order in orders:
            took = self._block * len(order.moves)
            if isinstance(order, Store):
                self._out_free = max(now, self._out_free) + took
                self._stores.append((self._out_free, order.number))
            else:
                self._in_free = max(now, self._in_free) + took
                arrivals.append(LoadedBlocks(self._in_free, order.number, len(order.moves), took))
        return arrivals

    def stored(self, now: float) -> list[int]:
        """Completed stores that were not returned yet."""
        over = []
        while self._stores and self._stores[0][0] <= now:
            over.append(self._stores.popleft()[1])
        return over

    def cut(self) -> list[int]:
        """Stores that will never be completed."""
        stores, self._stores = self._stores, deque()
        return [number for _, number in stores]

    @property
    def next_store(self) -> float:
        """When the next one is over; inf when none is under way."""
        return self._stores[0][0] if self._stores else inf
