"""The frontend's side of the engines: the instances, as they come and go, and what their engines tell of sequences."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from penstock.core.clock import Clock
from penstock.core.errors import EngineFailure, InvalidRequest
from penstock.core.memory import Part
from penstock.core.plan import BLOCK_TOKENS
from penstock.core.request import TokenOutput
from penstock.core.wire.engine import (
    Cancel,
    Event,
    Failed,
    Fetched,
    Lacking,
    Peer,
    Ready,
    Refused,
    Sleep,
    Slept,
    Stayed,
    StepReport,
    Stopped,
    WakeUp,
)
from penstock.core.wire.master import Endpoint, EngineEnded, History, Overview
from penstock.obs.logs import quoted
from penstock.obs.metrics import Metrics
from penstock.service.channel import Channels, EngineChannel
from penstock.service.dispatcher import Dispatcher, Instance
from penstock.service.failover import Failover
from penstock.service.flight import Flight
from penstock.service.generation import Generation
from penstock.service.instances import Change, ChannelLost, InstanceJoined, InstanceLeft
from penstock.service.isolation import life_of
from penstock.service.placement import Placement
from penstock.service.registry import Registry
from penstock.service.sleep_orders import SleepOrders

log = logging.getLogger("penstock.frontend")
TICK = 0.25  # seconds


class EngineClient:
    """
    Args:
        registry: of the instances; each that runs gets a channel.
        connect: makes one.
        placement: says where sequences run.
        told: somebody says how engines ended, by `engine_ended`.

    Attributes:
        dispatcher: of the sequences; `instances` and `flights` are its own.
        changed: set when an instance begins or ends to serve.
    """

    def __init__(
        self,
        registry: Registry,
        connect: Callable[[Endpoint], EngineChannel],
        placement: Placement,
        metrics: Metrics,
        clock: Clock,
        told: bool = False,
    ) -> None:
        self.changed = asyncio.Event()
        self._registry = registry
        self._channels = Channels(connect, self._on_event)
        self._sleeps = SleepOrders(self._channels.send)
        self._placement = placement
        self._metrics = metrics
        self._clock = clock
        self.dispatcher = Dispatcher(placement, self._channels.send, metrics, clock)
        self.instances, self.flights = self.dispatcher.instances, self.dispatcher.flights
        self._failover = Failover(self.dispatcher, metrics, clock, told)
        self._ticking: asyncio.Task[None] | None = None

    async def overview(self) -> Overview:
        """How the deployment does. Raises Unavailable when the master does not answer."""
        return await self._placement.overview()

    async def history(self, request: str) -> History:
        """Why a request ran where it did. Raises Unavailable likewise."""
        return await self._placement.history(request)

    def start(self) -> None:
        """Start receiving from the engines; call it inside the event loop."""
        self.dispatcher.start()
        self._registry.watch(self._on_registry)
        self._ticking = asyncio.create_task(self._keep_time())

    async def close(self) -> None:
        if self._ticking is not None:
            self._ticking.cancel()
            await asyncio.gather(self._ticking, return_exceptions=True)
        self._channels.close()
        await self._placement.close()

    @property
    def asleep(self) -> bool:
        """Whether all instances that could serve sleep."""
        up = [instance for instance in self.instances.values() if instance.up(self._clock.now())]
        return bool(up) and all(instance.asleep for instance in up)

    async def sleep(self, level: Literal[1, 2]) -> None:
        """Put all engines to sleep. Raises as `SleepOrders.give`."""
        await self._sleeps.give(self._running, lambda to, number: Sleep(to, number, level))

    async def wake_up(self, parts: Sequence[Part]) -> None:
        """Wake all engines up. Raises as `SleepOrders.give`."""
        await self._sleeps.give(self._running, lambda to, number: WakeUp(to, number, list(parts)))

    @property
    def _running(self) -> list[Peer]:
        return [instance.ready.peer for instance in self.instances.values() if instance.ready is not None]

    def troubled(self) -> None:
        """What launchers say of instances has changed."""
        for instance in self.instances.values():
            instance.suspicion = self._placement.troubles.get(instance.name, "")
        self._failover.hedge(self._clock.now())

    def engine_ended(self, ended: EngineEnded) -> None:
        """It is known how an incarnation has ended. It may be said several times."""
        if not self._failover.learn((ended.name, ended.incarnation), ended.broken_by):
            return
        instance = self.instances.get(ended.name)
        if instance is not None and instance.is_current(ended.incarnation):
            self.instance_lost(ended.name, "its process has ended")
        self._failover.rescue()

    # --- the instances

    def _on_registry(self, change: Change) -> None:
        """An instance joins, changes or leaves; what runs on one that leaves continues elsewhere."""
        name = change.name
        if self._channels.follow(change) and name in self.instances:
            if isinstance(change, InstanceJoined) and not change.endpoint.runs:
                self.instance_stopped(name)
            else:
                self.instance_lost(name, change.why if isinstance(change, InstanceLeft) else "it is elsewhere now")
        if not isinstance(change, InstanceJoined) or not change.endpoint.runs:
            self.instances.pop(name, None)
            self._metrics.forget_engine(name)
        elif name not in self.instances:
            self._metrics.add_engine(name)
            self.instances[name] = Instance(name, change.endpoint.role, host=change.endpoint.host)
        self.changed.set()

    def _on_event(self, name: str, event: Event | ChannelLost | msgspec.DecodeError) -> None:
        try:
            self._handle(self.instances[name], event)
        except Exception as error:  # the error would go unnoticed
            log.exception("the frontend failed")
            self.instance_lost(name, f"the frontend failed: {type(error).__name__}")

    async def _keep_time(self) -> None:
        while True:
            await asyncio.sleep(TICK)
            self.tick()

    def tick(self) -> None:
        """End sequences whose wait has timed out."""
        now = self._clock.now()
        self._placement.tick(now)
        self._metrics.observe_queue(self._placement.waiting)
        if (fleet := self._placement.fleet) is not None:
            starts = {start.path: (start.count, start.seconds) for start in fleet.starts}
            self._metrics.observe_fleet(fleet.instance_seconds, starts, fleet.changes)
        if (seen := self._placement.prefixes) is not None:
            self._metrics.observe_ideal(seen.prompt_tokens, seen.ideal_tokens, seen.complete)
        if stranded := self._failover.tick(now):
            log.warning("nothing came any more of what an engine had left unfinished: %s", _interrupted(stranded))
        self.troubled()
        for instance in self.instances.values():
            if instance.ready is not None and instance.stuck(now):
                trouble = instance.trouble(now)
                if stranded := self._failover.lose(instance.ready.peer, trouble):
                    log.warning("%s is stuck (%s): %s", instance.name, trouble, _interrupted(stranded))
            self._metrics.observe_up(instance.name, instance.up(now))
        self.dispatcher.readmit_avoided()

    def _handle(self, instance: Instance, event: Event | ChannelLost | msgspec.DecodeError) -> None:
        instance.heard = self._clock.now()
        match event:
            case StepReport() if instance.is_current(event.incarnation):
                instance.load = event.stats.running + event.stats.waiting
                self._sleeps_at(instance, event.stats.asleep)
                self._metrics.observe_stats(instance.name, event.stats, event.step_tokens)
                self._deliver(instance.name, event)
            case Ready():
                self._greet(instance, event)
            case Refused():
                self.dispatcher.refused(instance, event)
            case Slept() if instance.is_current(event.incarnation):
                self._sleeps_at(instance, event.level)
                self._sleeps.answered(instance.name, event)
            case Stayed():
                flight = self.flights.get(event.request_id)
                if (
                    flight is not None
                    and event.here
                    and flight.is_held(instance.name, event.incarnation, event.generation)
                ):
                    self._failover.returned(flight)
                if flight is not None and flight.stayed(instance.name, event, instance.heard):
                    self.dispatcher.settle(flight)
                    if flight.stranded:
                        self._failover.go_on(flight)
            case Fetched() if instance.is_current(event.incarnation):
                flight = self.flights.get(event.request_id)
                if flight is not None:
                    flight.fetched(instance.name, event)
            case Lacking():
                self.dispatcher.send_pixels(instance, event)
            case Failed(message=message, requests=requests):
                if instance.ready is not None:
                    self._failover.learn(life_of(instance.ready.peer), requests)
                self.instance_lost(instance.name, message)
            case Stopped() if instance.is_current(event.incarnation):
                self.instance_stopped(instance.name)
            case ChannelLost(message=message):
                if instance.ready is not None:
                    self._failover.wait_for_cause(instance.ready.peer)
                self.instance_lost(instance.name, message)
            case msgspec.DecodeError():
                self.instance_lost(instance.name, f"a message from the engine could not be read: {event}")

    def _sleeps_at(self, instance: Instance, level: int) -> None:
        if instance.asleep != level:
            instance.asleep = level
            self.changed.set()
            self.dispatcher.readmit_avoided()

    def _greet(self, instance: Instance, ready: Ready) -> None:
        if instance.is_current(ready.peer.incarnation):
            self.instance_lost(instance.name, "it has dropped what it had of this frontend, which it did not hear")
        elif instance.ready is not None:
            self.instance_lost(instance.name, "another incarnation of the engine has begun")
        instance.ready = instance.said = ready
        instance.lost, instance.role, instance.asleep = "", ready.role, 0
        self._metrics.observe_up(instance.name, True)
        self._metrics.observe_weights(instance.name, ready.weights_from, ready.weights_seconds)
        self._metrics.observe_cache(instance.name, ready.num_blocks, BLOCK_TOKENS, ready.max_model_len)
        self._compare_lengths(instance.name, ready.max_model_len)
        if len(self.instances) > 1 and all(other.ready is not None for other in self.instances.values()):
            log.info("%d of %d instances are ready", len(self.instances), len(self.instances))
        self.changed.set()
        self.dispatcher.readmit_avoided()

    def _compare_lengths(self, name: str, length: int) -> None:
        """Warn of different `max_model_len`s: the shortest limits every request, so that each fits every instance."""
        others = {i.said.max_model_len for i in self.instances.values() if i.said is not None and i.name != name}
        if others - {length}:
            limit = min(length, *others)
            shown = " and ".join(str(other) for other in sorted(others))
            text = "%s has a max-model-len of %d, others have %s: no request may be longer than %d, wherever it runs"
            log.warning(text, name, length, shown, limit)

    def instance_lost(self, name: str, reason: str) -> None:
        """An engine was lost: its requests continue elsewhere, unless another engine owns them by now."""
        instance = self.instances[name]
        ready, instance.ready = instance.ready, None
        if ready is not None or instance.said is None:  # else it was stopped before
            instance.lost = instance.lost or reason
        if ready is not None:
            self._sleeps.lost(name, reason)
            self._metrics.observe_loss(name)
            stranded = self._failover.lose(ready.peer, reason)
            log.warning("%s was lost (%s): %s", name, reason, _interrupted(stranded))
        self.changed.set()

    def instance_stopped(self, name: str) -> None:
        """An engine has ended as it was told to: what it still had continues elsewhere, and nothing is lost."""
        instance = self.instances[name]
        ready, instance.ready = instance.ready, None
        if ready is not None:
            self._sleeps.lost(name, "it was stopped")
            self._metrics.observe_stop(name)
            stranded = self._failover.lose(ready.peer, "it was stopped")
            log.info("%s was stopped: %s", name, _interrupted(stranded))
        self.changed.set()

    # --- the sequences

    def _deliver(self, name: str, report: StepReport) -> None:
        unknown = [o.request_id for o in report.outputs if o.request_id not in self.flights and o.finish is None]
        if unknown:  # cancelled while the step ran, or while it was handed over
            self._channels.send(name, Cancel(report.incarnation, unknown))
        for output in report.outputs:
            flight = self.flights.get(output.request_id)
            if flight is None:
                continue
            if flight.is_held(name, report.incarnation, output.generation):
                self._failover.came_back(flight, name, output)
            elif output.generation < flight.attempt and output.finish is None:  # so was one that is over
                self._channels.send(name, Cancel(report.incarnation, [output.request_id], output.generation))
            self._receive(flight, name, report.incarnation, output)

    def _receive(self, flight: Flight[Generation], name: str, incarnation: int, output: TokenOutput) -> None:
        now = self._clock.now()
        handoffs, heard, first = flight.handoffs, flight.heard, flight.first
        try:
            pieces = flight.accept(name, incarnation, output, now)
            if flight.handoffs > handoffs:
                self._metrics.observe_handoff()
                self.dispatcher.routed(flight)
                self.dispatcher.settle(flight)
            if flight.heard and not heard:
                self._placement.begun([output.request_id])
                if flight.held_at:
                    self._failover.overtaken(flight)
                if flight.interrupted:
                    self._failover.resumed(flight, output)
            if flight.first is not None and first is None:
                self.dispatcher.queue.leave(flight, now)
            if flight.first is not None and first is None and flight.predicted_ttft is not None:
                self._metrics.observe_prediction(flight.predicted_ttft, now - flight.arrival)
            for piece in pieces:
                if piece.finish is not None:
                    self._finished(flight, now)
                flight.owner.receive(flight.index, piece, now)
                if output.request_id not in self.flights:
                    return  # a stop string ended it, whatever comes after
            if flight.stranded:
                self._failover.go_on(flight)
        except (EngineFailure, InvalidRequest) as error:
            log.warning("request %s: %s", quoted(output.request_id), error)
            flight.owner.fail(error)
        except Exception:  # this request fails; the others continue
            log.exception("request %s failed", quoted(output.request_id))
            flight.owner.fail(EngineFailure("the answer could not be put together"))

    def _finished(self, flight: Flight[Generation], now: float) -> None:
        self.dispatcher.end(flight, flight.outcome(now))
        self.dispatcher.cancel(flight, [peer for peer in flight.peers if peer.name != flight.at])

    def check(self) -> None:
        """Raise AssertionError unless what is counted is what is there."""
        self._failover.check()


def _interrupted(requests: int) -> str:
    return f"{requests} request{' is' if requests == 1 else 's are'} to go on elsewhere"
