"""What drives a `Master`: channels to engines, the clock, and for a master of its own process the frontends' socket."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import msgspec
import zmq

from penstock.core.clock import Clock
from penstock.core.host_port import has_ipv6
from penstock.core.wire import codec
from penstock.core.wire.engine import LEASE, Event
from penstock.core.wire.master import (
    AskHistory,
    AskMembers,
    AskOverview,
    Begun,
    Ended,
    Endpoint,
    EngineEnded,
    FleetTotals,
    FromMaster,
    History,
    HostReport,
    Join,
    Joined,
    Members,
    Outcome,
    Overview,
    Place,
    PrefixTotals,
    RestartInstance,
    Settled,
    StartInstance,
    StopInstance,
    ToLauncher,
    Troubles,
    decode_to_master,
)
from penstock.sched.cluster import ClusterView, Decision, Demand, FleetChange, Later, Migration, Verdict
from penstock.service.channel import Channels, EngineChannel, Inbox
from penstock.service.events import (
    FromEngine,
    FromFrontend,
    Happening,
    Notice,
    ToEngine,
    ToFrontend,
)
from penstock.service.instances import Change, ChannelLost, InstanceJoined, InstanceLeft
from penstock.service.launchers import Fleet, Launchers
from penstock.service.master import Master
from penstock.service.overview import history_of, with_decisions
from penstock.service.placement import NOBODY, Answer, Answered, Choose
from penstock.service.recorder import FlightRecorder
from penstock.service.recorder_file import RecorderFile
from penstock.service.registry import LocalRegistry, Registry

if TYPE_CHECKING:
    from penstock.service.curve import Curve

log = logging.getLogger("penstock.master")
TICK = 0.1  # seconds
ENDS = 1024  # of engines that are remembered


class Minutes:
    """A `Recorder` that writes entries down when the actions of their tick are done: no sequence waits for that."""

    def __init__(self, recorder: FlightRecorder) -> None:
        self.recorder = recorder
        self._due: list[Callable[[], None]] = []

    def decided(
        self, now: float, view: ClusterView, demand: Demand, request_id: str, frontend: str, decision: Decision
    ) -> None:
        self._due.append(partial(self.recorder.decided, now, view, demand, request_id, frontend, decision))

    def held(self, now: float, demand: Demand, request_id: str, frontend: str, later: Later) -> None:
        self._due.append(partial(self.recorder.held, now, demand, request_id, frontend, later))

    def moved(self, now: float, move: FleetChange) -> None:
        self._due.append(partial(self.recorder.moved, now, move))

    def scaled(self, now: float, verdicts: Sequence[Verdict]) -> None:
        self._due.append(partial(self.recorder.scaled, now, verdicts))

    def relocated(self, now: float, at: str, migration: Migration) -> None:
        self._due.append(partial(self.recorder.relocated, now, at, migration))

    def ended(self, now: float, request_id: str, frontend: str, outcome: Outcome | None, refused: str = "") -> None:
        self._due.append(partial(self.recorder.ended, now, request_id, frontend, outcome, refused))

    def write(self) -> None:
        for entry in self._due:
            entry()
        self._due.clear()


class MasterPump:
    """Delivers events to the master, and its actions to the engines.

    Args:
        registry: of the instances; each that runs gets a channel.
        connect: makes one.
        recording: the recorder's file; closed with the pump.
        minutes: the master's recorder; without one there are no decisions to show.
        wall: seconds since 1970, UTC.

    Attributes:
        deliver: sends messages to frontends; set by the owner of the connection.
        fleet: starts and stops instances; likewise. None where nobody does.
    """

    def __init__(
        self,
        master: Master,
        registry: Registry,
        connect: Callable[[Endpoint], EngineChannel],
        clock: Clock,
        recording: RecorderFile | None = None,
        minutes: Minutes | None = None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.master = master
        self.deliver: Callable[[ToFrontend], None] = _not_started
        self.fleet: Fleet | None = None
        self._registry = registry
        self._channels = Channels(connect, self._on_engine)
        self.clock = clock
        self._recording, self._wall = recording, wall
        self._minutes = minutes or Minutes(FlightRecorder())
        self._tasks: list[asyncio.Task[None]] = []
        self._alarm: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin; call it inside the event loop."""
        self._registry.watch(self._on_registry)
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
        self._channels.close()

    def handle(self, happening: Happening | None) -> None:
        """Handle an event, or the passing of time."""
        for action in self.master.tick(self.clock.now(), happening):
            match action:
                case ToEngine(name, command):
                    self._channels.send(name, command)
                case ToFrontend():
                    self.deliver(action)
                case Notice(text):
                    log.info("%s", text)
                case StartInstance(name, role):
                    assert self.fleet is not None, "nobody here starts instances"
                    self.fleet.start(name, role)
                case StopInstance(name):
                    assert self.fleet is not None, "nobody here stops instances"
                    self.fleet.stop(name)
                case RestartInstance(name, times):
                    assert self.fleet is not None, "nobody here restarts instances"
                    self.fleet.restart(name, times)
        self._minutes.write()
        self._set_alarm()

    def overview(self, question: AskOverview) -> Overview:
        overview = msgspec.structs.replace(self.master.overview(self.clock.now()), number=question.number)
        return with_decisions(overview, self._minutes.recorder, self._to_wall())

    def history(self, question: AskHistory) -> History:
        return history_of(self._minutes.recorder, question.number, question.request, self._to_wall())

    def _to_wall(self) -> Callable[[float], float]:
        """From the master's clock to seconds since 1970."""
        ahead = self._wall() - self.clock.now()
        return lambda moment: moment + ahead

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

    def _on_registry(self, change: Change) -> None:
        try:
            self._channels.follow(change)
            self.handle(change)
        except Exception:  # the other instances go on
            log.exception("the master failed on %s", change)

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
    """The master is in this process, and so is the launcher, which calls `suspect`."""

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

    @property
    def prefixes(self) -> PrefixTotals | None:
        return self._pump.master.prefixes

    @property
    def fleet(self) -> FleetTotals:
        return self._pump.master.fleet.account.totals(self._pump.clock.now())

    def start(self, answered: Answered, choose: Choose) -> None:
        self._answered = answered  # the master is always here
        self._pump.deliver = self._deliver
        self._pump.start()
        self._renewing = asyncio.create_task(self._renew())

    async def _renew(self) -> None:
        while True:
            self._pump.handle(FromFrontend(self._sender, Join(self._sender)))
            await asyncio.sleep(1.0)

    def suspect(self, troubles: Mapping[str, str]) -> None:
        """Frontend and master are told, when it is news: instance -> why it cannot serve, or may not be able to."""
        if troubles != self.troubles:
            self.troubles = troubles
            try:
                self._pump.handle(Troubles(dict(troubles)))
            except Exception:  # the frontend knows all the same
                log.exception("the master failed on what the launcher says")

    def ask(self, place: Place) -> None:
        self._pump.handle(FromFrontend(self._sender, place))

    def _deliver(self, action: ToFrontend) -> None:
        if isinstance(action.message, Answer):
            self._answered(action.message)

    def begun(self, request_ids: Sequence[str]) -> None:
        self._pump.handle(FromFrontend(self._sender, Begun(list(request_ids))))

    def settled(self, settled: Settled) -> None:
        self._pump.handle(FromFrontend(self._sender, settled))

    def ended(
        self, request_ids: Sequence[str], outcomes: Sequence[Outcome] = (), refused: Mapping[str, str] = NOBODY
    ) -> None:
        self._pump.handle(FromFrontend(self._sender, Ended(list(request_ids), list(outcomes), dict(refused))))

    async def overview(self) -> Overview:
        return self._pump.overview(AskOverview(0))

    async def history(self, request: str) -> History:
        return self._pump.history(AskHistory(0, request))

    def tick(self, now: float) -> None:
        pass  # the master is in this process

    async def close(self) -> None:
        if self._renewing is not None:
            self._renewing.cancel()
            await asyncio.gather(self._renewing, return_exceptions=True)
        await self._pump.close()


def _not_started_placement(answer: Answer) -> None:
    raise AssertionError("asked before the start")


async def serve_frontends(
    pump: MasterPump,
    registry: LocalRegistry,
    context: zmq.SyncContext,
    *addresses: str,
    curve: Curve | None = None,
    registers: bool = True,
    own: str = "",
) -> None:
    """Answer frontends, and register what launchers run, until cancelled.

    Args:
        registry: the pump's, of which frontends are told.
        addresses: ZMQ endpoints to bind.
        curve: of the deployment; None where its links need no protection.
        registers: whether launchers register their instances here; else the registry knows them all.
        own: see `Launchers`.
    """
    desk = Desk(pump, registry, context, addresses, curve, registers, own)
    try:
        await desk.run()
    finally:
        desk.close()


class Desk:
    """The master's socket, to which frontends and launchers come."""

    def __init__(
        self,
        pump: MasterPump,
        registry: LocalRegistry,
        context: zmq.SyncContext,
        addresses: Sequence[str],
        curve: Curve | None,
        registers: bool,
        own: str,
    ) -> None:
        self._pump = pump
        self._socket = context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a frontend that came back is the same frontend
        self._unprotect = curve.listen(self._socket) if curve is not None else None
        self._socket.setsockopt(zmq.IPV6, any(map(has_ipv6, addresses)))
        for address in addresses:
            self._socket.bind(address)
        self._inbox = Inbox(self._socket, self._answer)
        self._launchers = Launchers(registry if registers else None, self._send, self._ready, self._givers, own)
        self._roll = Roll(pump.master.joined.incarnation, registry, self._send)
        if not registers:
            self._roll.complete()
        self._registry = registry
        self._troubles: Mapping[str, str] = {}  # that the others know of
        pump.deliver, pump.fleet = self._deliver, self._launchers

    async def run(self) -> None:
        self._inbox.open()
        begun = self._pump.clock.now()
        while True:
            await asyncio.sleep(TICK)
            now = self._pump.clock.now()
            self._launchers.tick(now)
            self._registry.look(self._serves)
            self._tell_troubles()
            if now - begun > LEASE:  # every launcher that is there was heard by now
                self._roll.complete()

    def _ready(self) -> list[str]:
        states = self._pump.master.fleet.states(self._pump.clock.now())
        return [name for name, state in states.items() if state == "ready"]

    def _serves(self, name: str) -> bool:
        return self._pump.master.fleet.serves(self._pump.clock.now(), name)

    def _givers(self) -> dict[str, str]:
        return self._pump.master.fleet.givers(self._pump.clock.now())

    def close(self) -> None:
        self._inbox.close()
        self._socket.close()
        if self._unprotect is not None:
            self._unprotect()

    def _send(self, receiver: bytes, message: FromMaster | ToLauncher) -> None:
        self._socket.send_multipart([receiver, codec.encode(message)])
        self._inbox.look()  # messages that arrive during a send cause no wake-up

    def _tell_troubles(self) -> None:
        """Master and frontends, when launchers say something else of their instances."""
        troubles = dict(self._launchers.troubles)
        if troubles != self._troubles:
            self._troubles = troubles
            try:
                self._pump.handle(Troubles(troubles))  # before anybody asks for another place
            except Exception:  # the frontends are told all the same
                log.exception("the master failed on what launchers say")
            self._roll.tell(Troubles(troubles))

    def _deliver(self, action: ToFrontend) -> None:
        message = action.message
        if isinstance(message, Joined):
            troubles = dict(self._launchers.troubles)
            message = msgspec.structs.replace(message, troubles=troubles, members=self._roll.sequence)
        self._send(action.name.encode(), message)

    def _answer(self, frames: list[bytes]) -> None:
        sender, *rest = frames
        try:
            message = decode_to_master(b"".join(rest))
        except msgspec.DecodeError as error:
            log.warning("a message that cannot be read was dropped: %s", error)
            return
        match message:
            case HostReport():
                self._launchers.hear(self._pump.clock.now(), sender, message)
                for ended in message.ended:
                    self._roll.engine_ended(ended)
                for name, (times, minutes) in message.restarted.items():
                    self._pump.master.fleet.recall_restart(self._pump.clock.now(), name, times, 60.0 * minutes)
                self._tell_troubles()
            case AskMembers():
                self._roll.call(sender)
            case AskOverview():
                self._send(sender, self._pump.overview(message))
            case AskHistory():
                self._send(sender, self._pump.history(message))
            case _:
                name = sender.decode(errors="replace")
                try:
                    self._pump.handle(FromFrontend(name, message))
                except Exception:  # the other frontends go on
                    log.exception("the master failed on what %s asked", name)


class Roll:
    """Tells frontends which instances there are.

    Args:
        incarnation: of the master.
    """

    def __init__(self, incarnation: int, registry: LocalRegistry, send: Callable[[bytes, FromMaster], None]) -> None:
        self.sequence = 0
        self._incarnation, self._registry, self._send = incarnation, registry, send
        self._listeners: set[bytes] = set()
        self._told: deque[EngineEnded] = deque(maxlen=ENDS)
        self._complete = False
        registry.watch(self._changed)

    def call(self, listener: bytes) -> None:
        """Tell a frontend all of it, and from now on what changes."""
        self._listeners.add(listener)
        joined = list(self._registry.instances.values())
        self._send(listener, Members(self._incarnation, self.sequence, joined, whole=True, complete=self._complete))

    def engine_ended(self, ended: EngineEnded) -> None:
        """An engine has ended; launchers say so several times."""
        if ended not in self._told:
            self._told.append(ended)
            self.tell(ended)

    def tell(self, message: FromMaster) -> None:
        """All who listen."""
        for listener in self._listeners:
            self._send(listener, message)

    def complete(self) -> None:
        """What is not there now is not in the deployment."""
        if not self._complete:
            self._complete = True
            for listener in self._listeners:
                self.call(listener)

    def _changed(self, change: Change) -> None:
        self.sequence += 1
        match change:
            case InstanceJoined(endpoint=endpoint):
                joined, left = [endpoint], {}
            case InstanceLeft(name=name, why=why):
                joined, left = [], {name: why}
        for listener in self._listeners:
            self._send(listener, Members(self._incarnation, self.sequence, joined, left))
