"""A peer that no transport of ours is, for what a transport does about such ones."""

import os
import socket

import msgspec

from penstock.transfer.addresses import dial
from penstock.transfer.frames import HEADER_BYTES, Greet, make_frame, read_greet, read_header
from tests.helpers.links import LAYOUT, End


def greet(end: End, kind: str, **changes) -> Greet:
    pool = f"{os.fstat(end.pool.memory.fd).st_dev}:{os.fstat(end.pool.memory.fd).st_ino}" if kind == "shared" else ""
    me = Greet(name="x", incarnation=9, address=end.peer.address, transport=kind, layout=LAYOUT, pool=pool)
    return msgspec.structs.replace(me, **changes)


class Stranger:
    """A peer that speaks bytes."""

    def __init__(self, where: str) -> None:
        self.sock = dial(where)
        self.sock.setblocking(True)
        self.sock.settimeout(10)

    def say(self, message, sender: int = 9, to: int = 1) -> None:
        frame = make_frame(message, sender, to)
        self.sock.sendall(frame.header + frame.body)

    def hear_greet(self) -> Greet:
        header = read_header(self.sock.recv(HEADER_BYTES, socket.MSG_WAITALL))
        return read_greet(self.sock.recv(header.body, socket.MSG_WAITALL))

    def is_sent_away(self) -> bool:
        try:
            while self.sock.recv(4096):
                pass
        except ConnectionError:
            pass
        return True
