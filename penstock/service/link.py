"""One end of the wire: to an engine, from a frontend or a master; to the master, from a frontend."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Generic, Literal, TypeVar

import msgspec
import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from penstock.core.clock import Clock
from penstock.core.wire import codec
from penstock.core.wire.engine import Command, Event, Hello, decode_event
from penstock.core.wire.master import FrontendMessage, Join, MasterMessage, decode_from_master
from penstock.service.instances import LinkLost

GREETING_INTERVAL = 1.0  # seconds; well within `core.wire.engine.LEASE`
RECONNECT_INTERVAL = 50  # ms
LINGER = 200  # ms, for the last word

Sent = TypeVar("Sent", bound=msgspec.Struct)
Received = TypeVar("Received")


class Link(Generic[Sent, Received]):
    """Messages out, messages in, in order. Greets the other side when it connects, and every second.

    Args:
        address: the other side's ZMQ endpoint; it may be bound later, and again after it was lost.
        sender: name of this side; the other side's answers find it by that.
        greet: incarnation of this side -> the message that says who is there and that it still lives. A connection is
            an incarnation: what the other side still had from the last one is void.
        decode: of what comes; raises `msgspec.DecodeError`.
    """

    def __init__(
        self,
        context: zmq.asyncio.Context,
        address: str,
        sender: str,
        greet: Callable[[int], Sent],
        decode: Callable[[bytes], Received],
        clock: Clock,
    ) -> None:
        self.connected = False
        self._greet_with = greet
        self._incarnation = time.time_ns()
        self._decode = decode
        self._clock = clock
        self._greeted = clock.now()
        self._arrived: deque[Received | LinkLost | msgspec.DecodeError] = deque()
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.ROUTING_ID, sender.encode())
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.LINGER, LINGER)
        self._socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_INTERVAL)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        self._poller = zmq.asyncio.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        # the same sockets, for reading everything that is there without waiting
        self._data_now: zmq.Socket[bytes] = zmq.Socket.shadow(self._socket)
        self._monitor_now: zmq.Socket[bytes] = zmq.Socket.shadow(self._monitor)
        self._socket.connect(address)

    def send(self, message: Sent) -> None:
        """Delivered in order, unless the connection is lost; then `receive` says so. Dropped where there is none."""
        if self.connected:
            self._socket.send(codec.encode(message))

    async def receive(self) -> Received | LinkLost:
        """The next message. Greetings are sent from here, so keep it awaited.

        Raises:
            msgspec.DecodeError: what came is no message.
        """
        while not self._arrived:
            self._greet_again()
            wait = GREETING_INTERVAL - (self._clock.now() - self._greeted)
            await self._poller.poll(max(1, int(wait * 1000)))
            self._collect()
        message = self._arrived.popleft()
        if isinstance(message, msgspec.DecodeError):
            raise message
        return message

    def close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close()

    def _greet_again(self) -> None:
        if self._clock.now() - self._greeted >= GREETING_INTERVAL:
            self._greet()

    def _greet(self) -> None:
        self._greeted = self._clock.now()
        self.send(self._greet_with(self._incarnation))

    def _collect(self) -> None:
        self._read_data()
        while (frames := _read(self._monitor_now)) is not None:
            event = parse_monitor_message(frames)["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.connected = True
                self._incarnation += 1
                self._greet()
            elif event == zmq.EVENT_DISCONNECTED:
                self._read_data()  # what had come before it was lost
                self.connected = False
                self._arrived.append(LinkLost("the connection was lost"))
        self._greet_again()  # also while messages come without a pause

    def _read_data(self) -> None:
        while (frames := _read(self._data_now)) is not None:
            try:
                self._arrived.append(self._decode(b"".join(frames)))
            except msgspec.DecodeError as error:
                self._arrived.append(error)


def _read(socket: zmq.Socket[bytes]) -> list[bytes] | None:
    """The next message, or None when none is there."""
    try:
        return socket.recv_multipart(zmq.NOBLOCK)
    except zmq.Again:
        return None


EngineLink = Link[Command, Event]
MasterLink = Link[FrontendMessage, MasterMessage]


def engine_link(
    context: zmq.asyncio.Context, address: str, sender: str, kind: Literal["frontend", "master"], clock: Clock
) -> EngineLink:
    return Link(context, address, sender, lambda life: Hello(sender, life, kind), decode_event, clock)


def master_link(context: zmq.asyncio.Context, address: str, sender: str, clock: Clock) -> MasterLink:
    return Link(context, address, sender, lambda life: Join(sender, life), decode_from_master, clock)
