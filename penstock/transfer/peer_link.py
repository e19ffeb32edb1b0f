"""A link between two engines' transports, and its events for the engine."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from zlib import crc32

from penstock.core.wire.engine import Peer
from penstock.core.wire.handoff import Commit, PeerMessage, Push
from penstock.transfer.connection import Connection, Staged, Staging
from penstock.transfer.frames import Frame

CONNECT_SECONDS = 1.5  # a peer may still be starting; after that the link is down
RETRY_SECONDS = 0.05  # before dialling again, then doubled

PeerKey = tuple[str, int]  # an instance's name and incarnation


@dataclass(frozen=True, slots=True)
class ReceivedMessage:
    """A message; for a push whose bytes came along also these, and their checksum as they arrived."""

    peer: Peer
    message: PeerMessage
    payload: Staged | None = None
    checksum: int = 0


@dataclass(frozen=True, slots=True)
class LinkDown:
    """The link to a peer ended, or none could be made. `refused`: the two cannot exchange blocks, now or later."""

    peer: Peer
    message: str
    refused: bool = False


@dataclass(slots=True)
class Counters:
    """Totals since the start. `dropped`: reason -> frames."""

    frames_sent: int = 0
    frames_received: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    dropped: Counter[str] = field(default_factory=Counter)


class PeerLink:
    """
    Attributes:
        number: chosen by the side that dialled.
        retry: seconds before dialling again.
    """

    def __init__(self, peer: Peer, number: int, sockets: int, dialled: bool, staging: Staging | None) -> None:
        self.peer = peer
        self.number = number
        self.dialled = dialled
        self.staging = staging
        self.connections: list[Connection | None] = [None] * sockets
        self._pending: list[Frame] = []  # what waits for the link to be up
        self._pending_bytes = 0
        self.retry = RETRY_SECONDS
        self.deadline = time.monotonic() + CONNECT_SECONDS
        self.lost = False

    @property
    def up(self) -> bool:
        return all(connection is not None and connection.ready for connection in self.connections)

    @property
    def backlog(self) -> int:
        """Bytes that wait for the peer, without payloads."""
        return self._pending_bytes + sum(c.backlog for c in self.connections if c is not None)

    def hold(self, frame: Frame) -> None:
        """Keep a frame until the link is up; dropped when it is lost."""
        self._pending.append(frame)
        self._pending_bytes += frame.own_bytes

    def take_held(self) -> list[Frame]:
        held, self._pending, self._pending_bytes = self._pending, [], 0
        return held

    def lane(self, message: object) -> Connection:
        """The connection that a message goes over."""
        index = 0
        if isinstance(message, Push | Commit) and len(self.connections) > 1:
            index = 1 + crc32(message.lease.request_id.encode()) % (len(self.connections) - 1)
        connection = self.connections[index]
        assert connection is not None
        return connection
