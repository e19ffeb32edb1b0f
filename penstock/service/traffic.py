"""Sequences on their way through the engines: where each is sent, what comes back, and what a loss does to it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import msgspec

from penstock.core.clock import Clock
from penstock.core.errors import EngineFailure, InvalidRequest, Unavailable
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
    Shutdown,
    StepReport,
)
from penstock.core.wire.master import NoPlace, Outcome, Place, Placed, Queued
from penstock.obs.metrics import Metrics
from penstock.service.flight import Flight
from penstock.service.generation import Generation
from penstock.service.instances import Endpoint, Instance, LinkLost
from penstock.service.placement import Answer, Placement
from penstock.service.waiting import WaitingRoom

log = logging.getLogger("penstock.frontend")
TICK = 0.25  # seconds
MASTER_LEARNS = 1.0  # seconds until it has heard of an instance that is ready
ATTEMPTS = 4  # places that a sequence is sent to until one takes it


class Link(Protocol):
    """What a frontend needs of its wire to an engine."""

    def send(self, message: Command, /) -> None: ...
    async def receive(self) -> Event | LinkLost: ...
    def close(self) -> None: ...


@dataclass(slots=True)
class Held:
    """A sequence that is not over.

    Attributes:
        generation, index: whose it is, and which of its outputs.
        arrival: of the request, by the clock.
        keys: prefix keys of the prompt's full blocks, where somebody wants them.
        asked_first: when a place was first asked for.
        failed_at: instances that did not take it.
        chat: the conversation that it belongs to; "" when that is not known.
        launched, first: when it was sent to an engine, and when its first token came.
        predicted_ttft: what was predicted for that, in seconds from its arrival.
    """

    generation: Generation
    index: int
    flight: Flight
    arrival: float
    keys: list[bytes] = field(default_factory=list)
    asked_first: float = 0.0
    failed_at: list[str] = field(default_factory=list)
    chat: str = ""
    launched: float = 0.0
    first: float | None = None
    predicted_ttft: float | None = None

    def outcome(self, now: float) -> Outcome | None:
        """How it ended, now that all its tokens have come; None when there were none."""
        tokens = self.flight.received
        if self.first is None:
            return None
        return Outcome(
            self.flight.request.id,
            (self.first - self.arrival) * 1e3,
            (now - self.first) / (tokens - 1) * 1e3 if tokens > 1 else None,
            (self.launched - self.arrival) * 1e3,
            tokens,
        )


class Traffic:
    """
    Args:
        endpoints: of every instance.
        links: to each, by name.
        placement: says where sequences run.

    Attributes:
        held: the sequences that are not over, by id.
        pace: seconds from one sequence's end to the next, lately.
        changed: set when an instance begins or ends to serve.
    """

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        links: Mapping[str, Link],
        placement: Placement,
        metrics: Metrics,
        clock: Clock,
    ) -> None:
        self.instances = {e.name: Instance(e.name, e.pool) for e in endpoints}
        self.held: dict[str, Held] = {}
        self.pace = 0.0
        self.changed = asyncio.Event()
        self._links = links
        self._placement = placement
        self._metrics = metrics
        self._clock = clock
        self._ended_at = clock.now()
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
        for link in self._links.values():
            link.close()

    def stop_engines(self) -> None:
        for link in self._links.values():
            link.send(Shutdown())

    def add(self, sequences: Sequence[Held]) -> None:
        """Sequences that shall run: from now on they are held, and their generation gets what comes of them."""
        self.held.update((held.flight.request.id, held) for held in sequences)

    def release(self, sequence_ids: Sequence[str]) -> None:
        """Forget sequences that are not wanted any longer, and have the engines drop them."""
        for sequence_id in sequence_ids:
            held = self.held.get(sequence_id)
            if held is not None:
                self._forget(held)
                for peer in held.flight.peers:
                    self._cancel(peer, [sequence_id])

    def _forget(self, held: Held, outcome: Outcome | None = None) -> None:
        sequence_id = held.flight.request.id
        del self.held[sequence_id]
        self._waiting.leave(sequence_id)
        self._placement.ended([sequence_id], [outcome] if outcome is not None else [])

    def _cancel(self, peer: Peer, sequence_ids: list[str]) -> None:
        if self.instances[peer.name].is_life(peer.incarnation):
            self._links[peer.name].send(Cancel(peer.incarnation, sequence_ids))

    # --- places

    def find_places(self, sequences: Sequence[Held]) -> None:
        """Have sequences run that were added, unless they are over by now."""
        for held in sequences:
            if held.flight.request.id in self.held:
                held.asked_first = self._clock.now()
                if self._waiting:
                    self._waiting.enter(held.flight.request.id)
                else:
                    self._ask(held)

    def _ask(self, held: Held) -> None:
        try:
            self._placement.ask(self._question(held))
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
            self._ask_elsewhere(held, missing)
            return
        self._launch(held, answer)
        self._waiting.leave(answer.request_id)
        self._waiting.hurry()

    def _nowhere(self, held: Held, answer: NoPlace) -> None:
        now = self._clock.now()
        serving = any(instance.serves(now) for instance in self.instances.values())
        if held.failed_at or not serving or now > self._believes_from(held):
            held.generation.fail(Unavailable(answer.message, answer.retry_after))
        else:
            self._waiting.enter(answer.request_id)

    def _believes_from(self, held: Held) -> float:
        """When it is believed that nobody can take it: the master may only just begin to know the instances."""
        return max(held.asked_first, self._placement.since) + MASTER_LEARNS

    def _ask_elsewhere(self, held: Held, without: list[str]) -> None:
        held.failed_at += without
        held.flight.again()
        if held.flight.attempt < ATTEMPTS:
            self._ask(held)
        else:
            held.generation.fail(Unavailable("no instance took this request"))

    def _question(self, held: Held) -> Place:
        request = held.flight.request
        return Place(
            request.id,
            len(request.prompt),
            request.max_tokens,
            held.keys,
            request.priority,
            held.flight.attempt,
            self._clock.now() - held.arrival,
            held.failed_at,
            request.ttft_ms,
            request.tpot_ms,
            request.offline,
            held.chat,
        )

    def _reaches(self, peer: Peer) -> bool:
        instance = self.instances.get(peer.name)
        return instance is not None and instance.is_life(peer.incarnation)

    def _launch(self, held: Held, placed: Placed) -> None:
        flight, held.launched = held.flight, self._clock.now()
        held.predicted_ttft = placed.predicted_ttft
        flight.launch(placed.prefill, placed.decode)
        request = replace(
            flight.request, waited=held.launched - held.arrival, ttft_ms=placed.ttft_ms, tpot_ms=placed.tpot_ms
        )
        self._metrics.observe_routing(placed.policy, placed.reason.partition(":")[0])
        held.generation.routed(flight.route)
        self._links[placed.prefill.name].send(
            Enqueue(placed.prefill.incarnation, request, flight.attempt, placed.decode)
        )

    # --- the engines' events

    async def _listen(self, instance: Instance) -> None:
        while True:
            try:
                event = await self._links[instance.name].receive()
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
        for held in [self.held[sequence_id] for sequence_id in self._waiting]:
            if now > self._believes_from(held):
                held.generation.fail(Unavailable("no instance could take this request in time"))
        self._end_overdue(now)
        for instance in self.instances.values():
            if instance.ready is not None and instance.stuck(now):
                trouble = instance.trouble(now)
                if ended := self._lose(instance.ready.peer, trouble):
                    log.warning("%s is stuck (%s): %s", instance.name, trouble, _ended(ended))
            self._metrics.observe_up(instance.name, instance.serves(now))

    def _end_overdue(self, now: float) -> None:
        overdue = {id(h.generation): h for h in self.held.values() if h.flight.overdue(now)}
        for held in overdue.values():
            held.generation.fail(EngineFailure(held.flight.why_overdue()))
        if overdue:
            log.warning("nothing came any more of what an engine had left unfinished: %s", _ended(len(overdue)))

    def _handle(self, instance: Instance, event: Event | LinkLost) -> None:
        instance.heard = self._clock.now()
        match event:
            case StepReport() if instance.is_life(event.incarnation):
                self._metrics.observe_stats(instance.name, event.stats, event.step_tokens)
                self._deliver(instance.name, event)
            case Ready():
                self._greet(instance, event)
            case Refused():
                self._refused(instance, event)
            case Failed(message=message) | LinkLost(message=message):
                self.instance_lost(instance.name, message)

    def _greet(self, instance: Instance, ready: Ready) -> None:
        if instance.ready is not None:
            self.instance_lost(instance.name, "another life of the engine has begun")
        instance.ready = instance.said = ready
        instance.lost, instance.pool = "", ready.pool
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
        """An engine is gone: its requests end with an error unless another engine has them by now."""
        instance = self.instances[name]
        instance.lost = instance.lost or reason
        ready, instance.ready = instance.ready, None
        if ready is not None:
            self._metrics.observe_loss(name)
            ended = self._lose(ready.peer, reason)
            log.warning("%s was lost (%s): %s", name, reason, _ended(ended))
        self.changed.set()

    def _lose(self, life: Peer, reason: str) -> int:
        """How many requests end with it."""
        now = self._clock.now()
        ended = set()
        for held in list(self.held.values()):
            peer = next(
                (p for p in held.flight.peers if p.name == life.name and p.incarnation == life.incarnation), None
            )
            if peer is not None:
                try:
                    held.flight.lose(peer, reason, now)
                except EngineFailure as error:
                    held.generation.fail(error)
                    ended.add(id(held.generation))
        return len(ended)

    def _refused(self, instance: Instance, refused: Refused) -> None:
        held = self.held.get(refused.request_id)
        prefill = held.flight.prefill if held is not None else None
        if held is None or prefill is None or prefill.name != instance.name or held.flight.received:
            return
        if refused.why == "invalid":
            held.generation.fail(InvalidRequest(refused.message))
        else:  # it never ran there
            self._ask_elsewhere(held, [instance.name])

    def _deliver(self, name: str, report: StepReport) -> None:
        unknown = [o.request_id for o in report.outputs if o.request_id not in self.held and o.finish is None]
        if unknown:  # cancelled while the step ran, or while it was handed over
            self._links[name].send(Cancel(report.incarnation, unknown))
        for output in report.outputs:
            held = self.held.get(output.request_id)
            if held is not None:
                self._receive(held, name, report.incarnation, output)

    def _receive(self, held: Held, name: str, incarnation: int, output: TokenOutput) -> None:
        flight, now = held.flight, self._clock.now()
        before = flight.handed_over
        try:
            pieces = flight.accept(name, incarnation, output, now)
            if flight.handed_over and not before:
                self._metrics.observe_handoff()
            for piece in pieces:
                if piece.tokens and held.first is None:
                    held.first = now
                    if held.predicted_ttft is not None:
                        self._metrics.observe_prediction(held.predicted_ttft, now - held.arrival)
                    self._placement.begun([output.request_id])
                if piece.finish is not None:
                    self._finished(held, now)
                held.generation.receive(held.index, piece, now)
                if output.request_id not in self.held:
                    break  # a stop string ended it, whatever comes after
        except EngineFailure as error:
            log.warning("request %s: %s", output.request_id, error)
            held.generation.fail(error)
        except Exception:  # of this one request: the others go on
            log.exception("request %s failed", output.request_id)
            held.generation.fail(EngineFailure("the answer could not be put together"))

    def _finished(self, held: Held, now: float) -> None:
        self._forget(held, held.outcome(now))
        self.pace += 0.1 * (now - self._ended_at - self.pace)
        self._ended_at = now
        flight = held.flight
        unaware = flight.prefill if flight.handed_over else flight.decode
        if unaware in flight.peers and unaware is not None:
            self._cancel(unaware, [flight.request.id])


def _ended(requests: int) -> str:
    return f"{requests} request{'' if requests == 1 else 's'} ended with an error"
