"""What arrives at a ZMQ socket, told to a function inside the event loop, with no future per message between."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import zmq


class Inbox:
    """
    ZMQ's file descriptor tells that something changed, not that something is there, and to send may swallow what it
    would have told. So everything is read each time, and `look` is to be called after a send.

    Args:
        socket: nobody else reads it.
        read: gets the frames of every message, in order.
    """

    def __init__(self, socket: zmq.SyncSocket, read: Callable[[list[bytes]], None]) -> None:
        self._socket = socket
        self._read = read
        self._loop: asyncio.AbstractEventLoop | None = None

    def open(self) -> None:
        """Begin; call it inside the event loop."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket.FD, self.drain)
        self._loop.call_soon(self.drain)

    def close(self) -> None:
        """Read no more; call it before the socket is closed."""
        if self._loop is not None:
            self._loop.remove_reader(self._socket.FD)
            self._loop = None

    def look(self) -> None:
        """After a send: see to it that what has arrived meanwhile is read."""
        if self._loop is not None and int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._loop.call_soon(self.drain)

    def drain(self) -> None:
        """Read everything that is there."""
        while self._loop is not None:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._read(frames)
