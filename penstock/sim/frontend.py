"""The clients' side: asks the master for a place, sends each request there, and records what its client saw."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from typing import Protocol

from penstock.core.errors import EngineFailure
from penstock.core.plan import BLOCK_TOKENS
from penstock.core.request import Request, TokenOutput
from penstock.core.sampling import SamplingParams
from penstock.core.wire.engine import LEASE, Cancel, Command, Enqueue, Peer, Ready, Refused
from penstock.core.wire.master import (
    Begun,
    Ended,
    FrontendMessage,
    Joined,
    MasterMessage,
    NoPlace,
    Outcome,
    Place,
    Placed,
    Queued,
)
from penstock.kv.keys import extend_keys
from penstock.service.flight import Flight
from penstock.sim.events import Due, Priority
from penstock.sim.instance import Outputs
from penstock.sim.prompts import STOP, prompt_of
from penstock.workload.requests import WorkRequest

ATTEMPTS = 4  # places that a request is sent to until one takes it
PATIENCE = 1.0  # seconds that a master may have nobody who takes a request
ASK_AGAIN = 0.05  # seconds
PARAMS = SamplingParams(temperature=0.0, max_tokens=None)
STOPS = frozenset({STOP})


@dataclass(slots=True)
class Record:
    """What became of a request. Times are seconds since the start, as its client saw them.

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


class Post(Protocol):
    """Carries what a frontend says."""

    def frontend_to_master(self, now: float, message: FrontendMessage) -> Due: ...
    def frontend_to_engine(self, now: float, name: str, command: Command) -> Due: ...


@dataclass(slots=True)
class _Held:
    record: Record
    flight: Flight
    keys: list[bytes]
    asked: float
    chat: str = ""
    failed_at: list[str] = field(default_factory=list)


class Frontend:
    """
    Args:
        max_tokens: the limit that clients set; what outputs really need nobody is told.
        max_model_len: cuts that limit, as a frontend does.
        ended: told of every record when its request is over.

    Attributes:
        records: of every request that has come, in order of arrival.
        joined: what the master said of itself.
    """

    def __init__(
        self,
        post: Post,
        *,
        max_tokens: int,
        max_model_len: int,
        root: bytes,
        ended: Callable[[Record], None],
    ) -> None:
        self.records: list[Record] = []
        self.joined = Joined(0)
        self._post = post
        self._max_tokens, self._max_model_len, self._root = max_tokens, max_model_len, root
        self._ended = ended
        self._held: dict[str, _Held] = {}
        self._lives: dict[str, int] = {}  # instance -> incarnation

    @property
    def open(self) -> int:
        """Requests that are not over."""
        return len(self._held)

    # --- what happens

    def arrive(self, now: float, work: WorkRequest) -> list[Due]:
        """A client sends a request."""
        prompt = prompt_of(work)
        request = Request(
            id=str(work.number),
            prompt=prompt,
            params=PARAMS,
            seed=work.number,
            stop_ids=STOPS,
            max_tokens=min(self._max_tokens, self._max_model_len - len(prompt)),
            priority=work.priority,
            ttft_ms=_milliseconds(work.ttft, work),
            tpot_ms=_milliseconds(work.tpot, work),
            offline=work.offline,
        )
        record = Record(
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
        keys: list[bytes] = []
        if self.joined.wants_keys:
            extend_keys(keys, self._root, prompt, len(prompt) // BLOCK_TOKENS)
        self._held[request.id] = held = _Held(record, Flight(request), keys, now, work.chat)
        return [self._ask(now, held)]

    def on_master(self, now: float, message: MasterMessage) -> list[Due]:
        if isinstance(message, Queued):
            return []
        if isinstance(message, Joined):
            self.joined = message
            return []
        held = self._held.get(message.request_id)
        if held is None or held.flight.attempt != message.generation or held.flight.prefill is not None:
            return []
        if isinstance(message, NoPlace):
            return self._wait_for_place(now, held, message)
        return self._launch(now, held, message)

    def on_engine(self, now: float, name: str, message: Outputs | Refused) -> list[Due]:
        if isinstance(message, Refused):
            return self._refused(now, name, message)
        dues: list[Due] = []
        for output in message.outputs:
            held = self._held.get(output.request_id)
            if held is not None:
                dues += self._receive(now, held, name, message.incarnation, output)
        return dues

    def greet(self, ready: Ready) -> None:
        """A life of an instance has begun."""
        self._lives[ready.peer.name] = ready.peer.incarnation

    def lose(self, now: float, peer: Peer, reason: str) -> list[Due]:
        """A life of an instance is over."""
        if self._lives.get(peer.name) == peer.incarnation:
            del self._lives[peer.name]
        dues: list[Due] = []
        for held in list(self._held.values()):
            if peer not in held.flight.peers:
                continue
            try:
                held.flight.lose(peer, reason, now)
            except EngineFailure as error:
                dues += self._end(now, held, str(error))
            else:
                look = partial(self._look_again, held.flight.request.id)
                dues.append(Due(now + LEASE + ASK_AGAIN, Priority.CLOCK, look))
        return dues

    # --- places

    def _ask(self, now: float, held: _Held) -> Due:
        request = held.flight.request
        place = Place(
            request.id,
            len(request.prompt),
            request.max_tokens,
            held.keys,
            request.priority,
            held.flight.attempt,
            now - held.record.arrival,
            held.failed_at,
            request.ttft_ms,
            request.tpot_ms,
            request.offline,
            held.chat,
        )
        return self._post.frontend_to_master(now, place)

    def _wait_for_place(self, now: float, held: _Held, answer: NoPlace) -> list[Due]:
        """The master may only just begin to know the instances; after a while it is believed."""
        if held.failed_at or not self._lives or now > held.asked + PATIENCE:
            return self._end(now, held, answer.message)
        again = partial(self._ask_again, held.flight.request.id, held.flight.attempt)
        return [Due(now + ASK_AGAIN, Priority.ARRIVAL, again)]

    def _ask_again(self, request_id: str, attempt: int, now: float) -> list[Due]:
        held = self._held.get(request_id)
        return [self._ask(now, held)] if held is not None and held.flight.attempt == attempt else []

    def _launch(self, now: float, held: _Held, placed: Placed) -> list[Due]:
        peers = [peer for peer in (placed.prefill, placed.decode) if peer is not None]
        missing = [peer.name for peer in peers if self._lives.get(peer.name) != peer.incarnation]
        if missing:
            return self._elsewhere(now, held, missing)
        held.flight.launch(placed.prefill, placed.decode)
        record = held.record
        record.attempts += 1
        record.launched = now
        record.prefill, record.reason = placed.prefill.name, placed.reason
        record.decode = placed.prefill.name if placed.decode is None else placed.decode.name
        request = replace(
            held.flight.request, waited=now - record.arrival, ttft_ms=placed.ttft_ms, tpot_ms=placed.tpot_ms
        )
        enqueue = Enqueue(placed.prefill.incarnation, request, held.flight.attempt, placed.decode)
        return [self._post.frontend_to_engine(now, placed.prefill.name, enqueue)]

    def _elsewhere(self, now: float, held: _Held, names: Iterable[str]) -> list[Due]:
        """These did not take it."""
        held.failed_at += names
        held.flight.again()
        if held.flight.attempt >= ATTEMPTS:
            return self._end(now, held, "no instance took this request")
        held.asked = now
        return [self._ask(now, held)]

    def _refused(self, now: float, name: str, refused: Refused) -> list[Due]:
        held = self._held.get(refused.request_id)
        prefill = held.flight.prefill if held is not None else None
        if held is None or prefill is None or prefill.name != name or held.flight.received:
            return []
        if refused.why == "invalid":
            return self._end(now, held, refused.message)
        return self._elsewhere(now, held, [name])

    # --- tokens

    def _receive(self, now: float, held: _Held, name: str, incarnation: int, output: TokenOutput) -> list[Due]:
        record = held.record
        try:
            pieces = held.flight.accept(name, incarnation, output, now)
        except EngineFailure as error:
            return self._end(now, held, str(error))
        dues = []
        for piece in pieces:
            if record.first is None:
                record.first, record.cached_tokens = now, piece.cached_tokens
                dues.append(self._post.frontend_to_master(now, Begun([held.flight.request.id])))
            record.received += len(piece.tokens)
            if piece.finish is not None:
                return dues + self._end(now, held)
        return dues

    def _look_again(self, request_id: str, now: float) -> list[Due]:
        held = self._held.get(request_id)
        if held is None or not held.flight.overdue(now):
            return []
        return self._end(now, held, held.flight.why_overdue())

    def _end(self, now: float, held: _Held, error: str = "") -> list[Due]:
        """It is over; whoever may not know it is told."""
        flight, record = held.flight, held.record
        del self._held[flight.request.id]
        assert record.ended is None
        record.ended, record.error = now, error
        self._ended(record)
        outcomes = [_outcome(record, now)] if record.first is not None and not error else []
        dues = [self._post.frontend_to_master(now, Ended([flight.request.id], outcomes))]
        unaware = flight.peers if error else [flight.prefill if flight.handed_over else flight.decode]
        dues += [
            self._post.frontend_to_engine(now, peer.name, Cancel(peer.incarnation, [flight.request.id]))
            for peer in unaware
            if peer is not None and self._lives.get(peer.name) == peer.incarnation
        ]
        return dues


def _outcome(record: Record, now: float) -> Outcome:
    assert record.first is not None
    assert record.launched is not None
    tokens = record.received
    return Outcome(
        str(record.number),
        (record.first - record.arrival) * 1e3,
        (now - record.first) / (tokens - 1) * 1e3 if tokens > 1 else None,
        (record.launched - record.arrival) * 1e3,
        tokens,
    )


def _milliseconds(target: float, work: WorkRequest) -> float | None:
    """Of a target in seconds; None when there is none, or when only its priority is told."""
    return None if target == inf or work.priority_only else target * 1e3
