"""The clients' side: asks the master for a place, sends each request there, and records what its client saw."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import Protocol

from penstock.core.errors import EngineFailure
from penstock.core.request import Request, TokenOutput
from penstock.core.sampling import SamplingParams
from penstock.core.wire.engine import (
    Cancel,
    Command,
    Encode,
    Enqueue,
    Fetched,
    ImageSource,
    Lacking,
    Migrate,
    Peer,
    Pixels,
    Ready,
    Refused,
    Stayed,
)
from penstock.core.wire.master import (
    Begun,
    Ended,
    FrontendMessage,
    Joined,
    MasterMessage,
    Members,
    NoPlace,
    Placed,
    Queued,
    Relocate,
    Settled,
)
from penstock.service.flight import ATTEMPTS, Flight, peers_of
from penstock.service.flight import PATIENCE as RECOVERY
from penstock.sim.events import Due, Priority
from penstock.sim.instance import OutputBatch
from penstock.sim.traffic import STOP, media_of, prompt_of
from penstock.workload.requests import WorkRequest

PATIENCE = 1.0  # seconds that a request without a possible instance waits at the frontend
ASK_AGAIN = 0.05  # seconds
PARAMS = SamplingParams(temperature=0.0, max_tokens=None)
STOPS = frozenset({STOP})


@dataclass(slots=True)
class SimRecord:
    """A request's outcome. Times are seconds since the start, as its client saw them.

    Attributes:
        output_tokens: that it would generate.
        task: which class of requests it is of.
        ttft_target, tpot_target: seconds, by which it is judged; inf without.
        received: tokens that it got.
        first, ended: None until then.
        error: why it failed; "" when it did not.
        launched: when it was sent to an instance; None until then.
        reason: see `sched.cluster.Decision`.
        attempts: places that it was sent to.
        handoffs: that came about.
        recoveries: times that it was interrupted and had to go on elsewhere.
        recovered_by: how it last did; see `Recovery`.
        costs: by stage, the policy's cost of the choice, and the least of any candidate.
        predicted_ttft: by the policy, in seconds; None when it does not predict.
    """

    number: int
    arrival: float
    prompt_tokens: int
    output_tokens: int
    task: str = ""
    offline: bool = False
    priority: int = 0
    ttft_target: float = inf
    tpot_target: float = inf
    received: int = 0
    cached_tokens: int = 0
    launched: float | None = None
    first: float | None = None
    ended: float | None = None
    error: str = ""
    prefill: str = ""
    decode: str = ""
    reason: str = ""
    attempts: int = 0
    recoveries: int = 0
    recovered_by: str = ""
    handoffs: int = 0
    costs: dict[str, tuple[float, float]] = field(default_factory=dict)
    predicted_ttft: float | None = None

    @property
    def ttft(self) -> float | None:
        return None if self.first is None else self.first - self.arrival

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first; None where there was none."""
        if self.first is None or self.ended is None or self.received < 2:
            return None
        return (self.ended - self.first) / (self.received - 1)


class FrontendSender(Protocol):
    """Sends a frontend's messages."""

    def frontend_to_master(self, now: float, message: FrontendMessage) -> Due: ...
    def frontend_to_engine(self, now: float, name: str, command: Command) -> Due: ...


_Flight = Flight[SimRecord]


class SimFrontend:
    """
    Args:
        max_tokens: the limit that clients set; None is each output's own length, which the cluster otherwise does not
            know.
        max_model_len: cuts that limit, as a frontend does.
        ended: called with every record when its request has ended.

    Attributes:
        records: of every request that has come, in order of arrival.
        joined: the master's answer to `Join`.
    """

    def __init__(
        self,
        post: FrontendSender,
        *,
        max_tokens: int | None,
        max_model_len: int,
        root: bytes,
        ended: Callable[[SimRecord], None],
    ) -> None:
        self.records: list[SimRecord] = []
        self.joined = Joined(0)
        self._post = post
        self._max_tokens, self._max_model_len, self._root = max_tokens, max_model_len, root
        self._ended = ended
        self._flights: dict[str, _Flight] = {}
        self._lives: dict[str, int] = {}  # instance -> incarnation

    @property
    def open(self) -> int:
        """Requests that have not ended."""
        return len(self._flights)

    # --- what happens

    def arrive(self, now: float, work: WorkRequest) -> list[Due]:
        """A client sends a request."""
        prompt, media, generates = prompt_of(work), media_of(work), work.output_tokens > 0
        limit = work.output_tokens if self._max_tokens is None else self._max_tokens
        request = Request(
            id=str(work.number),
            prompt=prompt,
            params=PARAMS,
            seed=work.number,
            stop_ids=STOPS,
            max_tokens=min(limit, self._max_model_len - len(prompt)) if generates else 0,
            pooling=None if generates else "last",
            priority=work.priority,
            ttft_ms=_milliseconds(work.ttft, work),
            tpot_ms=_milliseconds(work.tpot, work),
            offline=work.offline,
            media=media,
            pixels=(b"",) * len(media),  # nobody looks at them
        )
        record = SimRecord(
            work.number,
            now,
            work.prompt_tokens,
            work.output_tokens,
            work.task,
            work.offline,
            work.priority,
            work.ttft,
            work.tpot,
        )
        self.records.append(record)
        self._flights[request.id] = flight = Flight(record, request, now, work.chat)
        if self.joined.wants_keys:
            flight.add_keys(self._root)
        return [self._ask(now, flight)]

    def on_master(self, now: float, message: MasterMessage) -> list[Due]:
        if isinstance(message, Queued):
            return []
        if isinstance(message, Members):
            return []  # it knows its instances by what they say
        if isinstance(message, Joined):
            self.joined = message
            return []
        flight = self._flights.get(message.request_id)
        if flight is None or flight.attempt != message.generation:
            return []
        if isinstance(message, Relocate):
            return self._move(now, flight, message.peer)
        if flight.placed:
            return []
        if isinstance(message, NoPlace):
            return self._wait_for_place(now, flight, message)
        return self._launch(now, flight, message)

    def on_engine(
        self, now: float, name: str, message: OutputBatch | Refused | Stayed | Fetched | Lacking
    ) -> list[Due]:
        if isinstance(message, Refused):
            return self._refused(now, name, message)
        if isinstance(message, Stayed):
            return self._stayed(now, name, message)
        if isinstance(message, Lacking):
            return self._send_pixels(now, name, message)
        if isinstance(message, Fetched):
            if (fetching := self._flights.get(message.request_id)) is not None:
                fetching.fetched(name, message)
            return []
        dues: list[Due] = []
        for output in message.outputs:
            flight = self._flights.get(output.request_id)
            if flight is not None:
                dues += self._receive(now, flight, name, message.incarnation, output)
        return dues

    def greet(self, ready: Ready) -> None:
        """An incarnation of an instance has started."""
        self._lives[ready.peer.name] = ready.peer.incarnation

    def lose(self, now: float, peer: Peer, reason: str) -> list[Due]:
        """An incarnation of an instance has ended."""
        if self._lives.get(peer.name) == peer.incarnation:
            del self._lives[peer.name]
        dues: list[Due] = []
        for flight in list(self._flights.values()):
            if peer in flight.peers:
                flight.lose(peer, reason, now)
                dues += self._watch(flight)
        for flight in sorted((f for f in self._flights.values() if f.stranded), key=lambda f: f.urgency):
            dues += self._go_on(now, flight)
        return dues

    # --- places

    def _ask(self, now: float, flight: _Flight) -> Due:
        return self._post.frontend_to_master(now, flight.question(now))

    def _wait_for_place(self, now: float, flight: _Flight, answer: NoPlace) -> list[Due]:
        """A refusal counts only after a while: a restarted master may not know all instances, and a failed one may
        return."""
        flight.avoid.clear()
        why = flight.interrupted
        hopeless = not why and (flight.failed_at or not self._lives)
        if hopeless or now > flight.asked_first + (RECOVERY if why else PATIENCE):
            return self._end(now, flight, why or answer.message)
        again = partial(self._ask_again, flight.id, flight.attempt)
        return [Due(now + ASK_AGAIN, Priority.ARRIVAL, again)]

    def _ask_again(self, request_id: str, attempt: int, now: float) -> list[Due]:
        flight = self._flights.get(request_id)
        return [self._ask(now, flight)] if flight is not None and flight.attempt == attempt else []

    def _launch(self, now: float, flight: _Flight, placed: Placed) -> list[Due]:
        missing = [peer.name for peer in peers_of(placed.route) if self._lives.get(peer.name) != peer.incarnation]
        if missing:
            flight.avoid += missing
            flight.again()
            return [self._ask(now, flight)]
        flight.avoid.clear()
        request = flight.launch(placed, now)
        record = flight.owner
        record.attempts += 1
        record.launched = flight.launched
        first = flight.here
        record.prefill, record.reason = first.name, placed.reason
        record.decode = flight.places[-1].name
        source = placed.source
        if source is not None and source.peer is not None and not self._lives_on(source.peer):
            source = None
        images = [image for image in placed.images if self._lives_on(image.peer)]
        enqueue = Enqueue(first.incarnation, request, flight.attempt, flight.legs[1:], source, images)
        return [*self._encode(now, flight, images), self._post.frontend_to_engine(now, first.name, enqueue)]

    def _encode(self, now: float, flight: _Flight, images: list[ImageSource]) -> list[Due]:
        """Have others look at its images, where its prompt is not prefilled."""
        dues = []
        spans = {span.digest: span for span in flight.request.media}
        for peer in {image.peer.name: image.peer for image in images if image.encodes}.values():
            theirs = [spans[image.digest] for image in images if image.encodes and image.peer == peer]
            encode = Encode(peer.incarnation, flight.id, theirs, [b""] * len(theirs))
            dues.append(self._post.frontend_to_engine(now, peer.name, encode))
        return dues

    def _send_pixels(self, now: float, name: str, said: Lacking) -> list[Due]:
        flight = self._flights.get(said.request_id)
        if flight is None or said.generation != flight.attempt or self._lives.get(name) != said.incarnation:
            return []
        pixels = Pixels(said.incarnation, flight.id, flight.attempt, [(digest, b"") for digest in said.digests])
        return [self._post.frontend_to_engine(now, name, pixels)]

    def _refused(self, now: float, name: str, refused: Refused) -> list[Due]:
        flight = self._flights.get(refused.request_id)
        if flight is None or not flight.placed or flight.here.name != name or flight.heard:
            return []
        if refused.why == "invalid":
            return self._end(now, flight, refused.message)
        if flight.launches >= ATTEMPTS:
            return self._end(now, flight, flight.interrupted or "no instance took this request")
        flight.failed_at.append(name)
        flight.again()
        flight.asked_first = now
        return [self._ask(now, flight)]

    def _move(self, now: float, flight: _Flight, peer: Peer) -> list[Due]:
        source = flight.move(peer) if self._lives_on(peer) else None
        if source is None:
            return self._settle(now, flight)
        migrate = Migrate(source.incarnation, flight.id, flight.attempt, peer)
        return [self._post.frontend_to_engine(now, source.name, migrate)]

    def _settle(self, now: float, flight: _Flight) -> list[Due]:
        if not flight.placed or (flight.next is not None and not flight.handed_over):
            return []
        return [self._post.frontend_to_master(now, Settled(flight.id, flight.attempt, flight.at))]

    def _stayed(self, now: float, name: str, stayed: Stayed) -> list[Due]:
        flight = self._flights.get(stayed.request_id)
        if flight is None or not flight.stayed(name, stayed, now):
            return []
        flight.owner.decode = flight.at
        return self._go_on(now, flight) if flight.stranded else [*self._settle(now, flight), *self._watch(flight)]

    def _go_on(self, now: float, flight: _Flight) -> list[Due]:
        """Continue a stranded sequence elsewhere, from the tokens that its client has."""
        dues = self._cancel(now, flight, flight.peers)
        if flight.launches >= ATTEMPTS:
            return self._end(now, flight, flight.interrupted)
        flight.owner.recoveries += 1
        flight.asked_first = now
        flight.avoid = [peer.name for peer in flight.places if peer.name in flight.suspects or not self._lives_on(peer)]
        flight.again()
        flight.add_keys(self._root)
        return [*dues, self._ask(now, flight)]

    # --- tokens

    def _receive(self, now: float, flight: _Flight, name: str, incarnation: int, output: TokenOutput) -> list[Due]:
        record = flight.owner
        heard, handoffs, looked_at = flight.heard, flight.handoffs, flight.deadline
        try:
            pieces = flight.accept(name, incarnation, output, now)
        except EngineFailure as error:
            return self._end(now, flight, str(error))
        dues = []
        if flight.heard and not heard:
            if flight.interrupted:
                record.recovered_by = flight.resumed(output, now).how
            dues.append(self._post.frontend_to_master(now, Begun([flight.id])))
        if flight.handoffs > handoffs:
            record.decode, record.handoffs = name, record.handoffs + 1
            dues += self._settle(now, flight)
        record.received = flight.received
        for piece in pieces:
            if record.first is None:
                record.first, record.cached_tokens = now, piece.cached_tokens
            if piece.finish is not None:
                return dues + self._end(now, flight)
        if flight.stranded:
            return dues + self._go_on(now, flight)
        return dues + ([] if flight.deadline == looked_at else self._watch(flight))

    def _watch(self, flight: _Flight) -> list[Due]:
        """Check it again at its deadline."""
        if flight.deadline is None:
            return []
        return [Due(flight.deadline + ASK_AGAIN, Priority.CLOCK, partial(self._look_again, flight.id))]

    def _look_again(self, request_id: str, now: float) -> list[Due]:
        flight = self._flights.get(request_id)
        if flight is None:
            return []
        flight.tick(now)
        return self._go_on(now, flight) if flight.stranded else []

    def _end(self, now: float, flight: _Flight, error: str = "") -> list[Due]:
        """It has ended: inform the master and engines that may not know it."""
        record = flight.owner
        del self._flights[flight.id]
        assert record.ended is None
        record.ended, record.error = now, error
        self._ended(record)
        outcome = None if error else flight.outcome(now)
        return [
            self._post.frontend_to_master(now, Ended([flight.id], [] if outcome is None else [outcome])),
            *self._cancel(now, flight, [peer for peer in flight.peers if error or peer.name != flight.at]),
        ]

    def _cancel(self, now: float, flight: _Flight, peers: Iterable[Peer]) -> list[Due]:
        return [
            self._post.frontend_to_engine(now, peer.name, Cancel(peer.incarnation, [flight.id], flight.attempt))
            for peer in peers
            if self._lives_on(peer)
        ]

    def _lives_on(self, peer: Peer) -> bool:
        return self._lives.get(peer.name) == peer.incarnation


def _milliseconds(target: float, work: WorkRequest) -> float | None:
    """Of a target in seconds; None when there is none, or when only its priority is told."""
    return None if target == inf or work.priority_only else target * 1e3
