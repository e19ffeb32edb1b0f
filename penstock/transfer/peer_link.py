"""A link between two engines: a few non-blocking sockets that carry frames, and what the engine hears of it.

A `PeerConnection` is one socket of a link: a stream of bytes becomes frames, and frames a stream of bytes. A `PeerLink`
has all of them and chooses the one a message goes over. Everything here belongs to the carrier's I/O thread, except
that `Arrived.release` may be called from anywhere.
"""

from __future__ import annotations

import socket
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from zlib import crc32

from penstock.core.wire.engine import Peer
from penstock.core.wire.handoff import Commit, EmbeddingPart, PeerMessage, Push, Sent
from penstock.transfer.frames import HEADER_BYTES, MAX_BODY, MAX_GREETING, Frame, Handshake, Header, read_header
from penstock.transfer.tls import TLSSocket

_SCRATCH_BYTES = 16 << 10  # read ahead, for headers and small bodies
_BUFFERS = 256  # handed to one sendmsg; the kernel allows 1024
_NOTHING = memoryview(bytearray())
CONNECT_SECONDS = 1.5  # a peer may still be starting; after that the link is down
RETRY_SECONDS = 0.05  # before dialling again, then doubled

PeerKey = tuple[str, int]  # an instance's name and incarnation


class Arrived:
    """A received payload until it is landed. Its memory is returned when it is released or collected."""

    def __init__(self, buffer: bytearray, home: Staging) -> None:
        self.buffer: bytearray | None = buffer
        self._home = home

    def release(self) -> None:
        if self.buffer is not None:
            buffer, self.buffer = self.buffer, None
            self._home.put(buffer)

    def __del__(self) -> None:
        self.release()


class Staging:
    """The memory that one link's payloads may take while they wait to be landed: a slow engine slows its peer down.

    Each link has its own, so that a peer that stops in the middle of a block does not starve others.

    Args:
        freed: called, from any thread, when a buffer was returned after a failed request for one.
    """

    def __init__(self, slots: int, slot_bytes: int, freed: Callable[[], None]) -> None:
        self.slot_bytes = slot_bytes
        self._unmade = slots
        self._free: deque[bytearray] = deque()  # its pop and append are atomic
        self._wanted = False
        self._freed = freed

    def take(self) -> Arrived | None:
        self._wanted = True  # before looking: a buffer that comes back from here on is announced
        if self._free:
            buffer = self._free.pop()
        elif self._unmade:
            self._unmade -= 1
            buffer = bytearray(self.slot_bytes)
        else:
            return None
        self._wanted = False
        return Arrived(buffer, self)

    def put(self, buffer: bytearray) -> None:
        self._free.append(buffer)
        if self._wanted:
            self._freed()


@dataclass(slots=True)
class ReceivedFrame:
    header: Header
    body: bytearray
    payload: Arrived | None


class PeerConnection:
    """
    Attributes:
        handshake: how the two sides introduce themselves.
        link: None until the other side has greeted.
        index: which of the link's connections this is.
        shaking: the selector event that TLS waits for, before anybody speaks; 0 when it does not.
        ready: greeted both ways.
        starved: there is no staging memory for the next payload, so nothing is read.
        interest: selector events that it is registered for.
        backlog: bytes of frames that are still to be sent, without payloads: those lie in the pool in any case.
    """

    def __init__(self, sock: socket.socket, handshake: Handshake) -> None:
        self.sock: socket.socket | TLSSocket = sock
        self.handshake = handshake
        self.link: PeerLink | None = None
        self.index = 0
        self.connecting = self.ready = self.starved = self.closed = False
        self.shaking = self.interest = self.backlog = 0
        self._staging: Staging | None = None
        self._scratch = bytearray(_SCRATCH_BYTES)
        self._start = self._end = 0  # unread bytes of scratch
        self._header: Header | None = None
        self._body = bytearray()
        self._payload: Arrived | None = None
        self._target = _NOTHING  # what is still to be filled of the body or the payload
        self._out: deque[tuple[memoryview, int]] = deque()  # and how much of the backlog that is

    def accept_payloads(self, staging: Staging | None) -> None:
        self._staging = staging

    # --- in

    def read(self) -> Iterator[ReceivedFrame]:
        """Reads once. EOFError and OSError as the socket has them, ValueError on bad bytes."""
        views = [self._target, memoryview(self._scratch)[self._end :]]
        try:
            count = self.sock.recvmsg_into(views)[0]
        except BlockingIOError:  # what came was for TLS itself
            return iter(())
        if count == 0:
            raise EOFError("the other side closed it")
        straight = min(count, len(self._target))
        self._target = self._target[straight:]
        self._end += count - straight
        return self.frames()

    @property
    def pending(self) -> bool:
        """Whether there is something to read of which the selector does not tell."""
        return isinstance(self.sock, TLSSocket) and self.sock.pending

    def frames(self) -> Iterator[ReceivedFrame]:
        """What can be cut from the bytes that are here; goes on after a pause for want of staging memory."""
        self.starved = False
        while self._header is not None or self._end - self._start >= HEADER_BYTES:
            header = self._header = self._header or self._begin()
            self._fill()
            if self._target:
                break
            if header.payload and self._payload is None:
                assert self._staging is not None
                self._payload = self._staging.take()
                if self._payload is None:
                    self.starved = True
                    return
                assert self._payload.buffer is not None
                self._target = memoryview(self._payload.buffer)
                continue
            received = ReceivedFrame(header, self._body, self._payload)
            self._header = self._payload = None
            yield received
        left = self._end - self._start  # less than a header, or nothing
        self._scratch[:left] = self._scratch[self._start : self._end]
        self._start, self._end = 0, left

    def _begin(self) -> Header:
        header = read_header(memoryview(self._scratch)[self._start : self._start + HEADER_BYTES])
        self._start += HEADER_BYTES
        if header.body > (MAX_BODY if self.ready else MAX_GREETING):
            raise ValueError(f"a frame with a body of {header.body} bytes")
        if header.payload not in (0, self._staging.slot_bytes if self._staging else 0):
            raise ValueError(f"a frame with a payload of {header.payload} bytes")
        self._body = bytearray(header.body)
        self._target = memoryview(self._body)
        return header

    def _fill(self) -> None:
        count = min(len(self._target), self._end - self._start)
        self._target[:count] = memoryview(self._scratch)[self._start : self._start + count]
        self._target = self._target[count:]
        self._start += count

    # --- out

    @property
    def unsent(self) -> bool:
        return bool(self._out)

    def queue(self, frame: Frame) -> None:
        self._out.append((memoryview(frame.header + frame.body), frame.own_bytes))
        self.backlog += frame.own_bytes
        if frame.payload is not None:
            self._out.append((frame.payload, 0))

    def flush(self) -> int:
        """Hands the kernel what it takes without waiting; bytes. OSError when the connection has failed."""
        try:
            sent = self.sock.sendmsg([view for view, _ in islice(self._out, _BUFFERS)])
        except BlockingIOError:
            return 0
        left = sent
        while self._out and left >= len(self._out[0][0]):
            view, charged = self._out.popleft()
            left -= len(view)
            self.backlog -= charged
        if left:
            view, charged = self._out[0]
            self._out[0] = view[left:], charged
        return sent

    def close(self) -> None:
        self.closed = True
        self._out.clear()
        self.backlog = 0
        self._target, self._payload = _NOTHING, None
        self.sock.close()


@dataclass(frozen=True, slots=True)
class ReceivedMessage:
    """A message; for a push whose bytes came along also these, and their checksum as they arrived.

    Attributes:
        memory: where the peer's blocks lie, as it greeted.
    """

    peer: Peer
    message: PeerMessage
    payload: Arrived | None = None
    checksum: int = 0
    memory: str = ""


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
        memory: where the peer's blocks lie, once it has greeted.
        retry: seconds before dialling again.
    """

    def __init__(self, peer: Peer, number: int, sockets: int, dialled: bool, staging: Staging | None) -> None:
        self.peer = peer
        self.memory = ""
        self.number = number
        self.dialled = dialled
        self.staging = staging
        self.connections: list[PeerConnection | None] = [None] * sockets
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

    def connection_for(self, message: object) -> PeerConnection:
        """The connection that a message goes over."""
        index = 0
        if isinstance(message, Push | Sent | Commit | EmbeddingPart) and len(self.connections) > 1:
            index = 1 + crc32(message.lease.request_id.encode()) % (len(self.connections) - 1)
        connection = self.connections[index]
        assert connection is not None
        return connection
