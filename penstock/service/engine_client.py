"""Sequences on their way through the engines: where each is sent, what comes back, and what a loss does to it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from penstock.core.clock import Clock
from penstock.core.errors import EngineFailure, InvalidRequest, PenstockError, Unavailable
from penstock.core.request import TokenOutput
from penstock.core.wire.engine import (
    Cancel,
    Command,
    Enqueue,
    Event,
    Failed,
    Peer,
    Ready,
    Refused,
    StepReport,
)
from penstock.core.wire.master import NoPlace, Outcome, Placed, Queued
from penstock.obs.metrics import Metrics
from penstock.service.flight import AGAIN, ATTEMPTS, PATIENCE, Flight
from penstock.service.generation import Generation
from penstock.service.instances import ChannelLost, Endpoint, Instance
from penstock.service.placement import Answer, Placement
from penstock.service.rates import RateMeter
from penstock.service.waiting import WaitingRoom

log = logging.getLogger("penstock.frontend")
TICK = 0.25  # seconds
MASTER_LEARNS = 1.0  # seconds until it has heard of an instance that is ready


class Channel(Protocol):
    """What a frontend needs of its wire to an engine."""

    def send(self, message: Command, /) -> None: ...
    async def receive(self) -> Event | ChannelLost: ...
    def close(self) -> None: ...


@dataclass(slots=True)
class Held:
    """A sequence that is not over.

    Attributes:
        generation, index: whose it is, and which of its outputs.
        asked_first: when a place was first asked for, since it has none.
        failed_at: instances that did not take it.
        queued: tokens of its prompt, until its first token comes.
        avoid: instances that it should not be given just now: they are gone, of which the master may not know yet.
        predicted_ttft: when its first token was predicted, in seconds from its arrival.
    """

    generation: Generation
    index: int
    flight: Flight
    asked_first: float = 0.0
    failed_at: list[str] = field(default_factory=list)
    avoid: list[str] = field(default_factory=list)
    predicted_ttft: float | None = None
    queued: int = 0


class EngineClient:
    """
    Args:
        endpoints: of every instance.
        channels: to each, by name.
        placement: says where sequences run.

    Attributes:
        held: the sequences that are not over, by id.
        patience: seconds that requests which were interrupted wait for a place.
        queued_tokens: of the prompts whose first token has not come.
        prefill_rate: how fast those come out of the queue, in their tokens.
        completion_rate: how fast sequences end.
        changed: set when an instance begins or ends to serve.
    """

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        channels: Mapping[str, Channel],
        placement: Placement,
        metrics: Metrics,
        clock: Clock,
    ) -> None:
        self.instances = {e.name: Instance(e.name, e.role) for e in endpoints}
        self.held: dict[str, Held] = {}
        self.patience = PATIENCE
        self.queued_tokens = 0
        self.prefill_rate, self.completion_rate = RateMeter(), RateMeter()
        self.changed = asyncio.Event()
        self._channels = channels
        self._placement = placement
        self._metrics = metrics
        self._clock = clock
        self._tasks: list[asyncio.Task[None]] = []
        self._waiting = WaitingRoom(lambda sequence_id: self._ask(self.held[sequence_id]))

    @property
    def trouble(self) -> str:
        """Why nothing can be placed; "" when it can."""
        return self._placement.trouble

    @property
    def wants_keys(self) -> bool:
        """Whether places depend on prefix keys."""
        return self._placement.wants_keys

    def start(self) -> None:
        """Begin to listen to the engines; call it inside the event loop."""
        self._placement.start(self._answered)
        self._tasks = [asyncio.create_task(self._listen(instance)) for instance in self.instances.values()]
        self._tasks.append(asyncio.create_task(self._keep_time()))

    async def close(self) -> None:
        self._waiting.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._placement.close()
        for channel in self._channels.values():
            channel.close()

    def add(self, sequences: Sequence[Held]) -> None:
        """Sequences that shall run: from now on they are held, and their generation gets what comes of them."""
        now = self._clock.now()
        self.prefill_rate.begin(now)
        self.completion_rate.begin(now)
        for held in sequences:
            held.queued = len(held.flight.request.prompt)
            self.queued_tokens += held.queued
            self.held[held.flight.id] = held

    def release(self, sequence_ids: Sequence[str]) -> None:
        """Forget sequences that are not wanted any longer, and have the engines drop them."""
        for sequence_id in sequence_ids:
            held = self.held.get(sequence_id)
            if held is not None:
                self._forget(held)
                self._cancel(held.flight, held.flight.peers)

    def _forget(self, held: Held, outcome: Outcome | None = None) -> None:
        sequence_id, now = held.flight.id, self._clock.now()
        del self.held[sequence_id]
        self._leave_queue(held, now)
        if outcome is not None:
            self.completion_rate.count(now, 1)
        if not self.held:
            self.completion_rate.rest(now)
        self._waiting.leave(sequence_id)
        self._placement.ended([sequence_id], [outcome] if outcome is not None else [])

    def _leave_queue(self, held: Held, now: float) -> None:
        self.queued_tokens -= held.queued
        if held.queued and held.flight.first is not None:
            self.prefill_rate.count(now, held.queued)
        held.queued = 0
        if not self.queued_tokens:
            self.prefill_rate.rest(now)

    def _cancel(self, flight: Flight, peers: Iterable[Peer]) -> None:
        """Have this attempt dropped there."""
        for peer in peers:
            if self.instances[peer.name].is_current(peer.incarnation):
                self._channels[peer.name].send(Cancel(peer.incarnation, [flight.id], flight.attempt))

    # --- places

    def find_places(self, sequences: Sequence[Held]) -> None:
        """Have sequences run that were added, unless they are over by now."""
        for held in sequences:
            if held.flight.id in self.held:
                held.asked_first = self._clock.now()
                if self._waiting:
                    self._waiting.enter(held.flight.id)
                else:
                    self._ask(held)

    def _ask(self, held: Held) -> None:
        try:
            self._placement.ask(held.flight.question(self._clock.now(), [*held.failed_at, *held.avoid]))
        except Exception as error:
            self._cannot_place(held, error)

    def _answered(self, answer: Answer) -> None:
        held = self.held.get(answer.request_id)
        if held is None or held.flight.attempt != answer.generation:
            return  # cancelled meanwhile
        try:
            match answer:
                case Placed():
                    self._take_place(held, answer)
                case NoPlace():
                    self._nowhere(held, answer)
                case Queued():  # it waits at the master, who will say so when there is a place
                    self._waiting.leave(answer.request_id)
                    self._waiting.hurry()
        except Exception as error:
            self._cannot_place(held, error)

    def _cannot_place(self, held: Held, error: Exception) -> None:
        log.error("a sequence could not be placed", exc_info=error)
        held.generation.fail(EngineFailure(f"the request could not be placed: {type(error).__name__}"))

    def _take_place(self, held: Held, answer: Placed) -> None:
        missing = [p.name for p in (answer.prefill, answer.decode) if p is not None and not self._reaches(p)]
        if missing:  # the master has not noticed yet
            held.avoid += missing
            held.flight.again()
            self._ask(held)
            return
        self._launch(held, answer)
        self._waiting.leave(answer.request_id)
        self._waiting.hurry()

    def _nowhere(self, held: Held, answer: NoPlace) -> None:
        now = self._clock.now()
        held.avoid.clear()
        serving = any(instance.serves(now) for instance in self.instances.values())
        hopeless = not held.flight.interrupted and (held.failed_at or not serving)
        if hopeless or now > self._believes_from(held):
            self._give_up(held, Unavailable(answer.message, answer.retry_after))
        else:
            self._waiting.enter(answer.request_id)

    def _believes_from(self, held: Held) -> float:
        """When it is believed that nobody can take it: the master may only just begin to know the instances, and an
        instance that died may be just starting again."""
        patience = self.patience if held.flight.interrupted else MASTER_LEARNS
        return max(held.asked_first, self._placement.since) + patience

    def _give_up(self, held: Held, error: PenstockError) -> None:
        """Nobody takes it."""
        if why := held.flight.interrupted:
            error = EngineFailure(f"{why}, and nobody could go on with it, {AGAIN}")
        held.generation.fail(error)

    def _reaches(self, peer: Peer) -> bool:
        instance = self.instances.get(peer.name)
        return instance is not None and instance.is_current(peer.incarnation) and instance.serves(self._clock.now())

    def _launch(self, held: Held, placed: Placed) -> None:
        flight = held.flight
        held.avoid.clear()
        if flight.first is None:
            held.predicted_ttft = placed.predicted_ttft
        request = flight.launch(placed, self._clock.now())
        self._metrics.observe_routing(placed.policy, placed.reason.partition(":")[0])
        held.generation.routed(flight.route)
        self._channels[placed.prefill.name].send(
            Enqueue(placed.prefill.incarnation, request, flight.attempt, flight.decode)
        )

    # --- going on elsewhere

    def _go_on(self, held: Held) -> None:
        """It is stranded: have it run elsewhere, from the tokens that its client has."""
        flight, now = held.flight, self._clock.now()
        self._cancel(flight, flight.peers)
        if flight.launches >= ATTEMPTS:
            why = f"{flight.interrupted}, one of {flight.launches} places where it was tried in vain"
            log.warning("request %s: %s", flight.id, why)
            held.generation.fail(EngineFailure(why))
            return
        log.info("request %s: %s; it has %d tokens", flight.id, flight.interrupted, flight.received)
        places = [peer for peer in (flight.prefill, flight.decode) if peer is not None]
        held.avoid = [peer.name for peer in places if peer.name == flight.suspect or not self._reaches(peer)]
        flight.again()
        held.asked_first = now
        root = next((i.said.root_key for i in self.instances.values() if i.said is not None), None)
        if self.wants_keys and root is not None:
            flight.add_keys(root)
        self._ask(held)

    def _resumed(self, held: Held, output: TokenOutput) -> None:
        """It runs again: its first output there has come."""
        flight = held.flight
        self._metrics.observe_recovery("fetch" if output.cached_tokens else "recompute")
        text = "request %s goes on at %s from token %d: %d tokens of %d were found there"
        known = len(flight.request.prompt) + output.start
        log.info(text, flight.id, flight.route, output.start, output.cached_tokens, known)

    # --- the engines' events

    async def _listen(self, instance: Instance) -> None:
        while True:
            try:
                event = await self._channels[instance.name].receive()
            except msgspec.DecodeError as error:
                self.instance_lost(instance.name, f"a message from the engine could not be read: {error}")
                continue
            try:
                self._handle(instance, event)
            except Exception as error:  # nobody else would notice
                log.exception("the frontend failed")
                self.instance_lost(instance.name, f"the frontend failed: {type(error).__name__}")

    async def _keep_time(self) -> None:
        while True:
            await asyncio.sleep(TICK)
            self.tick()

    def tick(self) -> None:
        """End what has waited in vain."""
        now = self._clock.now()
        self._placement.tick(now)
        self._metrics.observe_queue(self._placement.waiting)
        for sequence_id in self._waiting:
            held = self.held.get(sequence_id)  # one that fails takes others with it
            if held is not None and now > self._believes_from(held):
                self._give_up(held, Unavailable("no instance could take this request in time"))
        for held in list(self.held.values()):
            held.flight.tick(now)
        if stranded := self._rescue():
            log.warning("nothing came any more of what an engine had left unfinished: %s", _interrupted(stranded))
        for instance in self.instances.values():
            if instance.ready is not None and instance.stuck(now):
                trouble = instance.trouble(now)
                if stranded := self._lose(instance.ready.peer, trouble):
                    log.warning("%s is stuck (%s): %s", instance.name, trouble, _interrupted(stranded))
            self._metrics.observe_up(instance.name, instance.serves(now))

    def _handle(self, instance: Instance, event: Event | ChannelLost) -> None:
        instance.heard = self._clock.now()
        match event:
            case StepReport() if instance.is_current(event.incarnation):
                self._metrics.observe_stats(instance.name, event.stats, event.step_tokens)
                self._deliver(instance.name, event)
            case Ready():
                self._greet(instance, event)
            case Refused():
                self._refused(instance, event)
            case Failed(message=message) | ChannelLost(message=message):
                self.instance_lost(instance.name, message)

    def _greet(self, instance: Instance, ready: Ready) -> None:
        if instance.ready is not None:
            self.instance_lost(instance.name, "another life of the engine has begun")
        instance.ready = instance.said = ready
        instance.lost, instance.role = "", ready.role
        self._metrics.observe_up(instance.name, True)
        self._compare_lengths(instance.name, ready.max_model_len)
        if len(self.instances) > 1 and all(other.ready is not None for other in self.instances.values()):
            log.info("%d of %d instances are ready", len(self.instances), len(self.instances))
        self.changed.set()
        self._waiting.hurry()

    def _compare_lengths(self, name: str, length: int) -> None:
        """The shortest one limits every request, so that each fits wherever it is placed, also after a loss."""
        others = {i.said.max_model_len for i in self.instances.values() if i.said is not None and i.name != name}
        if others - {length}:
            limit = min(length, *others)
            shown = " and ".join(str(other) for other in sorted(others))
            text = "%s has a max-model-len of %d, others have %s: no request may be longer than %d, wherever it runs"
            log.warning(text, name, length, shown, limit)

    def instance_lost(self, name: str, reason: str) -> None:
        """An engine is gone: its requests go on elsewhere, unless another engine has them by now."""
        instance = self.instances[name]
        instance.lost = instance.lost or reason
        ready, instance.ready = instance.ready, None
        if ready is not None:
            self._metrics.observe_loss(name)
            stranded = self._lose(ready.peer, reason)
            log.warning("%s was lost (%s): %s", name, reason, _interrupted(stranded))
        self.changed.set()

    def _lose(self, life: Peer, reason: str) -> int:
        """How many requests it interrupts."""
        now = self._clock.now()
        for held in self.held.values():
            for peer in held.flight.peers:
                if (peer.name, peer.incarnation) == (life.name, life.incarnation):
                    held.flight.lose(peer, reason, now)
        return self._rescue()

    def _rescue(self) -> int:
        """Have all that is stranded go on elsewhere, the most urgent first; of how many requests that was."""
        stranded = [held for held in self.held.values() if held.flight.stranded]
        stranded.sort(key=lambda held: held.flight.urgency)
        for held in stranded:
            if held.flight.id in self.held:  # one that fails takes others with it
                self._go_on(held)
        return len({id(held.generation) for held in stranded})

    def _refused(self, instance: Instance, refused: Refused) -> None:
        held = self.held.get(refused.request_id)
        prefill = held.flight.prefill if held is not None else None
        if held is None or prefill is None or prefill.name != instance.name or held.flight.heard:
            return
        if refused.why == "invalid":
            held.generation.fail(InvalidRequest(refused.message))
        elif held.flight.launches < ATTEMPTS:  # it never ran there
            held.failed_at.append(instance.name)
            held.flight.again()
            self._ask(held)
        else:
            self._give_up(held, Unavailable("no instance took this request"))

    def _deliver(self, name: str, report: StepReport) -> None:
        unknown = [o.request_id for o in report.outputs if o.request_id not in self.held and o.finish is None]
        if unknown:  # cancelled while the step ran, or while it was handed over
            self._channels[name].send(Cancel(report.incarnation, unknown))
        for output in report.outputs:
            held = self.held.get(output.request_id)
            if held is None:
                continue
            if output.generation < held.flight.attempt and output.finish is None:  # so was one that is over
                self._channels[name].send(Cancel(report.incarnation, [output.request_id], output.generation))
            self._receive(held, name, report.incarnation, output)

    def _receive(self, held: Held, name: str, incarnation: int, output: TokenOutput) -> None:
        flight, now = held.flight, self._clock.now()
        handed_over, heard, first = flight.handed_over, flight.heard, flight.first
        try:
            pieces = flight.accept(name, incarnation, output, now)
            if flight.handed_over and not handed_over:
                self._metrics.observe_handoff()
            if flight.heard and not heard:
                self._placement.begun([output.request_id])
                if flight.interrupted:
                    self._resumed(held, output)
            if flight.first is not None and first is None:
                self._leave_queue(held, now)
            if flight.first is not None and first is None and held.predicted_ttft is not None:
                self._metrics.observe_prediction(held.predicted_ttft, now - flight.arrival)
            for piece in pieces:
                if piece.finish is not None:
                    self._finished(held, now)
                held.generation.receive(held.index, piece, now)
                if output.request_id not in self.held:
                    return  # a stop string ended it, whatever comes after
            if flight.stranded:
                self._go_on(held)
        except EngineFailure as error:
            log.warning("request %s: %s", output.request_id, error)
            held.generation.fail(error)
        except Exception:  # of this one request: the others go on
            log.exception("request %s failed", output.request_id)
            held.generation.fail(EngineFailure("the answer could not be put together"))

    def _finished(self, held: Held, now: float) -> None:
        self._forget(held, held.flight.outcome(now))
        flight = held.flight
        unaware = flight.prefill if flight.handed_over else flight.decode
        self._cancel(flight, [peer for peer in flight.peers if peer is unaware])


def _interrupted(requests: int) -> str:
    return f"{requests} request{' is' if requests == 1 else 's are'} to go on elsewhere"
