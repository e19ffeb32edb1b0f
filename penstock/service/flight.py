"""One sequence while engines run it: its placement, its outputs in order, and its recovery after a loss."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import Generic, TypeVar

from penstock.core.errors import EngineFailure, InvalidRequest
from penstock.core.plan import BLOCK_TOKENS
from penstock.core.request import FinishReason, Request, TokenOutput
from penstock.core.structured_outputs import FIELD
from penstock.core.wire.engine import LEASE, Peer
from penstock.core.wire.master import Outcome, Place, Placed
from penstock.kv.keys import extend_keys, salted

AGAIN = "the request can be sent again"  # appended to errors of requests that were valid
ATTEMPTS = 4  # placements of a sequence, so that one that crashes engines does not crash all of them
PATIENCE = 5.0  # seconds that an interrupted sequence waits for a placement; a failed engine may be back by then
SIGN_OF_LIFE = 1.0  # seconds for a possible owner to report, when the other side of a hand-off is lost


Owner = TypeVar("Owner")


class Flight(Generic[Owner]):
    """Tokens come from the prefill instance, and after a hand-off from the decode instance; both may send at once, and
    in either order. They are passed on in order and without duplicates.

    When no instance has the sequence, or its owner is unknown, it is `stranded`: it is sent elsewhere and continues
    after the tokens passed on so far. Noise is a function of seed and position, so the same tokens follow.

    Args:
        owner: receives its outputs.
        arrival: when its client sent it. Times are seconds of one clock.
        chat: the conversation that it belongs to; "" when that is not known.
        index: which of the owner's outputs it is.

    Attributes:
        request: as its client sent it, with the targets that it was given with its place.
        attempt: `generation` of the wire: what belongs to another one is dropped.
        launches: places that it was sent to.
        keys: prefix keys of the tokens to prefill, where the master wants them.
        tokens: that have left here.
        launched, first: when it was sent to an engine, and when its first token left here.
        heard: outputs of this attempt that were accepted.
        handed_over: the decoding instance owns it, for tokens came from there.
        interrupted: why an attempt was lost; "" if none was.
        stranded: that is so of this attempt.
        suspect: name of an instance to avoid in the next placement; "" for none.
        asked_first: when a placement was first asked for, while it has none.
        failed_at: instances that refused it.
        avoid: instances to avoid: they were lost, which the master may not know yet.
        queued: tokens of its prompt, until its first token comes.
        wait: what its engine said about the time before its first token.
        predicted_ttft: when its first token was predicted, in seconds from its arrival.
        deadline: when `tick` gives up waiting; None when nothing is awaited.
    """

    def __init__(self, owner: Owner, request: Request, arrival: float = 0.0, chat: str = "", index: int = 0) -> None:
        self.owner, self.index = owner, index
        self.request = request
        self.arrival = arrival
        self.chat = chat
        self.attempt = self.launches = self.heard = 0
        self.keys: list[bytes] = []
        self.tokens: list[int] = []
        self.launched = arrival
        self.wait = ""
        self.first: float | None = None
        self.handed_over = False
        self.interrupted = ""
        self.stranded = False
        self.suspect = ""
        self.asked_first = arrival
        self.failed_at: list[str] = []
        self.avoid: list[str] = []
        self.queued = 0
        self.predicted_ttft: float | None = None
        self.prefill: Peer | None = None
        self.decode: Peer | None = None
        self._since = arrival  # when it began to wait for a place
        self._lost: list[Peer] = []
        self._early: dict[int, TokenOutput] = {}  # by their place; what is before them has not come
        self.deadline: float | None = None

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def received(self) -> int:
        """How many tokens have left here."""
        return len(self.tokens)

    @property
    def peers(self) -> list[Peer]:
        """The instances that may still have it."""
        return [p for p in (self.prefill, self.decode) if p is not None and p not in self._lost]

    @property
    def route(self) -> str:
        """Where it runs, for the log: "p0>d0"."""
        return ">".join(p.name for p in (self.prefill, self.decode) if p is not None)

    # --- places

    def question(self, now: float, patience: float = 0.0) -> Place:
        """Where shall it run? `patience`: see `Place`."""
        request = self.request
        return Place(
            request.id,
            len(request.prompt) + self.received,
            request.max_tokens - self.received,
            self.keys,
            request.priority,
            self.attempt,
            self.waited(now),
            [*self.failed_at, *self.avoid],
            request.ttft_ms,
            request.tpot_ms,
            request.offline,
            self.chat,
            patience,
        )

    def waited(self, now: float) -> float:
        """Seconds that, with its TTFT target, give the deadline of its next token: when the token is due by the TPOT
        target, but no later than the deadline of a request that arrives at the interruption."""
        ttft, tpot = self.request.ttft_ms, self.request.tpot_ms
        if self.first is None or ttft is None:
            return now - self.arrival
        due = inf if tpot is None else self.first + tpot / 1e3 * self.received
        return now - min(due - ttft / 1e3, self._since)

    @property
    def urgency(self) -> tuple[bool, float, int]:
        """Sort key of stranded sequences: online ones first, then by the deadline of the next token."""
        request = self.request
        due = inf if request.ttft_ms is None else request.ttft_ms / 1e3 - self.waited(0.0)
        return request.offline, due, request.priority

    def add_keys(self, root: bytes) -> None:
        """Also those of what was generated."""
        context = [*self.request.prompt, *self.tokens]
        self.keys = self.keys.copy()  # earlier questions keep their list
        salted_root, blocks = salted(root, self.request.cache_salt), len(context) // BLOCK_TOKENS
        extend_keys(self.keys, salted_root, context, blocks, self.request.media)

    def launch(self, placed: Placed, now: float) -> Request:
        """Start an attempt at this placement; returns the command."""
        # a beam search stays where its prompt is prefilled, and an embedding needs no more than that
        stays = self.request.params.use_beam_search or self.request.pooling is not None
        self.prefill, self.decode = placed.prefill, None if stays else placed.decode
        self.launches += 1
        if self.first is None:
            self.launched = now
        if (placed.ttft_ms, placed.tpot_ms) != (self.request.ttft_ms, self.request.tpot_ms):
            self.request = replace(self.request, ttft_ms=placed.ttft_ms, tpot_ms=placed.tpot_ms)
        return replace(self.request, waited=self.waited(now), generated=tuple(self.tokens))

    def again(self) -> None:
        """It needs another placement. Messages of the earlier attempt are ignored from now on."""
        self.attempt += 1
        self.heard, self.handed_over, self.stranded = 0, False, False
        self.prefill = self.decode = None
        self._lost, self._early, self.deadline = [], {}, None

    def outcome(self, now: float) -> Outcome | None:
        """How it ended, now that all its tokens have come; None when there were none."""
        if self.first is None:
            return None
        count = self.received
        return Outcome(
            self.id,
            (self.first - self.arrival) * 1e3,
            (now - self.first) / (count - 1) * 1e3 if count > 1 else None,
            (self.launched - self.arrival) * 1e3,
            count,
            self.wait,
        )

    # --- what comes of it

    def accept(self, name: str, incarnation: int, output: TokenOutput, now: float) -> list[TokenOutput]:
        """Accept an output of an instance's incarnation; returns what can be passed on. It may be stranded after it.

        Raises:
            EngineFailure: it cannot end well anywhere.
            InvalidRequest: the same, for what it asks for.
        """
        source = next((p for p in self.peers if p.incarnation == incarnation and p.name == name), None)
        if output.generation != self.attempt or source is None or self.stranded:
            return []
        decoded = source is self.decode
        if output.finish in (FinishReason.ERROR, FinishReason.ABORT):
            if self.handed_over and not decoded:
                return []  # its hand-off was lost
            if output.finish is FinishReason.ERROR:
                if output.error.startswith(FIELD):  # so it would end everywhere, for what its client asked
                    raise InvalidRequest(output.error, FIELD)
                raise EngineFailure(f"{name} gave this request up: {output.error}")
            self._strand(f"{name} dropped this request", now)
            self.suspect = name if self.decode is None else self.decode.name  # that hand-over was lost
            return []
        self.heard += 1
        self.handed_over |= decoded
        if output.timing is not None:
            self.wait = output.timing.wait
        ready = self._in_order(output)
        if ready and self.first is None:
            self.first = now
        self._look(now)
        return ready

    def lose(self, peer: Peer, reason: str, now: float) -> None:
        """An incarnation of an instance has ended."""
        if peer not in self.peers or self.stranded:
            return
        self._lost.append(peer)
        if not self.peers or (self.handed_over and peer == self.decode):
            self._strand(f"{peer.name} failed during this request ({reason})", now)
        else:
            self._look(now)

    def tick(self, now: float) -> None:
        """Give up waiting at the deadline."""
        if self.deadline is None or now <= self.deadline or self.stranded:
            return
        if self._lost:
            self._strand(f"{self._lost[0].name} failed during this request, and nothing came of it since", now)
        else:
            assert self.prefill is not None
            self._strand(f"tokens of this request that {self.prefill.name} had computed did not come", now)

    def _strand(self, why: str, now: float) -> None:
        self.stranded, self.interrupted, self._since = True, why, now
        self.suspect = ""

    def _look(self, now: float) -> None:
        """Determine the possible owners, and the deadline for them to report."""
        first = self.prefill
        assert first is not None
        if self._early:
            if first in self._lost:
                self._strand(f"{first.name} failed during this request, its first tokens are lost", now)
            elif self.deadline is None:  # later outputs do not extend the wait for a missing one
                self.deadline = now + LEASE
        elif self.handed_over or not self._lost:
            self.deadline = None
        elif self.heard == 1:  # its first token is sampled, so it may just have been handed over
            self.deadline = now + SIGN_OF_LIFE
        elif first in self._lost:
            self._strand(f"{first.name} failed during this request", now)
        else:
            self.deadline = None  # it is still being prefilled there, or decoded

    def _in_order(self, output: TokenOutput) -> list[TokenOutput]:
        if not self._early and output.start == len(self.tokens):  # nearly always, and for every token
            self.tokens += output.tokens
            return [output]
        known = self._early.get(output.start)
        if known is None or len(known.tokens) <= len(output.tokens):
            self._early[output.start] = output
        ready = []
        while self._early and min(self._early) <= self.received:
            piece = self._rest(self._early.pop(min(self._early)))
            if piece is None:
                continue
            self.tokens += piece.tokens
            ready.append(piece)
            if piece.finish is not None:
                self._early.clear()
        return ready

    def _rest(self, output: TokenOutput) -> TokenOutput | None:
        """The part of it that did not leave yet; None when there is none."""
        known = self.received - output.start
        if known == 0:
            return output
        if known > len(output.tokens) or (known == len(output.tokens) and output.finish is None):
            return None
        logprobs = None if output.logprobs is None else output.logprobs[known:]
        return replace(
            output, tokens=output.tokens[known:], logprobs=logprobs, start=self.received, prompt_logprobs=None
        )
