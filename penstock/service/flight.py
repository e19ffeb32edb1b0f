"""One sequence while engines run it: where, what came of it in order, and whether it can still end well."""

from __future__ import annotations

from dataclasses import replace

from penstock.core.errors import EngineFailure
from penstock.core.request import FinishReason, Request, TokenOutput
from penstock.core.wire.engine import LEASE, Peer

AGAIN = "the request can be sent again"  # clients are told, for nothing of it was wrong


class Flight:
    """Tokens come from the instance that reads the prompt, and after a hand-off from the one that decodes; both may
    speak at once, and the second may be heard before the first. What leaves here is in order and nothing is twice.

    After a loss it is not known who owns the sequence. Then a sign of life is waited for, `LEASE` seconds at most.

    Attributes:
        attempt: `generation` of the wire: what belongs to another one is dropped.
        received: tokens that have left here.
        handed_over: the decoding instance owns it, for tokens came from there.
    """

    def __init__(self, request: Request) -> None:
        self.request = request
        self.attempt = 0
        self.received = 0
        self.handed_over = False
        self.prefill: Peer | None = None
        self.decode: Peer | None = None
        self._lost: list[Peer] = []
        self._early: dict[int, TokenOutput] = {}  # by their place; what is before them has not come
        self._deadline: float | None = None

    def launch(self, prefill: Peer, decode: Peer | None) -> None:
        """It was sent to these."""
        self.prefill, self.decode = prefill, decode

    def again(self) -> None:
        """It was not taken, so it needs another place; nothing came of it."""
        assert not self.received
        self.attempt += 1
        self.prefill = self.decode = None

    @property
    def peers(self) -> list[Peer]:
        """The instances that may still hold something of it."""
        return [p for p in (self.prefill, self.decode) if p is not None and p not in self._lost]

    @property
    def route(self) -> str:
        """Where it runs, for the log: "p0>d0"."""
        return ">".join(p.name for p in (self.prefill, self.decode) if p is not None)

    def accept(self, name: str, incarnation: int, output: TokenOutput, now: float) -> list[TokenOutput]:
        """What can be passed on now that this came from a life of an instance.

        Raises:
            EngineFailure: an engine gave the sequence up.
        """
        source = next((p for p in self.peers if (p.name, p.incarnation) == (name, incarnation)), None)
        if output.generation != self.attempt or source is None:
            return []
        decoded = source is self.decode
        if output.finish in (FinishReason.ERROR, FinishReason.ABORT):
            if self.handed_over and not decoded:
                return []  # it lost sight of what it gave away
            raise EngineFailure(self._why_given_up(source, output.finish))
        self.handed_over |= decoded
        ready = self._in_order(output)
        self._deadline = self._next_deadline(now)
        return ready

    def _why_given_up(self, source: Peer, finish: FinishReason) -> str:
        """True whichever it was: an engine says only that it could not go on."""
        if finish is FinishReason.ABORT:
            return f"{source.name} dropped this request, {AGAIN}"
        no_number = f"{source.name} gave this request up: the model computed something that is no number"
        if self.decode is None:
            return no_number
        return f"{no_number}, or its hand-over to {self.decode.name} was lost"

    def lose(self, peer: Peer, reason: str, now: float) -> None:
        """A life of an instance is over.

        Raises:
            EngineFailure: and with it this sequence.
        """
        if peer not in self.peers:
            return
        self._lost.append(peer)
        if not self.peers or (self.handed_over and (peer == self.decode or self._early)):
            raise EngineFailure(f"{peer.name} failed during this request ({reason}), {AGAIN}")
        self._deadline = self._next_deadline(now)

    def overdue(self, now: float) -> bool:
        """Whether a sign of life was waited for in vain."""
        return self._deadline is not None and now > self._deadline

    def why_overdue(self) -> str:
        """For its client, once it is."""
        if self._lost:
            lost = " and ".join(peer.name for peer in self._lost)
            return f"{lost} failed during this request, and nothing came of it since, {AGAIN}"
        missing = self.prefill.name if self.prefill is not None else "the engine"
        return f"tokens of this request that {missing} had computed did not come, {AGAIN}"

    def _next_deadline(self, now: float) -> float | None:
        if self._early:  # a gap is not made longer by what comes after it
            first = self.prefill
            if first is not None and first in self._lost:
                raise EngineFailure(f"{first.name} failed during this request, its first tokens are lost, {AGAIN}")
            return self._deadline if self._deadline is not None else now + LEASE
        return now + LEASE if self._lost and not self.handed_over else None

    def _in_order(self, output: TokenOutput) -> list[TokenOutput]:
        known = self._early.get(output.start)
        if known is None or len(known.tokens) <= len(output.tokens):
            self._early[output.start] = output
        ready = []
        while self._early and min(self._early) <= self.received:
            piece = self._rest(self._early.pop(min(self._early)))
            if piece is None:
                continue
            self.received += len(piece.tokens)
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
        return replace(output, tokens=output.tokens[known:], logprobs=logprobs, start=self.received)
