"""The frontend's side of the engines: sends sequences to them, receives outputs, and recovers sequences when an engine
is lost."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Literal

import msgspec

from penstock.core.clock import Clock
from penstock.core.errors import BreaksEngines, EngineFailure, InvalidRequest, PenstockError, Unavailable
from penstock.core.heartbeat import step_limit
from penstock.core.memory import Part
from penstock.core.plan import BLOCK_TOKENS
from penstock.core.request import FinishReason, TokenOutput
from penstock.core.wire.engine import (
    Cancel,
    Encode,
    Enqueue,
    Event,
    Failed,
    Fetched,
    ImageSource,
    Lacking,
    Migrate,
    Peer,
    Pixels,
    Ready,
    Refused,
    Role,
    Sleep,
    Slept,
    Stayed,
    StepReport,
    Stopped,
    WakeUp,
)
from penstock.core.wire.master import (
    Endpoint,
    EngineEnded,
    History,
    NoPlace,
    Outcome,
    Overview,
    Place,
    Placed,
    Queued,
    Relocate,
    Settled,
)
from penstock.obs.logs import quoted
from penstock.obs.metrics import Metrics
from penstock.sched.local.awaited_images import without_images
from penstock.service.channel import Channels, EngineChannel
from penstock.service.fallback import least_loaded
from penstock.service.flight import AGAIN, ATTEMPTS, PATIENCE, Flight, peers_of
from penstock.service.generation import Generation
from penstock.service.hedging import AGAIN as HEDGE_AGAIN
from penstock.service.hedging import suspects, to_hedge
from penstock.service.instances import Change, ChannelLost, InstanceJoined, InstanceLeft
from penstock.service.isolation import CAUSE, PROBATION, Causes, Life, judge, life_of
from penstock.service.placement import NOBODY, Answer, Placement
from penstock.service.registry import Registry
from penstock.service.sleep_orders import SleepOrders

log = logging.getLogger("penstock.frontend")
TICK = 0.25  # seconds
SILENT_AFTER = 2.0  # seconds without a message after which an instance counts as silent
WINDOW = 10.0  # seconds over which a rate is measured
SURE = 1.0  # seconds after which a measured rate is better than the last one
MASTER_LEARNS = 1.0  # seconds until the master knows of an instance that is ready


@dataclass(slots=True)
class Instance:
    """An instance as a frontend knows it.

    Attributes:
        ready: what its engine reported; None while none serves.
        said: the same, or of the previous incarnation while none serves.
        heard: when its newest message came, in the clock's seconds.
        lost: why its last incarnation ended; "" before the first, and while one runs.
        load: sequences on it, as it said last.
        asleep: the level at which it sleeps, or is about to, as it said last; 0 while it takes requests.
        suspicion: why it cannot serve, or may not be able to, as its launcher says; "" when that says nothing.
        host: where it is; "" for this one, where that needs no address.
    """

    name: str
    role: Role
    ready: Ready | None = None
    said: Ready | None = None
    heard: float = 0.0
    lost: str = ""
    load: int = 0
    asleep: int = 0
    suspicion: str = ""
    host: str = ""

    def state(self, now: float) -> str:
        """ "starting", "ready", "sleeping", "silent", "stuck" or "lost"."""
        if self.lost:
            return "lost"
        if self.ready is None:
            return "starting"
        if self.trouble(now):
            return "stuck"
        return "silent" if now - self.heard > SILENT_AFTER else "sleeping" if self.asleep else "ready"

    def serves(self, now: float) -> bool:
        return self.ready is not None and not self.asleep and not self.stuck(now)

    def well(self, now: float) -> bool:
        """Whether it serves, and nobody doubts it."""
        return self.up(now) and not self.asleep

    def up(self, now: float) -> bool:
        """The same, or it would if it were woken up."""
        return self.ready is not None and not self.stuck(now) and not self.suspicion

    def stuck(self, now: float) -> bool:
        """Whether it has been silent for longer than its longest step can take. Usually the launcher notices earlier
        and kills it."""
        ready = self.ready
        if ready is None or now - self.heard <= SILENT_AFTER:
            return False
        return now - self.heard > step_limit(ready.token_budget + ready.max_sequences, ready.device)

    def trouble(self, now: float) -> str:
        """Why it does not serve although it should; "" otherwise."""
        silent = f"no sign of life from the engine for {now - self.heard:.0f} s" if self.stuck(now) else ""
        return self.suspicion or silent or self.lost

    def is_current(self, incarnation: int) -> bool:
        """Whether this incarnation is the current one."""
        return self.ready is not None and self.ready.peer.incarnation == incarnation


class RateMeter:
    """The rate of some work while there is any, over the last `WINDOW` seconds."""

    def __init__(self) -> None:
        self._done: deque[tuple[float, float]] = deque()  # when, how much
        self._sum = 0.0
        self._since: float | None = None  # when there began to be something to do
        self._last = 0.0

    def begin(self, now: float) -> None:
        """Work is available. No effect if it was before."""
        if self._since is None:
            self._since = now

    def count(self, now: float, amount: float) -> None:
        """Count work done."""
        self._done.append((now, amount))
        self._sum += amount

    def rest(self, now: float) -> None:
        """No work is left."""
        self._last = self.rate(now)
        self._done.clear()
        self._sum, self._since = 0.0, None

    def rate(self, now: float) -> float:
        """Per second; when there is nothing to do, of the last time that there was. 0 when nothing is known."""
        if self._since is None:
            return self._last
        while self._done and self._done[0][0] < now - WINDOW:
            self._sum -= self._done.popleft()[1]
        elapsed = min(now - self._since, WINDOW)
        if not self._done or (elapsed < SURE and self._last):
            return self._last
        return self._sum / max(elapsed, 0.1)


@dataclass(slots=True)
class OfflineWork:
    """Sequences of offline work.

    Attributes:
        held: that are not over.
        queued: of these, those whose first token has not come.
        begun: that have left the queue, ever.
    """

    held: int = 0
    queued: int = 0
    begun: int = 0


class EngineClient:
    """
    Args:
        registry: of the instances; each that runs gets a channel.
        connect: makes one.
        placement: says where sequences run.
        told: somebody says how engines ended, by `engine_ended`.

    Attributes:
        instances: that run, by name.
        flights: the sequences that are not over, by id.
        patience: seconds that interrupted requests wait for a placement.
        queued_tokens: of the prompts whose first token has not come.
        offline: of these, those that are offline work.
        prefill_rate: how fast those come out of the queue, in their tokens.
        completion_rate: how fast sequences end.
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
        self.instances: dict[str, Instance] = {}
        self.flights: dict[str, Flight[Generation]] = {}
        self.patience = PATIENCE
        self.queued_tokens = 0
        self.offline = OfflineWork()
        self.prefill_rate, self.completion_rate = RateMeter(), RateMeter()
        self.changed = asyncio.Event()
        self._registry = registry
        self._channels = Channels(connect, self._on_event)
        self._sleeps = SleepOrders(self._channels.send)
        self._placement = placement
        self._metrics = metrics
        self._clock = clock
        self._causes = Causes(told)
        self._counted: Counter[str] = Counter()  # sequences on each instance, for `_choose`
        self._counted_at = -inf
        self._ticking: asyncio.Task[None] | None = None

    @property
    def trouble(self) -> str:
        """Why no request can be placed; "" when one can."""
        return self._placement.trouble

    @property
    def wants_keys(self) -> bool:
        """Whether places depend on prefix keys."""
        return self._placement.wants_keys

    async def overview(self) -> Overview:
        """How the deployment does. Raises Unavailable when the master does not answer."""
        return await self._placement.overview()

    async def history(self, request: str) -> History:
        """Why a request ran where it did. Raises Unavailable likewise."""
        return await self._placement.history(request)

    def start(self) -> None:
        """Start receiving from the engines; call it inside the event loop."""
        self._placement.start(self._answered, self._choose)
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

    def add(self, sequences: Sequence[Flight[Generation]]) -> None:
        """Add sequences; their outputs go to their generation."""
        now = self._clock.now()
        self.prefill_rate.begin(now)
        self.completion_rate.begin(now)
        for flight in sequences:
            flight.queued = len(flight.request.prompt)
            self.queued_tokens += flight.queued
            self.offline.held += flight.request.offline
            self.offline.queued += flight.request.offline
            self.flights[flight.id] = flight

    def release(self, sequence_ids: Sequence[str]) -> None:
        """Remove sequences and cancel them at the engines."""
        for sequence_id in sequence_ids:
            flight = self.flights.get(sequence_id)
            if flight is not None:
                self._forget(flight)
                self._cancel(flight, flight.peers)
                if flight.held_at:
                    self._let_go(flight)

    def _forget(self, flight: Flight[Generation], outcome: Outcome | None = None) -> None:
        sequence_id, now = flight.id, self._clock.now()
        del self.flights[sequence_id]
        self.offline.held -= flight.request.offline
        self._leave_queue(flight, now)
        if outcome is not None:
            self.completion_rate.count(now, 1)
        if not self.flights:
            self.completion_rate.rest(now)
        refused = {sequence_id: flight.refused} if flight.refused else NOBODY
        self._placement.ended([sequence_id], [outcome] if outcome is not None else [], refused)

    def _leave_queue(self, flight: Flight[Generation], now: float) -> None:
        self.queued_tokens -= flight.queued
        if flight.queued and flight.request.offline:
            self.offline.queued -= 1
            self.offline.begun += 1
        if flight.queued and flight.first is not None:
            self.prefill_rate.count(now, flight.queued)
        flight.queued = 0
        if not self.queued_tokens:
            self.prefill_rate.rest(now)

    def _cancel(self, flight: Flight[Generation], peers: Iterable[Peer]) -> None:
        """Cancel this attempt at its engines."""
        for peer in peers:
            if peer.name in self.instances and self.instances[peer.name].is_current(peer.incarnation):
                self._channels.send(peer.name, Cancel(peer.incarnation, [flight.id], flight.attempt))

    # --- places

    def find_places(self, sequences: Sequence[Flight[Generation]]) -> None:
        """Ask for placements of added sequences, unless they have ended."""
        for flight in sequences:
            if flight.id in self.flights:
                flight.asked_first = self._clock.now()
                self._ask(flight)

    def _ask(self, flight: Flight[Generation]) -> None:
        try:
            now = self._clock.now()
            self._placement.ask(flight.question(now, self._patience_of(flight, now)))
        except Exception as error:
            self._cannot_place(flight, error)

    def _choose(self, place: Place) -> Placed | None:
        """A place that needs no master."""
        if place.hedged:
            return None
        now = self._clock.now()
        if now - self._counted_at >= TICK:  # not for each: thousands may ask at once
            self._counted_at = now
            self._counted = Counter(peer.name for f in self.flights.values() for peer in f.peers)
        loads = {name: max(self._counted[name], instance.load) for name, instance in self.instances.items()}
        serving = [i.ready for i in self.instances.values() if i.ready is not None and i.well(now)]
        placed = least_loaded(place, serving, loads)
        self._counted.update(peer.name for peer in peers_of(placed.route if placed is not None else ()))
        return placed

    def _answered(self, answer: Answer) -> None:
        flight = self.flights.get(answer.request_id)
        if flight is None or flight.attempt != answer.generation:
            return  # cancelled meanwhile
        try:
            match answer:
                case Placed():
                    self._take_place(flight, answer)
                case NoPlace():
                    self._give_up(flight, Unavailable(answer.message, answer.retry_after))
                case Queued():
                    pass  # it is in the master's queue; another answer follows
                case Relocate():
                    self._move(flight, answer.peer)
        except Exception as error:
            self._cannot_place(flight, error)

    def _cannot_place(self, flight: Flight[Generation], error: Exception) -> None:
        log.error("a sequence could not be placed", exc_info=error)
        flight.owner.fail(EngineFailure(f"the request could not be placed: {type(error).__name__}"))

    def _take_place(self, flight: Flight[Generation], answer: Placed) -> None:
        missing = [peer.name for peer in peers_of(answer.route) if not self._reaches(peer)]
        if missing:  # the master does not know of the loss yet
            flight.avoid += missing
            flight.again()
            self._ask(flight)
            return
        self._launch(flight, answer)

    def _move(self, flight: Flight[Generation], peer: Peer) -> None:
        """Have it handed over, if that can be."""
        source = flight.move(peer) if self._reaches(peer) else None
        if source is None:
            self._settle(flight)
        else:
            self._channels.send(source.name, Migrate(source.incarnation, flight.id, flight.attempt, peer))

    def _settle(self, flight: Flight[Generation]) -> None:
        """Tell the master where it is, unless that is about to change."""
        if flight.placed and (flight.next is None or flight.handed_over):
            self._placement.settled(Settled(flight.id, flight.attempt, flight.at))

    def _patience_of(self, flight: Flight[Generation], now: float) -> float:
        """Seconds that it waits when no instance can take it: a restarted master may not know all instances yet, and a
        failed instance may be restarting."""
        if flight.interrupted:
            return max(0.0, flight.asked_first + self.patience - now)
        if flight.failed_at or not any(instance.serves(now) for instance in self.instances.values()):
            return 0.0
        return max(0.0, flight.asked_first + MASTER_LEARNS - now)

    def _readmit_avoided(self) -> None:
        """Ask again for sequences without a placement that avoid all instances that serve: one may be back, or no
        longer stuck, or better than none."""
        now = self._clock.now()
        serving = {instance.name for instance in self.instances.values() if instance.serves(now)}
        for flight in list(self.flights.values()):
            able = serving.difference(flight.failed_at)
            if not flight.placed and not flight.held_at and able and able.issubset(flight.avoid):
                flight.avoid.clear()
                flight.again()
                self._ask(flight)

    def _give_up(self, flight: Flight[Generation], error: PenstockError) -> None:
        """No instance can take it: end it with an error, unless it still is at one that may hang."""
        if flight.held_at:
            flight.hedge_at = self._clock.now() + HEDGE_AGAIN
            self._take_back(flight)
            return
        if why := flight.interrupted:
            error = EngineFailure(f"{why}, and no instance could continue it, {AGAIN}")
        flight.owner.fail(error)

    def _reaches(self, peer: Peer) -> bool:
        instance = self.instances.get(peer.name)
        return instance is not None and instance.is_current(peer.incarnation) and instance.serves(self._clock.now())

    def _launch(self, flight: Flight[Generation], placed: Placed) -> None:
        flight.avoid.clear()
        if flight.first is None:
            flight.predicted_ttft = placed.predicted_ttft
        request = flight.launch(placed, self._clock.now())
        self._metrics.observe_routing(placed.policy, placed.reason.partition(":")[0])
        self._routed(flight)
        first, source = flight.here, placed.source
        if source is not None and source.peer is not None and not self._reaches(source.peer):
            source = None  # it is computed
        images = [image for image in placed.images if self._reaches(image.peer) and not flight.suspected]
        if images:
            self._encode(flight, images)
            request = without_images(request, {image.digest for image in images})
        command = Enqueue(first.incarnation, request, flight.attempt, flight.legs[1:], source, images)
        self._channels.send(first.name, command)

    def _encode(self, flight: Flight[Generation], images: Sequence[ImageSource]) -> None:
        """Have others look at its images, where its prompt is not prefilled."""
        request = flight.request
        for peer in {image.peer.name: image.peer for image in images if image.encodes}.values():
            theirs = {image.digest for image in images if image.encodes and image.peer == peer}
            spans = {s.digest: (s, p) for s, p in zip(request.media, request.pixels, strict=True) if s.digest in theirs}
            media, pixels = [s for s, _ in spans.values()], [p for _, p in spans.values()]
            self._channels.send(peer.name, Encode(peer.incarnation, flight.id, media, pixels))

    def _send_pixels(self, instance: Instance, said: Lacking) -> None:
        """Nobody else has looked at these images: whoever prefills the prompt does."""
        flight = self.flights.get(said.request_id)
        if flight is None or said.generation != flight.attempt or not instance.is_current(said.incarnation):
            return
        request = flight.request
        pixels = dict(zip((span.digest for span in request.media), request.pixels, strict=True))
        lacking = [(digest, pixels[digest]) for digest in said.digests if digest in pixels]
        self._channels.send(instance.name, Pixels(said.incarnation, flight.id, flight.attempt, lacking))
        self._metrics.observe_lacking(len(lacking))
        flight.image_fallbacks.append(f"{instance.name} looks at {len(lacking)} of its images itself: {said.reason}")
        text = "request %s: %s looks at %d of its images itself: %s"
        log.warning(text, quoted(flight.id), instance.name, len(lacking), said.reason)

    def _routed(self, flight: Flight[Generation]) -> None:
        """Tell its owner where it runs."""
        instance = self.instances.get(flight.at)
        said = None if instance is None else instance.said
        flight.owner.routed(flight.index, flight.route, "" if said is None else said.root_key.hex())

    # --- going on elsewhere

    def _go_on(self, flight: Flight[Generation]) -> None:
        """Continue a stranded sequence elsewhere, from the tokens that its client has, once it is known whether it may
        have broken where it was."""
        if self._causes.awaited(flight.places):
            return
        now = self._clock.now()
        if flight.held_at and not flight.suspected:
            self._take_back(flight)
            return
        self._cancel(flight, flight.peers)
        if flight.held_at:
            self._let_go(flight)  # it is not alone there
        if flight.launches >= ATTEMPTS:
            why = f"{flight.interrupted}, one of {flight.launches} failed attempts"
            log.warning("request %s: %s", flight.id, why)
            flight.owner.fail(EngineFailure(why))
            return
        log.info("request %s: %s; it has %d tokens", flight.id, flight.interrupted, flight.received)
        flight.owner.interrupted(flight.index, flight.received, flight.interrupted)
        flight.avoid = [*flight.suspects, *(peer.name for peer in flight.places if not self._reaches(peer))]
        flight.avoid += self._unlike(flight)
        if flight.suspected:
            flight.avoid.append(flight.broke[-1])  # which may be to blame itself
        flight.again()
        flight.asked_first = now
        self._add_keys(flight)
        self._ask(flight)

    def _add_keys(self, flight: Flight[Generation]) -> None:
        """Whatever the policy looks at: what it had may be brought from elsewhere."""
        root = next((i.said.root_key for i in self.instances.values() if i.said is not None), None)
        if root is not None:
            flight.add_keys(root)

    def _unlike(self, flight: Flight[Generation]) -> list[str]:
        """Instances with another checkpoint than those that it ran at: it goes on there only where no others serve."""
        instances = self.instances
        roots = {said.root_key for p in flight.places if p.name in instances and (said := instances[p.name].said)}
        return [i.name for i in instances.values() if roots and i.said is not None and i.said.root_key not in roots]

    def _resumed(self, flight: Flight[Generation], output: TokenOutput) -> None:
        """It has continued: its first output from the new placement has arrived."""
        went = flight.resumed(output, self._clock.now())
        seconds = [None if ms is None else ms / 1e3 for ms in (went.predicted_ms, went.recompute_ms)]
        self._metrics.observe_recovery(went.how, went.took_ms / 1e3, *seconds)
        text = "request %s goes on at %s from token %d: %d tokens of %d were found there%s, after %.1f ms"
        known = len(flight.request.prompt) + output.start
        brought = f" or came from {went.source}" if went.source else ""
        log.info(text, flight.id, flight.route, output.start, output.cached_tokens, known, brought, went.took_ms)

    # --- beside attempts that stand still

    def troubled(self) -> None:
        """What launchers say of instances has changed."""
        for instance in self.instances.values():
            instance.suspicion = self._placement.troubles.get(instance.name, "")
        self._hedge(self._clock.now())

    def _hedge(self, now: float) -> None:
        """Begin again elsewhere what is at instances that may hang, or keep it from them."""
        suspected = suspects(self.instances.values(), now)
        hang = [name for name, _ in suspected]
        begun: Counter[str] = Counter()
        for flight, remedy in to_hedge(suspected, self.flights.values(), now) if suspected else ():
            if flight.id not in self.flights:
                continue  # it has ended with another, which had no place
            if remedy == "keep":
                here = flight.keep(now)
                self._channels.send(here.name, Migrate(here.incarnation, flight.id, flight.attempt, here))
                continue
            life = next(life for life in map(life_of, flight.places) if life in suspected)
            begun[f"{life[0]} may hang ({suspected[life]})"] += 1
            if remedy == "leave":
                flight.leave(f"{life[0]} may hang: {suspected[life]}", hang, now)
                self._go_on(flight)
            else:
                flight.avoid = self._unlike(flight)
                flight.hedge(f"{life[0]} may hang", hang, now)
                flight.asked_first = now
                self._add_keys(flight)
                self._ask(flight)
        for why, count in begun.items():
            log.warning("%s: %d sequences begin again elsewhere as well", why, count)

    def _take_back(self, flight: Flight[Generation]) -> None:
        """The attempt that stood still goes on, and the other one is over."""
        self._cancel(flight, flight.peers)
        flight.take_back()
        flight.avoid.clear()
        self._placement.settled(Settled(flight.id, flight.attempt, flight.at))  # a hand-over may be open, too
        if flight.heard:
            self._placement.begun([flight.id])

    def _let_go(self, flight: Flight[Generation]) -> None:
        """The attempt that stood still is over; its engines learn of that when they go on."""
        peers, attempt = flight.let_go()
        for peer in peers:
            if peer.name in self.instances and self.instances[peer.name].is_current(peer.incarnation):
                self._channels.send(peer.name, Cancel(peer.incarnation, [flight.id], attempt))

    def _came_back(self, flight: Flight[Generation], name: str, output: TokenOutput) -> None:
        """Something came of the attempt that stood still, before anything came of the other."""
        if output.finish is FinishReason.ABORT:
            self._let_go(flight)
            self._ask_again(flight, f"{name} dropped this request")
        elif output.start <= flight.received:  # else who stands still has what is before it
            self._return(flight)

    def _return(self, flight: Flight[Generation]) -> None:
        self._take_back(flight)
        self._metrics.observe_hedge("returned")

    def _ask_again(self, flight: Flight[Generation], why: str) -> None:
        """The attempt that stood still is lost: where it was asked for a place with room to spare, any will do."""
        flight.interrupted = why
        flight.owner.interrupted(flight.index, flight.received, why)
        if not flight.placed:
            flight.again()
            flight.asked_first = self._clock.now()
            self._ask(flight)

    # --- which of them break engines

    def engine_ended(self, ended: EngineEnded) -> None:
        """It is known how an incarnation has ended. It may be said several times."""
        if not self._learn((ended.name, ended.incarnation), ended.broken_by):
            return
        instance = self.instances.get(ended.name)
        if instance is not None and instance.is_current(ended.incarnation):
            self.instance_lost(ended.name, "its process has ended")
        self._rescue()

    def _learn(self, life: Life, broken_by: Sequence[str]) -> bool:
        """Why an incarnation has ended; returns whether that is news."""
        if not self._causes.learn(life):
            return False
        name, now = life[0], self._clock.now()
        for flight in [self.flights[request_id] for request_id in broken_by if request_id in self.flights]:
            match judge(flight, life, broken_by):
                case "suspect":
                    flight.isolate(name, PROBATION, now)
                    self._metrics.observe_isolation("suspected")
                    text = "request %s: %s broke while it computed this and %d others, it is to run alone"
                    log.warning(text, quoted(flight.id), name, len(broken_by) - 1)
                case "guilty":
                    self._refuse(flight, name)
        return True

    def _refuse(self, flight: Flight[Generation], name: str) -> None:
        where = name if name == flight.broke[-1] else f"{flight.broke[-1]} and then {name}"
        flight.refused = f"it has broken {where}, the second time while nothing else was computed"
        self._metrics.observe_isolation("refused")
        log.error("request %s is refused: %s", quoted(flight.id), flight.refused)
        flight.owner.fail(BreaksEngines(f"this request breaks engines, and is not tried again: {flight.refused}"))

    def _wait_for_cause(self, instance: Instance) -> None:
        """Its connection has ended, which may be for any reason."""
        if instance.ready is None or not self._causes.lost(life_of(instance.ready.peer), self._clock.now()):
            return

        def give_up() -> None:
            if self._causes.expire(self._clock.now()):
                self._rescue()

        asyncio.get_running_loop().call_later(1.01 * CAUSE, give_up)

    # --- the engines' events

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
        if self._causes.expire(now):
            self._rescue()
        for flight in list(self.flights.values()):
            flight.tick(now)
        if stranded := self._rescue():
            log.warning("nothing came any more of what an engine had left unfinished: %s", _interrupted(stranded))
        self.troubled()
        for instance in self.instances.values():
            if instance.ready is not None and instance.stuck(now):
                trouble = instance.trouble(now)
                if stranded := self._lose(instance.ready.peer, trouble):
                    log.warning("%s is stuck (%s): %s", instance.name, trouble, _interrupted(stranded))
            self._metrics.observe_up(instance.name, instance.up(now))
        self._readmit_avoided()

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
                self._refused(instance, event)
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
                    self._return(flight)
                if flight is not None and flight.stayed(instance.name, event, instance.heard):
                    self._settle(flight)
                    if flight.stranded:
                        self._go_on(flight)
            case Fetched() if instance.is_current(event.incarnation):
                flight = self.flights.get(event.request_id)
                if flight is not None:
                    flight.fetched(instance.name, event)
            case Lacking():
                self._send_pixels(instance, event)
            case Failed(message=message, requests=requests):
                if instance.ready is not None:
                    self._learn(life_of(instance.ready.peer), requests)
                self.instance_lost(instance.name, message)
            case Stopped() if instance.is_current(event.incarnation):
                self.instance_stopped(instance.name)
            case ChannelLost(message=message):
                self._wait_for_cause(instance)
                self.instance_lost(instance.name, message)
            case msgspec.DecodeError():
                self.instance_lost(instance.name, f"a message from the engine could not be read: {event}")

    def _sleeps_at(self, instance: Instance, level: int) -> None:
        if instance.asleep != level:
            instance.asleep = level
            self.changed.set()
            self._readmit_avoided()

    def _greet(self, instance: Instance, ready: Ready) -> None:
        if instance.ready is not None:
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
        self._readmit_avoided()

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
            stranded = self._lose(ready.peer, reason)
            log.warning("%s was lost (%s): %s", name, reason, _interrupted(stranded))
        self.changed.set()

    def instance_stopped(self, name: str) -> None:
        """An engine has ended as it was told to: what it still had continues elsewhere, and nothing is lost."""
        instance = self.instances[name]
        ready, instance.ready = instance.ready, None
        if ready is not None:
            self._sleeps.lost(name, "it was stopped")
            self._metrics.observe_stop(name)
            stranded = self._lose(ready.peer, "it was stopped")
            log.info("%s was stopped: %s", name, _interrupted(stranded))
        self.changed.set()

    def _lose(self, life: Peer, reason: str) -> int:
        """How many requests it interrupts."""
        now = self._clock.now()
        for flight in list(self.flights.values()):
            for peer in flight.peers:
                if life_of(peer) == life_of(life):
                    flight.lose(peer, reason, now)
            if life_of(life) in map(life_of, flight.held_at):
                self._let_go(flight)
                self._ask_again(flight, f"{life.name} failed during this request ({reason})")
        stranded = {id(flight.owner) for flight in self.flights.values() if flight.stranded}
        self._rescue()
        return len(stranded)

    def _rescue(self) -> int:
        """Continue all stranded sequences elsewhere, the most urgent first; returns the number of requests."""
        stranded = [f for f in self.flights.values() if f.stranded and not self._causes.awaited(f.places)]
        stranded.sort(key=lambda flight: flight.urgency)
        for flight in stranded:
            if flight.id in self.flights:  # a failing one may end others
                self._go_on(flight)
        return len({id(flight.owner) for flight in stranded})

    def _refused(self, instance: Instance, refused: Refused) -> None:
        flight = self.flights.get(refused.request_id)
        if flight is None or not flight.placed or flight.here.name != instance.name or flight.heard:
            return
        if refused.why == "invalid":
            flight.owner.fail(InvalidRequest(refused.message))
        elif flight.launches < ATTEMPTS:  # it never ran there
            flight.failed_at.append(instance.name)
            flight.again()
            self._ask(flight)
        else:
            self._give_up(flight, Unavailable("no instance took this request"))

    def _deliver(self, name: str, report: StepReport) -> None:
        unknown = [o.request_id for o in report.outputs if o.request_id not in self.flights and o.finish is None]
        if unknown:  # cancelled while the step ran, or while it was handed over
            self._channels.send(name, Cancel(report.incarnation, unknown))
        for output in report.outputs:
            flight = self.flights.get(output.request_id)
            if flight is None:
                continue
            if flight.is_held(name, report.incarnation, output.generation):
                self._came_back(flight, name, output)
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
                self._routed(flight)
                self._settle(flight)
            if flight.heard and not heard:
                self._placement.begun([output.request_id])
                if flight.held_at:
                    self._let_go(flight)
                    self._metrics.observe_hedge("overtaken")
                if flight.interrupted:
                    self._resumed(flight, output)
            if flight.first is not None and first is None:
                self._leave_queue(flight, now)
            if flight.first is not None and first is None and flight.predicted_ttft is not None:
                self._metrics.observe_prediction(flight.predicted_ttft, now - flight.arrival)
            for piece in pieces:
                if piece.finish is not None:
                    self._finished(flight, now)
                flight.owner.receive(flight.index, piece, now)
                if output.request_id not in self.flights:
                    return  # a stop string ended it, whatever comes after
            if flight.stranded:
                self._go_on(flight)
        except (EngineFailure, InvalidRequest) as error:
            log.warning("request %s: %s", quoted(output.request_id), error)
            flight.owner.fail(error)
        except Exception:  # this request fails; the others continue
            log.exception("request %s failed", quoted(output.request_id))
            flight.owner.fail(EngineFailure("the answer could not be put together"))

    def _finished(self, flight: Flight[Generation], now: float) -> None:
        self._forget(flight, flight.outcome(now))
        self._cancel(flight, [peer for peer in flight.peers if peer.name != flight.at])


def _interrupted(requests: int) -> str:
    return f"{requests} request{' is' if requests == 1 else 's are'} to go on elsewhere"
