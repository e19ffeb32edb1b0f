"""Links between engines: messages and blocks' bytes over sockets, on one I/O thread; the engine thread never waits.

A link is a few connections, dialled by one side and used by both. The first carries messages; pushes, and the commit
that must not overtake them, go over the others, each request always over the same one. The first connection
introduces the two sides (`Greet`), the others join once that went well. A link is lost as soon as one of its
connections is. Nothing is sent twice: undelivered messages of a lost link are lost, as the hand-off protocol expects.
"""

from __future__ import annotations

import logging
import os
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count

import msgspec
from xxhash import xxh3_64_intdigest

from penstock.core.errors import EngineFailure
from penstock.core.wire.engine import Peer
from penstock.core.wire.handoff import PeerMessage, decode_peer
from penstock.transfer.addresses import NO_ROOM, dial, listen, remove_socket_file, socket_file, tune
from penstock.transfer.frames import HEADER_BYTES, Frame, Greet, Handshake, Stranger, key_of, make_frame, read_greet
from penstock.transfer.io_thread import IOThread
from penstock.transfer.peer_link import (
    CONNECT_SECONDS,
    Counters,
    LinkDown,
    PeerConnection,
    PeerKey,
    PeerLink,
    ReceivedFrame,
    ReceivedMessage,
    Staging,
)
from penstock.transfer.tls import TLS, TLSSocket

log = logging.getLogger(__name__)

GREET_SECONDS = 3.0  # seconds for the greeting after a connection; longer than the dialler's own time-out
STAGING_BYTES = 32 << 20  # of received payloads per link, made as they are needed
MAX_SOCKETS = 64
BACKLOG_BYTES = 64 << 20  # of messages waiting for a peer; a link with more is lost
ACCEPT_PAUSE = 0.5  # seconds, when there are no descriptors
_READ, _WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE


class Carrier:
    """
    Args:
        me: our greeting; its address is where to listen.
        sockets: connections per link.
        payload_bytes: of a push's payload; 0 when no bytes travel.
        secret: the deployment's secret, see `Handshake`; None for trusted peers.
        tls: for every connection; None without.
    """

    def __init__(
        self, me: Greet, sockets: int, payload_bytes: int, secret: str | None = None, tls: TLS | None = None
    ) -> None:
        self._listener, address = listen(me.address)
        self._me = msgspec.structs.replace(me, address=address)
        self._socket_file = socket_file(address)
        self._sockets = sockets
        self._payload_bytes = payload_bytes
        self._key, self._tls = key_of(secret), tls
        self.address = address
        self.counters = Counters()
        self._links: dict[PeerKey, list[PeerLink]] = {}
        self._latest: dict[str, int] = {}  # name -> its latest incarnation that has greeted; they only grow
        self._numbers = count(1)
        self._connections: set[PeerConnection] = set()
        self._unflushed: set[PeerConnection] = set()
        self._arrived: deque[ReceivedMessage | LinkDown] = deque()
        self._told = 0  # arrivals that were announced
        self._news = 0  # arrivals so far
        self._arrival_event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closing = self._crowded = self._seen_stranger = False
        self._failure: BaseException | None = None
        self._io = IOThread(self._after_turn, self._ended)
        self._selector = self._io.selector
        self._selector.register(self._listener, _READ, self._accept)
        self._io.start()

    # --- the engine thread

    def connect(self, peer: Peer) -> None:
        self._io.do(partial(self._link, peer))

    def disconnect(self, peer: Peer) -> None:
        self._io.do(partial(self._unlink, peer))

    def send(self, peer: Peer, message: PeerMessage, payload: memoryview | None = None) -> None:
        """Queue a message; its payload is read when it is sent."""
        frame = make_frame(message, self._me.incarnation, peer.incarnation, payload)
        self._io.do(partial(self._send, peer, frame))

    def receive(self) -> list[ReceivedMessage | LinkDown]:
        if self._closing:
            return []
        if self._failure is not None:
            raise EngineFailure(f"the transfer thread failed: {self._failure!r}") from self._failure
        try:
            os.eventfd_read(self._arrival_event)
        except BlockingIOError:
            return []
        return [self._arrived.popleft() for _ in range(len(self._arrived))]

    def fileno(self) -> int:
        return self._arrival_event

    def close(self) -> None:
        if self._closing:
            return
        self._closing = True
        self._io.stop()
        os.close(self._arrival_event)

    # --- the I/O thread: everything below

    def _after_turn(self) -> None:
        self._flush_all()
        if self._told != self._news:
            self._told = self._news
            os.eventfd_write(self._arrival_event, 1)

    def _ended(self, error: BaseException | None) -> None:
        if error is not None:
            log.error("the transfer thread failed", exc_info=error)
            self._failure = error
            os.eventfd_write(self._arrival_event, 1)
        for connection in list(self._connections):
            self._drop_connection(connection)
        self._listener.close()
        remove_socket_file(self._socket_file)

    def _tell(self, news: ReceivedMessage | LinkDown) -> None:
        self._arrived.append(news)
        self._news += 1

    def _guard(self, connection: PeerConnection, step: Callable[[], None]) -> None:
        """An invalid frame or a socket error ends the connection, and with it its link."""
        try:
            if not connection.closed:
                step()
        except (OSError, EOFError, ValueError, msgspec.DecodeError) as error:
            self._broken(connection, error)

    # --- links

    def _link(self, peer: Peer) -> PeerLink | None:
        """The link to a peer, dialled if there is none. None, and a LinkDown, for an outdated incarnation."""
        key = (peer.name, peer.incarnation)
        if self._is_replaced(peer):
            message = f"{peer.name}: incarnation {peer.incarnation} was followed by {self._latest[peer.name]}"
            self._tell(LinkDown(peer, message))
            return None
        if key not in self._links:
            link = PeerLink(peer, next(self._numbers), self._sockets, True, self._staging())
            self._links[key] = [link]
            self._io.later(CONNECT_SECONDS, partial(self._give_up, link))
            self._dial(link, 0)
        return self._links[key][0] if key in self._links else None

    def _unlink(self, peer: Peer) -> None:
        self._flush_all()
        for link in self._links.pop((peer.name, peer.incarnation), []):
            self._end(link)

    def _send(self, peer: Peer, frame: Frame) -> None:
        link = self._link(peer)
        if link is None:
            self.counters.dropped["link_down"] += 1
        elif link.backlog > BACKLOG_BYTES:
            self.counters.dropped["link_down"] += 1
            self._lose(link, f"{peer.name} at {peer.address} does not read: {link.backlog >> 20} MiB wait for it")
        elif link.up:
            self._transmit(link.connection_for(frame.message), frame)
        else:
            link.hold(frame)

    def _staging(self) -> Staging | None:
        if not self._payload_bytes:
            return None
        slots = max(2 * self._sockets, STAGING_BYTES // self._payload_bytes)
        return Staging(slots, self._payload_bytes, partial(self._io.do, self._feed_starved))

    def _give_up(self, link: PeerLink) -> None:
        if not link.lost and not link.up:
            self._lose(link, f"{link.peer.name} at {link.peer.address} did not answer in time")

    def _lose(self, link: PeerLink, message: str, refused: bool = False) -> None:
        """A link was lost. The engine gets LinkDown, unless another link to the same incarnation is up."""
        if link.lost:
            return
        key = (link.peer.name, link.peer.incarnation)
        others = self._links.get(key, [])
        others.remove(link)
        if others:
            for frame in link.take_held():
                self._send(link.peer, frame)
        else:
            self._links.pop(key, None)
            self._tell(LinkDown(link.peer, message, refused))
        self._end(link)

    def _end(self, link: PeerLink) -> None:
        link.lost = True
        if held := link.take_held():
            self.counters.dropped["link_down"] += len(held)
        for connection in link.connections:
            if connection is not None:
                self._drop_connection(connection)

    # --- connections

    def _dial(self, link: PeerLink, index: int) -> None:
        if link.lost:
            return
        try:
            connection = PeerConnection(dial(link.peer.address), Handshake(self._key, dialled=True))
        except (OSError, ValueError) as error:  # a ValueError: no address at all
            self._undialled(link, index, error)
            return
        connection.link, connection.index, connection.connecting = link, index, True
        link.connections[index] = connection
        self._watch(connection)

    def _undialled(self, link: PeerLink, index: int, error: Exception) -> None:
        """A connection attempt failed; the peer may not listen yet."""
        link.connections[index] = None
        if index or isinstance(error, ValueError) or time.monotonic() + link.retry > link.deadline:
            self._lose(link, f"{link.peer.name} at {link.peer.address} cannot be reached: {error}")
            return
        self._io.later(link.retry, partial(self._dial, link, 0))
        link.retry *= 2

    def _accept(self, events: int) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError as error:
            if error.errno in NO_ROOM:
                if not self._crowded:
                    log.warning("no connection can be accepted for now: %s", error)
                self._crowded = True
                self._selector.unregister(self._listener)
                self._io.later(ACCEPT_PAUSE, partial(self._selector.register, self._listener, _READ, self._accept))
            return  # the connection is gone already
        self._crowded = False
        sock.setblocking(False)
        tune(sock)
        connection = PeerConnection(sock, Handshake(self._key, dialled=False))
        self._io.later(GREET_SECONDS, partial(self._send_away, connection))
        self._guard(connection, partial(self._connected, connection))
        self._watch(connection)

    def _connected(self, connection: PeerConnection) -> None:
        if self._tls is None:
            self._speak(connection)
            return
        assert isinstance(connection.sock, socket.socket)
        connection.sock = self._tls.over(connection.sock, dialled=connection.link is not None)
        self._shake_hands(connection)

    def _shake_hands(self, connection: PeerConnection) -> None:
        assert isinstance(connection.sock, TLSSocket)
        connection.shaking = connection.sock.shake_hands()
        if not connection.shaking:
            self._speak(connection)

    def _speak(self, connection: PeerConnection) -> None:
        """Say what this side says first, if anything."""
        if connection.link is not None:
            if connection.handshake.may_greet:
                self._greet(connection, connection.link.peer.incarnation)
        elif challenge := connection.handshake.first_word():
            self._transmit(connection, make_frame(challenge, 0, 0))

    def _send_away(self, connection: PeerConnection) -> None:
        if connection.link is None:
            self._drop_connection(connection)

    def _serve(self, connection: PeerConnection, events: int) -> None:
        self._guard(connection, partial(self._ready, connection, events))

    def _ready(self, connection: PeerConnection, events: int) -> None:
        if connection.connecting:
            assert isinstance(connection.sock, socket.socket)
            failed = connection.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if failed:
                raise OSError(failed, os.strerror(failed))
            connection.connecting = False
            self._connected(connection)
        elif connection.shaking:
            self._shake_hands(connection)
        elif events & _READ:
            self._take(connection, connection.read())
        if events & _WRITE and not connection.closed:
            self._unflushed.add(connection)
        self._watch(connection)

    def _take(self, connection: PeerConnection, frames: Iterator[ReceivedFrame]) -> None:
        while True:
            for received in frames:
                self._hear(connection, received)
                if connection.closed:
                    return
            if connection.starved or not connection.pending:
                return
            frames = connection.read()

    def _feed_starved(self) -> None:
        for connection in [c for c in self._connections if c.starved]:
            self._guard(connection, partial(self._take, connection, connection.frames()))
            self._watch(connection)

    def _watch(self, connection: PeerConnection) -> None:
        """Registers it for what it waits for."""
        if connection.closed:
            return
        self._connections.add(connection)
        interest = _WRITE if connection.connecting or connection.unsent else 0
        if not connection.connecting and not connection.starved:
            interest |= _READ
        if connection.shaking:
            interest = connection.shaking
        if interest == connection.interest:
            return
        if not interest:
            self._selector.unregister(connection.sock)
        elif connection.interest:
            self._selector.modify(connection.sock, interest, partial(self._serve, connection))
        else:
            self._selector.register(connection.sock, interest, partial(self._serve, connection))
        connection.interest = interest

    def _drop_connection(self, connection: PeerConnection) -> None:
        self._connections.discard(connection)
        self._unflushed.discard(connection)
        if connection.interest:
            self._selector.unregister(connection.sock)
            connection.interest = 0
        if not connection.closed:
            connection.close()

    def _broken(self, connection: PeerConnection, error: Exception) -> None:
        link = connection.link
        if link is not None and link.dialled and not connection.ready and isinstance(error, OSError):
            self._drop_connection(connection)
            self._undialled(link, connection.index, error)
            return
        who = link.peer.name if link else "a stranger"
        if isinstance(error, Stranger):
            self.counters.dropped["stranger"] += 1
            if not self._seen_stranger:
                log.warning("%s was turned away: %s; further ones are only counted", who, error)
            self._seen_stranger = True
        elif not isinstance(error, OSError | EOFError):
            self.counters.dropped["garbage"] += 1
            log.warning("broken bytes from %s: %s", who, error)
        self._drop_connection(connection)
        if link is not None:
            self._lose(link, f"link to {link.peer.name} at {link.peer.address} ended: {error}")

    # --- frames out

    def _greet(self, connection: PeerConnection, to: int) -> None:
        me = self._me
        if (link := connection.link) is not None:
            sockets = len(link.connections)
            me = msgspec.structs.replace(me, link=link.number, socket=connection.index, sockets=sockets)
        self._transmit(connection, make_frame(connection.handshake.seal(me, to), me.incarnation, to))

    def _transmit(self, connection: PeerConnection, frame: Frame) -> None:
        """Queue a frame for sending. Faults are injected after this."""
        if connection.closed:
            self.counters.dropped["link_down"] += 1
            return
        self.counters.frames_sent += 1
        connection.queue(frame)
        self._unflushed.add(connection)

    def _flush_all(self) -> None:
        while self._unflushed:
            connection = self._unflushed.pop()
            self._guard(connection, partial(self._flush, connection))

    def _flush(self, connection: PeerConnection) -> None:
        if connection.unsent and not connection.connecting and not connection.shaking:
            self.counters.bytes_sent += connection.flush()
        self._watch(connection)

    # --- frames in

    def _hear(self, connection: PeerConnection, received: ReceivedFrame) -> None:
        """A complete frame has arrived. Faults are injected before this."""
        header = received.header
        self.counters.frames_received += 1
        self.counters.bytes_received += HEADER_BYTES + header.body + header.payload
        if not header.intact(received.body):
            self.counters.dropped["corrupt"] += 1
        elif not connection.ready:
            self._greeted(connection, received)
        else:
            self._heard(connection, received)

    def _heard(self, connection: PeerConnection, received: ReceivedFrame) -> None:
        header, link = received.header, connection.link
        assert link is not None
        if (header.sender, header.to) != (link.peer.incarnation, self._me.incarnation):
            self.counters.dropped["stale"] += 1
            return
        message = decode_peer(received.body)
        if received.payload is None:
            self._tell(ReceivedMessage(link.peer, message, memory=link.memory))
            return
        assert received.payload.buffer is not None
        self._tell(ReceivedMessage(link.peer, message, received.payload, xxh3_64_intdigest(received.payload.buffer)))

    def _greeted(self, connection: PeerConnection, received: ReceivedFrame) -> None:
        """The other side has greeted: as an answer when this side dialled, else first."""
        known, body = connection.link, connection.handshake.open(received.body, received.header.to)
        if body is None:
            assert known is not None  # only the dialling side is challenged
            self._greet(connection, known.peer.incarnation)
            return
        greet = read_greet(body)
        if greet.incarnation != received.header.sender:
            raise ValueError(f"a greeting of {greet.incarnation} in a frame of {received.header.sender}")
        peer = Peer(greet.name, greet.incarnation, greet.address)
        refusal = (
            self._me.difference(greet)
            if isinstance(greet, Greet)
            else f"protocol: {self._me.protocol} here, {greet.protocol} there"
        )
        if known is not None and (known.peer.name, known.peer.incarnation) != (peer.name, peer.incarnation):
            self.counters.dropped["stale"] += 1
            self._lose(
                known,
                f"at {known.peer.address} is {peer.name}/{peer.incarnation} now, "
                f"not {known.peer.name}/{known.peer.incarnation}",
            )
        elif known is None and (received.header.to != self._me.incarnation or self._is_replaced(peer)):
            self.counters.dropped["stale"] += 1
            self._answer_and_close(connection, peer)
        elif refusal:
            log.warning("link with %s refused: %s", peer.name, refusal)
            if known is None:
                self._answer_and_close(connection, peer)
                self._tell(LinkDown(peer, refusal, True))
            else:
                self._lose(known, refusal, True)
        else:
            assert isinstance(greet, Greet)
            self._welcome(connection, greet, peer)

    def _is_replaced(self, peer: Peer) -> bool:
        return peer.incarnation < self._latest.get(peer.name, 0)

    def _answer_and_close(self, connection: PeerConnection, peer: Peer) -> None:
        self._greet(connection, peer.incarnation)
        self._guard(connection, partial(self._flush, connection))
        self._drop_connection(connection)

    def _welcome(self, connection: PeerConnection, greet: Greet, peer: Peer) -> None:
        self._follow(peer)
        link = connection.link
        if link is None:
            link = self._join(connection, greet, peer)
            self._greet(connection, peer.incarnation)
        connection.ready = True
        link.memory = greet.memory
        connection.accept_payloads(link.staging)
        if link.dialled and connection.index == 0:
            for index in range(1, len(link.connections)):
                self._dial(link, index)
        if link.up:
            for frame in link.take_held():
                self._transmit(link.connection_for(frame.message), frame)

    def _join(self, connection: PeerConnection, greet: Greet, peer: Peer) -> PeerLink:
        """The link that an accepted connection is part of. ValueError when it cannot be."""
        key = (peer.name, peer.incarnation)
        known = [k for k in self._links.get(key, []) if not k.dialled and k.number == greet.link]
        if greet.socket == 0 and not known and 0 < greet.sockets <= MAX_SOCKETS:
            link = PeerLink(peer, greet.link, greet.sockets, False, self._staging())
            self._links.setdefault(key, []).append(link)
            self._io.later(GREET_SECONDS, partial(self._give_up, link))
        elif known and 0 < greet.socket < len(known[0].connections) and known[0].connections[greet.socket] is None:
            link = known[0]
        else:
            raise ValueError(f"a greeting for connection {greet.socket} of {greet.sockets} of link {greet.link}")
        connection.link, connection.index = link, greet.socket
        link.connections[greet.socket] = connection
        return link

    def _follow(self, peer: Peer) -> None:
        """A new incarnation of a peer ends the links to its previous ones."""
        assert not self._is_replaced(peer)
        self._latest[peer.name] = peer.incarnation
        for name, before in list(self._links):
            if name == peer.name and before < peer.incarnation:
                for link in list(self._links[name, before]):
                    self._lose(link, f"{name}: incarnation {before} was followed by {peer.incarnation}")
