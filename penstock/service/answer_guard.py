"""Ends the answers of a frontend that was killed: the launcher holds a duplicate of each of its connections, so that
they stay open, and writes what makes the answer whole, an error.

The frontend notes in shared memory what may follow each number of bytes that it has written to a connection. How many
of them the kernel took is the kernel's to say, so nothing is added in the middle of what the frontend wrote: such a
connection, of a client that reads more slowly than tokens come, is only closed.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import socket
import struct
import termios
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final


class Next(IntEnum):
    """What may follow the bytes written so far."""

    NOTHING = 0  # no answer is due, or it is in the middle of a whole one
    ANSWER = 1  # to a request that was not answered yet
    EVENT = 2  # of a stream


CONNECTIONS = 1 << 14  # that are guarded at once; more are not guarded
NOTES = 8  # kept of each connection: as many writes may wait for the end of a turn of the event loop
_NOTE = struct.Struct("=Q")  # bytes written << 2 | Next; one store, which a kill does not tear
_ROW = NOTES * _NOTE.size  # bytes
_MESSAGE = struct.Struct("=BI")  # what, row
_OPENED, _CLOSED = 1, 2
_BYTES_ACKED = 120  # offset in Linux's tcp_info
_READ = 1 << 16


class AnswerLog:
    """The frontend's side.

    Args:
        link: to the launcher; see `AnswerGuard.link`.
        endings: what is written of it for `Next.ANSWER` and `Next.EVENT`, after which the connection is closed.
    """

    def __init__(self, link: socket.socket, endings: Sequence[bytes]) -> None:
        self._link = link
        self._free = list(range(CONNECTIONS))
        self._closed: list[int] = []  # rows of which the launcher is still to be told
        memory = os.memfd_create("penstock-answers")
        try:
            os.ftruncate(memory, CONNECTIONS * _ROW)
            self._map = mmap.mmap(memory, CONNECTIONS * _ROW)
            lengths = struct.pack("=II", *map(len, endings))
            socket.send_fds(link, [lengths + b"".join(endings)], [memory])
        finally:
            os.close(memory)
        link.setblocking(False)

    def open(self, connection: int) -> ConnectionLog | None:
        """
        Args:
            connection: file descriptor of a TCP connection on which nothing was written yet.

        Returns None when it cannot be guarded: there are too many, or the launcher does not take them now.
        """
        if not self._tell_closed() or not self._free:
            return None
        row = self._free.pop()
        self._map[row * _ROW : (row + 1) * _ROW] = bytes(_ROW)
        try:
            socket.send_fds(self._link, [_MESSAGE.pack(_OPENED, row)], [connection])
        except OSError:
            self._free.append(row)
            return None
        return ConnectionLog(self, self._map, row)

    def close(self, row: int) -> None:
        self._closed.append(row)
        self._tell_closed()

    def _tell_closed(self) -> bool:
        """Whether the launcher was told of all: a row is used again only then."""
        while self._closed:
            try:
                self._link.send(_MESSAGE.pack(_CLOSED, self._closed[-1]))
            except OSError:
                return False
            self._free.append(self._closed.pop())
        return True


class ConnectionLog:
    """Of one connection."""

    __slots__ = ("_at", "_log", "_map", "_row", "written")

    def __init__(self, log: AnswerLog, map_: mmap.mmap, row: int) -> None:
        self._log, self._map, self._row = log, map_, row
        self._at = 0  # of the newest note
        self.written = 0  # bytes

    def write(self, size: int, then: Next) -> None:
        """So many bytes more are about to be written, after which `then` may follow."""
        self.written += size
        self._at = (self._at + 1) % NOTES
        self.note(then)

    def note(self, then: Next) -> None:
        """`then` may follow what is written already."""
        _NOTE.pack_into(self._map, self._row * _ROW + self._at * _NOTE.size, self.written << 2 | then)

    def close(self) -> None:
        """The connection is about to be closed."""
        self._log.close(self._row)


@dataclass(slots=True)
class Ended:
    """How many answers were ended how.

    Attributes:
        cut: connections in the middle of a write, or whose clients had gone.
    """

    answers: int = 0
    streams: int = 0
    cut: int = 0

    @property
    def unfinished(self) -> int:
        return self.answers + self.streams + self.cut

    def __str__(self) -> str:
        """For the log."""
        return (
            f"{self.answers} requests without an answer, which got a 503, {self.streams} streams, which got an error, "
            f"and {self.cut} answers in the middle of a write, which were cut off"
        )


class AnswerGuard:
    """The launcher's side, for one incarnation of a frontend. Call `look` often: until then what the frontend has
    closed stays open here.

    Attributes:
        link: the other end of the connection, for the frontend; closed here once it has it.
    """

    def __init__(self) -> None:
        self._link, self.link = socket.socketpair()
        self._link.setblocking(False)
        self._received = b""
        self._held: dict[int, int] = {}  # row -> descriptor
        self._map: mmap.mmap | None = None
        self._endings: tuple[bytes, ...] = ()

    def look(self) -> None:
        """Take the connections that have come, and close those that the frontend has closed."""
        while True:
            try:
                data, descriptors, _, _ = socket.recv_fds(self._link, _READ, 1, socket.MSG_CMSG_CLOEXEC)
            except OSError:  # there is nothing
                return
            if not data:
                return
            if self._map is None:  # a message with descriptors is never read together with the next one
                self._begin(data, descriptors)
                continue
            self._received += data
            self._handle(descriptors)

    def _begin(self, data: bytes, descriptors: list[int]) -> None:
        answer, event = struct.unpack_from("=II", data)
        text = data[struct.calcsize("=II") :]
        self._endings = (b"", text[:answer], text[answer : answer + event])
        self._map = mmap.mmap(descriptors[0], CONNECTIONS * _ROW, prot=mmap.PROT_READ)
        os.close(descriptors[0])

    def _handle(self, descriptors: list[int]) -> None:
        whole = len(self._received) // _MESSAGE.size * _MESSAGE.size
        for what, row in _MESSAGE.iter_unpack(self._received[:whole]):
            if what == _OPENED and descriptors:  # none when this process has too many
                self._held[row] = descriptors.pop()
            elif what == _CLOSED and row in self._held:
                os.close(self._held.pop(row))
        self._received = self._received[whole:]

    def end(self) -> Ended:
        """The frontend has ended: end its answers and close its connections."""
        self.look()
        ended = Ended()
        for row, descriptor in self._held.items():
            with socket.socket(fileno=descriptor) as connection:
                self._end(connection, row, ended)
        self._held.clear()
        self.close()
        return ended

    def _end(self, connection: socket.socket, row: int, ended: Ended) -> None:
        then = self._next(connection, row)
        if then is Next.NOTHING:
            return
        if then is None or not self._write(connection, self._endings[then]):
            ended.cut += 1
        elif then is Next.ANSWER:
            ended.answers += 1
        else:
            ended.streams += 1

    def _write(self, connection: socket.socket, text: bytes) -> bool:
        """Whether the connection took all of it."""
        try:
            if connection.send(text, socket.MSG_DONTWAIT) != len(text):
                return False
        except OSError:
            return False
        with contextlib.suppress(OSError):  # what the client sent and nobody read would reset the connection
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(_READ, socket.MSG_DONTWAIT):
                pass
        return True

    def _next(self, connection: socket.socket, row: int) -> Next | None:
        """What may follow what the kernel has taken; None when that is no end of a write."""
        assert self._map is not None
        try:
            taken = sum(sent(connection))
        except OSError:
            return None
        for (note,) in _NOTE.iter_unpack(self._map[row * _ROW : (row + 1) * _ROW]):
            if note >> 2 == taken:
                return Next(note & 3)
        return None

    def close(self) -> None:
        """Without ending anything."""
        for descriptor in self._held.values():
            os.close(descriptor)
        self._held.clear()
        self._link.close()
        self.link.close()
        if self._map is not None:
            self._map.close()
            self._map = None


def sent(connection: socket.socket) -> tuple[int, int]:
    """Of the bytes that the kernel took for this connection, how many were acknowledged, and how many were not, sent
    or not. Raises OSError."""
    while True:
        acked = _acked(connection)
        waiting = struct.unpack("=i", fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, bytes(4)))[0]
        if acked == _acked(connection):  # else some were acknowledged in between
            return acked, int(waiting)


def _acked(connection: socket.socket) -> int:
    info: Final = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_ACKED + 8)
    if len(info) < _BYTES_ACKED + 8:
        raise OSError("the kernel does not count what was acknowledged")
    return int(struct.unpack_from("=Q", info, _BYTES_ACKED)[0])
