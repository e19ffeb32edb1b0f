"""What drives a `Master`: channels to engines, the clock, and for a master of its own process the frontends' socket."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import msgspec
import zmq

from penstock.core.clock import Clock
from penstock.core.wire import codec
from penstock.core.wire.engine import LEASE, Event
from penstock.core.wire.master import Begun, Ended, Join, Joined, Outcome, Place, Settled, Troubles, decode_to_master
from penstock.service.channel import EngineChannel, Inbox
from penstock.service.events import (
    FromEngine,
    FromFrontend,
    Happening,
    Notice,
    StartInstance,
    StopInstance,
    ToEngine,
    ToFrontend,
)
from penstock.service.instances import ChannelLost
from penstock.service.master import Master
from penstock.service.placement import Answer, Answered
from penstock.service.recorder_file import RecorderFile

log = logging.getLogger("penstock.master")
TICK = 0.1  # seconds


class MasterPump:
    """Delivers events to the master, and its actions to the engines.

    Args:
        channels: to every instance, by name.
        recording: the recorder's file; closed with the pump.

    Attributes:
        deliver: sends messages to frontends; set by the owner of the connection.
    """

    def __init__(
        self,
        master: Master,
        channels: Mapping[str, EngineChannel],
        clock: Clock,
        recording: RecorderFile | None = None,
    ) -> None:
        self.master = master
        self.deliver: Callable[[ToFrontend], None] = _not_started
        self._channels = channels
        self.clock = clock
        self._recording = recording
        self._tasks: list[asyncio.Task[None]] = []
        self._alarm: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin; call it inside the event loop."""
        for name, channel in self._channels.items():
            channel.open(partial(self._on_engine, name))
        self._tasks = [asyncio.create_task(self._keep_time())]
        if self._recording is not None:
            self._tasks.append(asyncio.create_task(self._recording.run()))

    async def close(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._recording is not None:
            self._recording.close()
        for channel in self._channels.values():
            channel.close()

    def handle(self, happening: Happening | None) -> None:
        """Handle an event, or the passing of time."""
        for action in self.master.tick(self.clock.now(), happening):
            match action:
                case ToEngine(name, command):
                    self._channels[name].send(command)
                case ToFrontend():
                    self.deliver(action)
                case Notice(text):
                    log.info("%s", text)
                case StartInstance() | StopInstance():
                    raise AssertionError("nobody here starts and stops instances")
        self._set_alarm()

    def _set_alarm(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        wait = self.master.wake - self.clock.now()
        if wait < TICK:  # else the next tick is earlier
            self._alarm = asyncio.get_running_loop().call_later(max(0.0, wait), self._ring)

    def _ring(self) -> None:
        self._alarm = None
        self._tick()

    def _tick(self) -> None:
        try:
            self.handle(None)
        except Exception:  # the next one tries again
            log.exception("the master failed")

    def _on_engine(self, name: str, event: Event | ChannelLost | msgspec.DecodeError) -> None:
        if isinstance(event, msgspec.DecodeError):
            event = ChannelLost(f"a message from it could not be read: {event}")
        try:
            self.handle(FromEngine(name, event))
        except Exception:  # the other instances go on
            log.exception("the master failed on what %s said", name)

    async def _keep_time(self) -> None:
        while True:
            await asyncio.sleep(TICK)
            self._tick()


def _not_started(action: ToFrontend) -> None:
    raise AssertionError("frontends are told something before there are any")


class LocalPlacement:
    """The master is in this process, and so is the launcher, which sets `troubles`."""

    trouble = ""

    def __init__(self, pump: MasterPump, sender: str) -> None:
        self._pump, self._sender = pump, sender
        self.troubles: Mapping[str, str] = {}
        self._renewing: asyncio.Task[None] | None = None
        self._answered: Answered = _not_started_placement

    @property
    def wants_keys(self) -> bool:
        return self._pump.master.joined.wants_keys

    @property
    def waiting(self) -> int:
        return self._pump.master.waiting

    def start(self, answered: Answered) -> None:
        self._answered = answered
        self._pump.deliver = self._deliver
        self._pump.start()
        self._renewing = asyncio.create_task(self._renew())

    async def _renew(self) -> None:
        while True:
            self._pump.handle(FromFrontend(self._sender, Join(self._sender)))
            await asyncio.sleep(1.0)

    def ask(self, place: Place) -> None:
        self._pump.handle(FromFrontend(self._sender, place))

    def _deliver(self, action: ToFrontend) -> None:
        if isinstance(action.message, Answer):
            self._answered(action.message)

    def begun(self, request_ids: Sequence[str]) -> None:
        self._pump.handle(FromFrontend(self._sender, Begun(list(request_ids))))

    def settled(self, settled: Settled) -> None:
        self._pump.handle(FromFrontend(self._sender, settled))

    def ended(self, request_ids: Sequence[str], outcomes: Sequence[Outcome] = ()) -> None:
        self._pump.handle(FromFrontend(self._sender, Ended(list(request_ids), list(outcomes))))

    def tick(self, now: float) -> None:
        pass  # the master is in this process

    async def close(self) -> None:
        if self._renewing is not None:
            self._renewing.cancel()
            await asyncio.gather(self._renewing, return_exceptions=True)
        await self._pump.close()


def _not_started_placement(answer: Answer) -> None:
    raise AssertionError("asked before the start")


class Reported:
    """What launchers say of their instances."""

    def __init__(self) -> None:
        self._by_host: dict[str, tuple[float, Mapping[str, str]]] = {}

    def hear(self, now: float, said: Troubles) -> None:
        self._by_host[said.host] = now, said.instances

    def troubles(self, now: float) -> dict[str, str]:
        """Of all hosts whose launcher was heard lately."""
        found: dict[str, str] = {}
        for heard, instances in self._by_host.values():
            found |= instances if now - heard <= LEASE else {}
        return found


async def serve_frontends(pump: MasterPump, context: zmq.SyncContext, address: str) -> None:
    """Answer frontends, and listen to launchers, until cancelled.

    Args:
        address: a ZMQ endpoint to bind.
    """
    reported = Reported()
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a frontend that came back is the same frontend
    socket.bind(address)

    def deliver(action: ToFrontend) -> None:
        message = action.message
        if isinstance(message, Joined):
            message = msgspec.structs.replace(message, troubles=reported.troubles(pump.clock.now()))
        socket.send_multipart([action.name.encode(), codec.encode(message)])
        inbox.look()  # messages that arrive during a send cause no wake-up

    def answer(frames: list[bytes]) -> None:
        sender, *rest = frames
        try:
            message = decode_to_master(b"".join(rest))
        except msgspec.DecodeError as error:
            log.warning("a message that cannot be read was dropped: %s", error)
            return
        if isinstance(message, Troubles):
            reported.hear(pump.clock.now(), message)
            return
        try:
            pump.handle(FromFrontend(sender.decode(errors="replace"), message))
        except Exception:  # the other frontends go on
            log.exception("the master failed on what %s asked", sender.decode(errors="replace"))

    pump.deliver = deliver
    inbox = Inbox(socket, answer)
    inbox.open()
    try:
        await asyncio.get_running_loop().create_future()
    finally:
        inbox.close()
        socket.close()
