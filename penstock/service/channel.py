"""One end of the wire: to an engine, from a frontend or a master; to the master, from a frontend."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

import msgspec
import zmq
from zmq.utils.monitor import parse_monitor_message

from penstock.core.clock import Clock
from penstock.core.host_port import has_ipv6
from penstock.core.wire import codec
from penstock.core.wire.engine import Command, Event, Hello, decode_event
from penstock.core.wire.master import (
    AskHistory,
    AskMembers,
    AskOverview,
    Endpoint,
    FromMaster,
    FrontendMessage,
    Join,
    decode_from_master,
)
from penstock.service.instances import Change, ChannelLost, InstanceJoined

if TYPE_CHECKING:
    from penstock.service.curve import Curve

log = logging.getLogger("penstock.channel")
GREETING_INTERVAL = 1.0  # seconds; well within `core.wire.engine.LEASE`
RECONNECT_INTERVAL = 50  # ms
LINGER = 200  # ms for sending the remaining messages after `close`

HEARTBEAT = 1000  # ms between two signs of life on a link to another host
DEAD_AFTER = 4000  # ms without one after which it is lost
CONNECT_TIMEOUT = 2000  # ms

Sent = TypeVar("Sent", bound=msgspec.Struct)
Received = TypeVar("Received")


class Inbox:
    """Reads a ZMQ socket inside the event loop and hands each message to a function, without a future between.

    ZMQ's file descriptor says that something has changed, not that a message is there, and a send may consume that
    signal. So everything is read each time, and `look` is to be called after a send.

    Args:
        socket: read by this inbox only.
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
        """Call after a send: schedules reading of messages that arrived meanwhile."""
        if self._loop is not None and int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._loop.call_soon(self.drain)

    def drain(self) -> None:
        """Read all available messages. Those that arrive meanwhile wait for the next turn of the event loop. One that
        cannot be handled is logged, and the others are handled all the same; none is after `close`."""
        arrived: list[list[bytes]] = []
        try:
            while self._loop is not None:
                arrived.append(self._socket.recv_multipart(zmq.NOBLOCK))
        except zmq.Again:
            pass
        for frames in arrived:
            if self._loop is None:
                return
            try:
                self._read(frames)
            except Exception:
                log.exception("a message could not be handled")


def make_context() -> zmq.SyncContext:
    """With sockets for any number of instances: each takes three, and ZMQ's default is 1,023."""
    context = zmq.Context()
    context.set(zmq.MAX_SOCKETS, context.get(zmq.SOCKET_LIMIT))
    return context


def prepare(socket: zmq.Socket[Any], address: str, curve: Curve | None) -> None:
    """For a socket that is about to connect there."""
    if curve is not None:
        curve.connect(socket)
    socket.setsockopt(zmq.IPV6, has_ipv6(address))
    if not address.startswith("ipc:"):  # the other host, or a cable, may fail without a word
        socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, DEAD_AFTER)
        socket.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_TIMEOUT)


def _not_opened(message: object) -> None:
    raise AssertionError("a message came before the channel was opened")


class Channel(Generic[Sent, Received]):
    """Messages out, messages in, in order. Greets the other side when it connects, and every second from `open` on.

    Args:
        address: the other side's ZMQ endpoint; it may be bound later, and again after it was lost. "" for nowhere yet.
        sender: name of this side; the other side's answers find it by that.
        greet: incarnation of this side -> the message that registers it and shows that it is alive. A connection is an
            incarnation: the other side discards what it had from the last one.
        decode: of what comes; raises `msgspec.DecodeError`.
        curve: of the deployment; None where its links need no protection.
    """

    def __init__(
        self,
        context: zmq.SyncContext,
        address: str,
        sender: str,
        greet: Callable[[int], Sent],
        decode: Callable[[bytes], Received],
        clock: Clock,
        curve: Curve | None = None,
    ) -> None:
        self.connected = False
        self._greet_with = greet
        self._incarnation = time.time_ns()
        self._decode = decode
        self._clock = clock
        self._greeted = clock.now()
        self._greeting: asyncio.TimerHandle | None = None
        self._handle: Callable[[Received | ChannelLost | msgspec.DecodeError], None] = _not_opened
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.ROUTING_ID, sender.encode())
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.LINGER, LINGER)
        self._socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_INTERVAL)
        self._address = address
        prepare(self._socket, address, curve)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        self._data = Inbox(self._socket, self._on_data)
        self._events = Inbox(self._monitor, self._on_connection)
        if address:
            self._socket.connect(address)

    def move(self, address: str) -> None:
        """Connect elsewhere from now on; nowhere with ""."""
        if address == self._address:
            return
        before, self._address, self.connected = self._address, address, False
        if address:
            self._socket.setsockopt(zmq.IPV6, has_ipv6(address))
            self._socket.connect(address)
        if before:
            self._socket.disconnect(before)
            self._handle(ChannelLost("it is elsewhere now" if address else "there is none now"))

    def open(self, handle: Callable[[Received | ChannelLost | msgspec.DecodeError], None]) -> None:
        """Begin; call it inside the event loop. From now on the channel greets, until it is closed.

        Args:
            handle: gets every message as it arrives; `ChannelLost` when the connection ends, after everything that
                came before; and the error of a message that could not be decoded. It raises nothing.
        """
        self._handle = handle
        self._data.open()
        self._events.open()
        self._greet_again()

    def send(self, message: Sent) -> None:
        """Send in order; a lost connection is reported to the handler. Dropped without a connection."""
        if self.connected:
            self._socket.send(codec.encode(message))
            self._data.look()

    def close(self) -> None:
        if self._greeting is not None:
            self._greeting.cancel()
        self._data.close()
        self._events.close()
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close()

    def _greet_again(self) -> None:
        wait = GREETING_INTERVAL - (self._clock.now() - self._greeted)
        if wait <= 0:
            self._greet()
            wait = GREETING_INTERVAL
        self._greeting = asyncio.get_running_loop().call_later(wait, self._greet_again)

    def _greet(self) -> None:
        self._greeted = self._clock.now()
        self.send(self._greet_with(self._incarnation))

    def _on_connection(self, frames: list[bytes]) -> None:
        event = parse_monitor_message(frames)["event"]
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self.connected = True
            self._incarnation += 1
            self._greet()
        elif event == zmq.EVENT_DISCONNECTED:
            self._data.drain()  # what had come before it was lost
            self.connected = False
            self._handle(ChannelLost("the connection was lost"))

    def _on_data(self, frames: list[bytes]) -> None:
        try:
            message = self._decode(b"".join(frames))
        except msgspec.DecodeError as error:
            self._handle(error)
            return
        self._handle(message)


EngineChannel = Channel[Command, Event]
MasterChannel = Channel[FrontendMessage | AskMembers | AskOverview | AskHistory, FromMaster]


class Channels:
    """A channel to every instance that runs.

    Args:
        connect: makes one.
        handle: gets what comes, with the instance's name.
    """

    def __init__(
        self,
        connect: Callable[[Endpoint], EngineChannel],
        handle: Callable[[str, Event | ChannelLost | msgspec.DecodeError], None],
    ) -> None:
        self._connect, self._handle = connect, handle
        self._open: dict[str, tuple[str, EngineChannel]] = {}  # with the address

    def follow(self, change: Change) -> bool:
        """Open or close one, as an instance joins, moves, stops or leaves. Whether one was closed."""
        endpoint = change.endpoint if isinstance(change, InstanceJoined) and change.endpoint.runs else None
        before = self._open.get(change.name)
        if before is not None and (endpoint is None or before[0] != endpoint.address):
            before[1].close()
            del self._open[change.name]
        if endpoint is not None and change.name not in self._open:
            channel = self._connect(endpoint)
            self._open[change.name] = endpoint.address, channel
            channel.open(partial(self._handle, change.name))
        return before is not None and self._open.get(change.name) != before

    def send(self, name: str, command: Command) -> None:
        """Dropped without a channel, as without a connection."""
        if name in self._open:
            self._open[name][1].send(command)

    def close(self) -> None:
        for _, channel in self._open.values():
            channel.close()
        self._open.clear()


def engine_channel(
    context: zmq.SyncContext,
    address: str,
    sender: str,
    kind: Literal["frontend", "master"],
    clock: Clock,
    curve: Curve | None = None,
) -> EngineChannel:
    def greet(incarnation: int) -> Hello:
        return Hello(sender, incarnation, kind)

    return Channel(context, address, sender, greet, decode_event, clock, curve)


def master_channel(
    context: zmq.SyncContext, address: str, sender: str, clock: Clock, curve: Curve | None = None
) -> MasterChannel:
    def greet(incarnation: int) -> Join:
        return Join(sender, incarnation)

    return Channel(context, address, sender, greet, decode_from_master, clock, curve)
