"""A frontend's end of the wire to one engine."""

from __future__ import annotations

import zmq
import zmq.asyncio

from penstock.core.messages import Codec, Command, Event


class EngineLink:
    """Commands out, events in, in order.

    Args:
        address: the engine's ZMQ endpoint; it may be bound later.
    """

    def __init__(self, address: str) -> None:
        self._codec = Codec()
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 200)  # ms, for the last word
        self._socket.connect(address)

    def send(self, command: Command) -> None:
        """Queued at once; delivered when the engine is there."""
        self._socket.send(self._codec.encode(command))

    async def receive(self) -> Event:
        """The next event. Raises `msgspec.DecodeError` on what is none."""
        return self._codec.event(await self._socket.recv())

    def close(self) -> None:
        self._socket.close()
        self._context.term()
