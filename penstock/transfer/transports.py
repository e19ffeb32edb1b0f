"""KV transports between engines: the interface, and the registry."""

from __future__ import annotations

import select
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from penstock.core.errors import ConfigError
from penstock.core.layout import KVLayout
from penstock.core.wire.engine import Peer
from penstock.core.wire.handoff import PeerMessage, Push
from penstock.kv.connector import KVConnector, Move, Moved
from penstock.transfer.carrier import Carrier
from penstock.transfer.faulty import Faults, FaultyCarrier
from penstock.transfer.frames import Greet
from penstock.transfer.mooncake import MooncakeBlocks
from penstock.transfer.peer_link import LinkDown, ReceivedMessage
from penstock.transfer.pool import KVPool
from penstock.transfer.shared import SharedBlocks
from penstock.transfer.tcp import CopiedBlocks
from penstock.transfer.tls import TLS


class BlockPath(KVConnector[ReceivedMessage], Protocol):
    """How a transport moves blocks: what is told of one that is pushed, and a connector that pulls those that peers
    told of. It has no push of its own: only the peer knows what it could believe, so its answer is what ends one.

    Attributes:
        shares: see `KVTransport`.
        sockets: connections per link.
        payload_bytes: that travel with a push.
        pool_name: see `Greet.pool`.
        memory: see `Greet.memory`.
    """

    shares: bool
    sockets: int
    payload_bytes: int
    pool_name: str
    memory: str

    def stamp(self, block: int) -> tuple[int, int]: ...
    def payload(self, block: int) -> memoryview | None: ...


class KVTransport:
    """How a request's KV gets from one engine to another: a carrier for messages, a path for blocks.

    The engine thread calls everything here and never waits for a peer; I/O is on the carrier's own thread. Messages may
    be lost, late, duplicated or out of order, and a link may end at any time. A message is never altered, and never
    from or for another incarnation of an engine.

    Attributes:
        address: where peers reach it; "unix:/path" or "tcp:host:port".
        shares: whether a pushed block stays the same physical block, so that the sender must not write to it again.
        counters: totals for the metrics.
    """

    def __init__(self, carrier: Carrier, path: BlockPath) -> None:
        self._carrier = carrier
        self._path = path
        self._bells = select.epoll()
        for bell in (carrier, path):
            self._bells.register(bell.fileno(), select.EPOLLIN)
        self.address = carrier.address
        self.shares = path.shares
        self.counters = carrier.counters

    def connect(self, peer: Peer) -> None:
        """Begin to make a link. Success is not reported; failure arrives as `LinkDown`, within about two seconds."""
        self._carrier.connect(peer)

    def disconnect(self, peer: Peer) -> None:
        """End the link, if there is one. The peer receives `LinkDown`, this side does not."""
        self._carrier.disconnect(peer)

    def send(self, peer: Peer, message: PeerMessage) -> None:
        """Queue a message, connecting if need be. A `Push` takes the block's bytes along, or the peer reads them, when
        they have to travel; so the block must not change until the peer has answered the commit."""
        self._carrier.send(peer, message, self._path.payload(message.block) if isinstance(message, Push) else None)

    def receive(self) -> list[ReceivedMessage | LinkDown]:
        """Everything that arrived since the last call. EngineFailure when the I/O thread has failed."""
        return self._carrier.receive()

    def fileno(self) -> int:
        """Readable when `receive` or `poll` has something."""
        return self._bells.fileno()

    def stamp(self, block: int) -> tuple[int, int]:
        """(generation, checksum) for a `Push` of one of our blocks, to be taken when it is complete."""
        return self._path.stamp(block)

    def pull(self, arrival: ReceivedMessage, into: int) -> int:
        """Begin to take a pushed block over, once per arrival. Returns a handle; `poll` tells the end.

        Args:
            arrival: of a `Push`.
            into: a block that we hold. It is the transport's until the pull is over, and may be exchanged for the
                pushed block, when that is shared.

        Raises:
            Unavailable: the KV pool server is lost.
        """
        push = arrival.message
        assert isinstance(push, Push)
        return self._path.pull([Move(into, push.block, push.key, push.generation, push.checksum)], arrival)

    def poll(self) -> list[Moved]:
        """Pulls that are over: each with the block that has the contents now, or with none when what came is corrupt or
        stale, or nothing came."""
        over = self._path.poll()
        if failed := sum(not moved.blocks for moved in over):
            self.counters.dropped["unverified"] += failed
        return over

    def close(self) -> None:
        """Close all links and release everything. Idempotent."""
        self._carrier.close()
        self._path.close()
        self._bells.close()


TRANSPORTS: dict[str, Callable[[KVPool, KVLayout, str], BlockPath]] = {
    "shared": SharedBlocks,
    "tcp": CopiedBlocks,
    "mooncake": MooncakeBlocks,
}


def open_transport(
    kind: str,
    address: str,
    name: str,
    incarnation: int,
    layout: KVLayout,
    pool: KVPool,
    faults: dict[str, Any] | None = None,
    secret: str | None = None,
    tls: Mapping[str, str] | None = None,
) -> KVTransport:
    """Listens at `address` ("tcp:HOST:0" takes any free port) and starts the I/O thread.

    Args:
        name, incarnation: of this engine.
        faults: see `faulty.Faults`; None without faults.
        secret: the deployment's secret; None where every peer that reaches the address is trusted.
        tls: arguments of `TLS`, for kind tcp; None without.

    Raises:
        ConfigError: an unknown kind or fault, an address that cannot be had, a pool that does not fit the kind,
            certificates that cannot be used.
    """
    if kind not in TRANSPORTS:
        raise ConfigError(f"transport: {kind!r}, allowed: {', '.join(TRANSPORTS)}", "transport")
    if tls is not None and kind != "tcp":
        raise ConfigError(f"transport.tls: allowed with tcp, and not with {kind}, whose blocks go another way", "tls")
    secured = None if tls is None else TLS(**tls)
    path = TRANSPORTS[kind](pool, layout, address)
    try:
        if path.shares and not address.startswith("unix:"):
            raise ConfigError(f"address: {address}, transport {kind} stays on one host: unix:/path", "address")
        me = Greet(
            name=name,
            incarnation=incarnation,
            address=address,
            transport=kind,
            layout=layout,
            pool=path.pool_name,
            memory=path.memory,
        )
        if faults is None:
            carrier = Carrier(me, path.sockets, path.payload_bytes, secret, secured)
        else:
            carrier = FaultyCarrier(me, path.sockets, path.payload_bytes, Faults.parse(faults), secret, secured)
    except BaseException:
        path.close()
        raise
    return KVTransport(carrier, path)
