"""A peer that no transport of ours is, for what a transport does about such ones."""

import os
import select
import socket
from selectors import EVENT_READ, EVENT_WRITE

import msgspec

from penstock.transfer.addresses import dial
from penstock.transfer.frames import HEADER_BYTES, Greet, make_frame, read_greet, read_header
from penstock.transfer.tls import TLS as Certified
from tests.helpers.certificates import certificate
from tests.helpers.links import LAYOUT, TLS, End


def greet(end: End, kind: str, **changes) -> Greet:
    pool = f"{os.fstat(end.pool.memory.fd).st_dev}:{os.fstat(end.pool.memory.fd).st_ino}" if kind == "shared" else ""
    kind = "tcp" if kind == TLS else kind
    me = Greet(name="x", incarnation=9, address=end.peer.address, transport=kind, layout=LAYOUT, pool=pool)
    return msgspec.structs.replace(me, **changes)


def under(kind: str, sock: socket.socket, dialled: bool) -> socket.socket:
    """A connected socket as this kind speaks, which waits."""
    select.select([], [sock], [], 10)
    sock.setblocking(False)
    if kind == TLS:
        secure = Certified(**certificate()).over(sock, dialled)
        while event := secure.shake_hands():
            select.select(*([secure] if event == way else [] for way in (EVENT_READ, EVENT_WRITE)), [], 10)
        sock = secure._sock
    sock.settimeout(10)
    return sock


def hear(sock: socket.socket) -> tuple[bytes, bytes]:
    """A frame's header and body."""
    header = _exactly(sock, HEADER_BYTES)
    return header, _exactly(sock, read_header(header).body)


def _exactly(sock: socket.socket, count: int) -> bytes:
    found = b""  # MSG_WAITALL is nothing to TLS
    while len(found) < count and (more := sock.recv(count - len(found))):
        found += more
    return found


class Stranger:
    """A peer that speaks bytes.

    Args:
        kind: of the transport; under TLS it has a certificate.
    """

    def __init__(self, where: str, kind: str) -> None:
        self.sock = under(kind, dial(where), dialled=True)

    def say(self, message, sender: int = 9, to: int = 1) -> None:
        frame = make_frame(message, sender, to)
        self.sock.sendall(frame.header + frame.body)

    def hear_greet(self) -> Greet:
        return read_greet(hear(self.sock)[1])

    def is_sent_away(self) -> bool:
        try:
            while self.sock.recv(4096):
                pass
        except ConnectionError:
            pass
        return True
