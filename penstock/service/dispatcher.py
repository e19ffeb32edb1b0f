"""A frontend's sequences: asks for their places, sends them there, and tells engines and master what comes of them."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import inf

from penstock.core.clock import Clock
from penstock.core.errors import EngineFailure, InvalidRequest, PenstockError, Unavailable
from penstock.core.heartbeat import step_limit
from penstock.core.wire.engine import (
    Cancel,
    Command,
    Encode,
    Enqueue,
    ImageSource,
    Lacking,
    Migrate,
    Peer,
    Pixels,
    Ready,
    Refused,
    Role,
)
from penstock.core.wire.master import NoPlace, Outcome, Place, Placed, Queued, Relocate, Settled
from penstock.obs.logs import quoted
from penstock.obs.metrics import Metrics
from penstock.sched.local.awaited_images import without_images
from penstock.service.fallback import least_loaded
from penstock.service.flight import AGAIN, ATTEMPTS, PATIENCE, Flight, peers_of
from penstock.service.generation import Generation
from penstock.service.hedging import AGAIN as HEDGE_AGAIN
from penstock.service.placement import NOBODY, Answer, Placement
from penstock.service.queue import FrontendQueue

log = logging.getLogger("penstock.frontend")
RECOUNTED = 0.25  # seconds for which sequences on instances are not counted again
SILENT_AFTER = 2.0  # seconds without a message after which an instance counts as silent
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


class Dispatcher:
    """
    Args:
        placement: says where sequences run.
        send: a command to an instance, by name.

    Attributes:
        instances: that run, by name; kept up to date by their owner.
        flights: the sequences that are not over, by id.
        queue: how many these are, and how fast they get on.
        patience: seconds that interrupted requests wait for a placement.
    """

    def __init__(
        self, placement: Placement, send: Callable[[str, Command], None], metrics: Metrics, clock: Clock
    ) -> None:
        self.instances: dict[str, Instance] = {}
        self.flights: dict[str, Flight[Generation]] = {}
        self.queue = FrontendQueue()
        self.patience = PATIENCE
        self._placement, self._send = placement, send
        self._metrics, self._clock = metrics, clock
        self._counted: Counter[str] = Counter()  # sequences on each instance, for `choose`
        self._counted_at = -inf

    def start(self) -> None:
        """Take answers from now on."""
        self._placement.start(self._answered, self.choose)

    @property
    def trouble(self) -> str:
        """Why no request can be placed; "" when one can."""
        return self._placement.trouble

    @property
    def wants_keys(self) -> bool:
        """Whether places depend on prefix keys."""
        return self._placement.wants_keys

    def add(self, sequences: Sequence[Flight[Generation]]) -> None:
        """Add sequences; their outputs go to their generation."""
        now = self._clock.now()
        for flight in sequences:
            self.queue.add(flight, now)
            self.flights[flight.id] = flight

    def release(self, sequence_ids: Sequence[str]) -> None:
        """Remove sequences and cancel them at the engines."""
        for sequence_id in sequence_ids:
            flight = self.flights.get(sequence_id)
            if flight is not None:
                self.end(flight)
                self.cancel(flight, flight.peers)
                if flight.held_at:
                    self.let_go(flight)

    def end(self, flight: Flight[Generation], outcome: Outcome | None = None) -> None:
        """It is over; `outcome`: after all its tokens."""
        del self.flights[flight.id]
        self.queue.end(flight, self._clock.now(), whole=outcome is not None)
        refused = {flight.id: flight.refused} if flight.refused else NOBODY
        self._placement.ended([flight.id], [outcome] if outcome is not None else [], refused)

    def cancel(self, flight: Flight[Generation], peers: Iterable[Peer]) -> None:
        """Cancel this attempt at its engines."""
        for peer in peers:
            if peer.name in self.instances and self.instances[peer.name].is_current(peer.incarnation):
                self._send(peer.name, Cancel(peer.incarnation, [flight.id], flight.attempt))

    # --- places

    def find_places(self, sequences: Sequence[Flight[Generation]]) -> None:
        """Ask for placements of added sequences, unless they have ended."""
        for flight in sequences:
            if flight.id in self.flights:
                flight.asked_first = self._clock.now()
                self.ask(flight)

    def ask(self, flight: Flight[Generation]) -> None:
        """Ask for a placement of this attempt."""
        try:
            now = self._clock.now()
            self._placement.ask(flight.question(now, self._patience_of(flight, now)))
        except Exception as error:
            self._cannot_place(flight, error)

    def choose(self, place: Place) -> Placed | None:
        """A place that needs no master."""
        if place.hedged:
            return None
        now = self._clock.now()
        if now - self._counted_at >= RECOUNTED:  # not for each: thousands may ask at once
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
                    self.give_up(flight, Unavailable(answer.message, answer.retry_after))
                case Queued():
                    pass  # it is in the master's queue; another answer follows
                case Relocate():
                    self._metrics.observe_relocation(answer.reason.partition(":")[0])
                    self._move(flight, answer.peer)
        except Exception as error:
            self._cannot_place(flight, error)

    def _cannot_place(self, flight: Flight[Generation], error: Exception) -> None:
        log.error("a sequence could not be placed", exc_info=error)
        flight.owner.fail(EngineFailure(f"the request could not be placed: {type(error).__name__}"))

    def _take_place(self, flight: Flight[Generation], answer: Placed) -> None:
        missing = [peer.name for peer in peers_of(answer.route) if not self.reaches(peer)]
        if missing:  # the master does not know of the loss yet
            flight.avoid += missing
            flight.again()
            self.ask(flight)
            return
        self._launch(flight, answer)

    def _move(self, flight: Flight[Generation], peer: Peer) -> None:
        """Have it handed over, if that can be."""
        source = flight.move(peer) if self.reaches(peer) else None
        if source is None:
            self.settle(flight)
        else:
            self._send(source.name, Migrate(source.incarnation, flight.id, flight.attempt, peer))

    def settle(self, flight: Flight[Generation]) -> None:
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

    def readmit_avoided(self) -> None:
        """Ask again for sequences without a placement that avoid all instances that serve: one may be back, or no
        longer stuck, or better than none."""
        now = self._clock.now()
        serving = {instance.name for instance in self.instances.values() if instance.serves(now)}
        for flight in list(self.flights.values()):
            able = serving.difference(flight.failed_at)
            if not flight.placed and not flight.held_at and able and able.issubset(flight.avoid):
                flight.avoid.clear()
                flight.again()
                self.ask(flight)

    def give_up(self, flight: Flight[Generation], error: PenstockError) -> None:
        """No instance can take it: end it with an error, unless it still is at one that may hang."""
        if flight.held_at:
            flight.hedge_at = self._clock.now() + HEDGE_AGAIN
            self.take_back(flight)
            return
        if why := flight.interrupted:
            error = EngineFailure(f"{why}, and no instance could continue it, {AGAIN}")
        flight.owner.fail(error)

    def reaches(self, peer: Peer) -> bool:
        """Whether this incarnation serves."""
        instance = self.instances.get(peer.name)
        return instance is not None and instance.is_current(peer.incarnation) and instance.serves(self._clock.now())

    def _launch(self, flight: Flight[Generation], placed: Placed) -> None:
        flight.avoid.clear()
        if flight.first is None:
            flight.predicted_ttft = placed.predicted_ttft
        request = flight.launch(placed, self._clock.now())
        self._metrics.observe_routing(placed.policy, placed.reason.partition(":")[0])
        self.routed(flight)
        first, source = flight.here, placed.source
        if source is not None and source.peer is not None and not self.reaches(source.peer):
            source = None  # it is computed
        images = [image for image in placed.images if self.reaches(image.peer) and not flight.suspected]
        if images:
            self._encode(flight, images)
            request = without_images(request, {image.digest for image in images})
        command = Enqueue(first.incarnation, request, flight.attempt, flight.legs[1:], source, images)
        self._send(first.name, command)

    def _encode(self, flight: Flight[Generation], images: Sequence[ImageSource]) -> None:
        """Have others look at its images, where its prompt is not prefilled."""
        request = flight.request
        for peer in {image.peer.name: image.peer for image in images if image.encodes}.values():
            theirs = {image.digest for image in images if image.encodes and image.peer == peer}
            spans = {s.digest: (s, p) for s, p in zip(request.media, request.pixels, strict=True) if s.digest in theirs}
            media, pixels = [s for s, _ in spans.values()], [p for _, p in spans.values()]
            self._send(peer.name, Encode(peer.incarnation, flight.id, media, pixels))

    def send_pixels(self, instance: Instance, said: Lacking) -> None:
        """Nobody else has looked at these images: whoever prefills the prompt does."""
        flight = self.flights.get(said.request_id)
        if flight is None or said.generation != flight.attempt or not instance.is_current(said.incarnation):
            return
        request = flight.request
        pixels = dict(zip((span.digest for span in request.media), request.pixels, strict=True))
        lacking = [(digest, pixels[digest]) for digest in said.digests if digest in pixels]
        self._send(instance.name, Pixels(said.incarnation, flight.id, flight.attempt, lacking))
        self._metrics.observe_lacking(len(lacking))
        flight.image_fallbacks.append(f"{instance.name} looks at {len(lacking)} of its images itself: {said.reason}")
        text = "request %s: %s looks at %d of its images itself: %s"
        log.warning(text, quoted(flight.id), instance.name, len(lacking), said.reason)

    def routed(self, flight: Flight[Generation]) -> None:
        """Tell its owner where it runs."""
        instance = self.instances.get(flight.at)
        said = None if instance is None else instance.said
        flight.owner.routed(flight.index, flight.route, "" if said is None else said.root_key.hex())

    def refused(self, instance: Instance, refused: Refused) -> None:
        """An engine does not take one that was sent to it."""
        flight = self.flights.get(refused.request_id)
        if flight is None or not flight.placed or flight.here.name != instance.name or flight.heard:
            return
        if refused.why == "invalid":
            flight.owner.fail(InvalidRequest(refused.message))
        elif flight.launches < ATTEMPTS:  # it never ran there
            flight.failed_at.append(instance.name)
            flight.again()
            self.ask(flight)
        else:
            self.give_up(flight, Unavailable("no instance took this request"))

    def add_keys(self, flight: Flight[Generation]) -> None:
        """Whatever the policy looks at: what it had may be brought from elsewhere."""
        root = next((i.said.root_key for i in self.instances.values() if i.said is not None), None)
        if root is not None:
            flight.add_keys(root)

    def unlike(self, flight: Flight[Generation]) -> list[str]:
        """Instances with another checkpoint than those that it ran at: it goes on there only where no others serve."""
        instances = self.instances
        roots = {said.root_key for p in flight.places if p.name in instances and (said := instances[p.name].said)}
        return [i.name for i in instances.values() if roots and i.said is not None and i.said.root_key not in roots]

    # --- beside an attempt that stands still

    def take_back(self, flight: Flight[Generation]) -> None:
        """The attempt that stood still goes on, and the other one is over."""
        self.cancel(flight, flight.peers)
        flight.take_back()
        flight.avoid.clear()
        self._placement.settled(Settled(flight.id, flight.attempt, flight.at))  # a hand-over may be open, too
        if flight.heard:
            self._placement.begun([flight.id])

    def keep(self, flight: Flight[Generation]) -> None:
        """Have whoever has it not hand it over."""
        here = flight.keep(self._clock.now())
        self._send(here.name, Migrate(here.incarnation, flight.id, flight.attempt, here))

    def let_go(self, flight: Flight[Generation]) -> None:
        """The attempt that stood still is over; its engines learn of that when they go on."""
        peers, attempt = flight.let_go()
        for peer in peers:
            if peer.name in self.instances and self.instances[peer.name].is_current(peer.incarnation):
                self._send(peer.name, Cancel(peer.incarnation, [flight.id], attempt))

    def check(self) -> None:
        """Raise AssertionError unless what is counted is what is there."""
        assert all(flight.id == sequence_id for sequence_id, flight in self.flights.items())
        self.queue.check(self.flights.values())
