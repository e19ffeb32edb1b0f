"""One sequence while engines run it: its placement, its outputs in order, and its recovery after a loss."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from math import inf
from typing import Generic, TypeVar

from penstock.core.errors import EngineFailure, InvalidRequest
from penstock.core.plan import BLOCK_TOKENS
from penstock.core.request import FinishReason, ImagesSeen, Request, TokenOutput
from penstock.core.structured_outputs import FIELD
from penstock.core.wire.engine import LEASE, Fetched, Leg, Peer, Stayed
from penstock.core.wire.master import Outcome, Place, Placed, PlacedImage, Recovery
from penstock.kv.keys import extend_keys, salted

AGAIN = "the request can be sent again"  # appended to errors of requests that were valid
ATTEMPTS = 4  # placements in a row that may bring nothing; see also `service.isolation`
PATIENCE = 5.0  # seconds that an interrupted sequence waits for a placement; a failed engine may be back by then
SIGN_OF_LIFE = 1.0  # seconds for a possible owner to report, when the other side of a hand-off is lost
OBEYS = 0.3  # seconds for an instance to say that it keeps a sequence, after which it may have been handed over


Owner = TypeVar("Owner")


def peers_of(route: Iterable[Leg]) -> list[Peer]:
    """Those that are known."""
    return [leg.peer for leg in route if leg.peer is not None]


@dataclass(frozen=True, slots=True)
class _Stay:
    """At an instance that has the sequence or may come to have it.

    Attributes:
        since: tokens that had left here when it was chosen: it brings none of these.
    """

    peer: Peer
    since: int


@dataclass(frozen=True, slots=True)
class _Held:
    """An attempt at instances that may hang, while another one is made elsewhere; fields as those of its flight.

    Attributes:
        avoid: instances at which the other one is not: those that may hang, and those that may have this one.
    """

    avoid: Collection[str]
    stays: list[_Stay]
    attempt: int
    heard: int
    legs: list[Leg]
    names: list[str]
    placed: Placed
    placed_at: float
    brought: int
    interrupted: str
    since: float


class Flight(Generic[Owner]):
    """Tokens come from the instance that has it, and after a hand-off from the next one; both may send at once, and in
    either order. They are passed on in order and without duplicates. There is one hand-off at a time: it is open until
    tokens come from the next instance and all before them have come, or until the first one says that it `stayed`.

    When no instance has the sequence, or its owner is unknown, it is `stranded`: it is sent elsewhere and continues
    after the tokens passed on so far. Noise is a function of seed and position, so the same tokens follow.

    While its instance may hang, another attempt can be made beside the one there (a hedged request), also in the middle
    of a hand-off. It goes on with the one that brings something first, and what comes of the other is dropped.

    Args:
        owner: receives its outputs.
        arrival: when its client sent it. Times are seconds of one clock.
        chat: the conversation that it belongs to; "" when that is not known.
        index: which of the owner's outputs it is.

    Attributes:
        request: as its client sent it, with the targets that it was given with its place.
        attempt: `generation` of the wire: what belongs to another one is dropped.
        launches: places that it was sent to since it last got on.
        legs: of the last.
        keys: prefix keys of the tokens to prefill, where the master wants them.
        tokens: that have left here.
        launched, first: when it was sent to an engine, and when its first token left here.
        heard: outputs of this attempt that were accepted.
        handed_over: the next instance owns it, for tokens came from there.
        handoffs: that came about, in all attempts.
        interrupted: why an attempt was lost; "" if none was.
        stranded: that is so of this attempt.
        suspects: names of instances to avoid in the next placement.
        asked_first: when a placement was first asked for, while it has none.
        failed_at: instances that refused it.
        avoid: instances to avoid: they were lost, which the master may not know yet.
        alone: see `Request`.
        broke: instances that broke while they computed it.
        refused: what it has done, when it is given up for that; "" before.
        queued: tokens of its prompt, until its first token comes.
        wait: what its engine said about the time before its first token.
        recoveries: how it went on after each loss.
        images, image_fallbacks: see `Outcome`.
        predicted_ttft: when its first token was predicted, in seconds from its arrival.
        deadline: when `tick` gives up waiting; None when nothing is awaited.
        hedge_at: when another attempt may be made beside one that stands still: not before.
    """

    def __init__(self, owner: Owner, request: Request, arrival: float = 0.0, chat: str = "", index: int = 0) -> None:
        self.owner, self.index = owner, index
        self.request = request
        self.arrival = arrival
        self.chat = chat
        self.attempt = self.launches = self.heard = 0
        self.legs: list[Leg] = []
        self.keys: list[bytes] = []
        self.tokens: list[int] = []
        self.launched = arrival
        self.wait = ""
        self.images: ImagesSeen | None = None
        self.image_fallbacks: list[str] = []
        self.first: float | None = None
        self.handed_over = False
        self.handoffs = 0
        self.interrupted = ""
        self.stranded = False
        self.suspects: Collection[str] = ()
        self.asked_first = arrival
        self.failed_at: list[str] = []
        self.avoid: list[str] = []
        self.alone = 0
        self.broke: list[str] = []
        self.refused = ""
        self.queued = 0
        self.recoveries: list[Recovery] = []
        self.predicted_ttft: float | None = None
        self._placed = Placed(request.id, 0, [])  # the last answer
        self._placed_at = arrival  # when that was
        self._brought = 0  # tokens that came from elsewhere since
        self._stays: list[_Stay] = []  # who has it, and to whom it is being handed over
        self._names: list[str] = []  # of all instances that it was at
        self._since = arrival  # when it began to wait for a place
        self._lost: list[Peer] = []
        self._early: dict[int, TokenOutput] = {}  # by their place; what is before them has not come
        self.deadline: float | None = None
        self.hedge_at = -inf
        self._kept: _Stay | None = None  # to whom it is not to be handed over any more
        self._held: _Held | None = None
        self._newest = 0  # attempt; what was taken back has had a later number

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def received(self) -> int:
        """How many tokens have left here."""
        return len(self.tokens)

    @property
    def placed(self) -> bool:
        """Whether it has a place."""
        return bool(self._stays)

    @property
    def here(self) -> Peer:
        """Who has it, or had it before a hand-off that is not settled; only where it has a place."""
        return self._stays[0].peer

    @property
    def next(self) -> Peer | None:
        """To whom it is being handed over."""
        return self._stays[1].peer if len(self._stays) > 1 else None

    @property
    def at(self) -> str:
        """The instance that has it, as far as is known."""
        return self._stays[-1 if self.handed_over else 0].peer.name

    @property
    def places(self) -> list[Peer]:
        """The instances that may have it, lost ones among them."""
        return [stay.peer for stay in self._stays]

    @property
    def peers(self) -> list[Peer]:
        """The instances that may still have it."""
        return [peer for peer in self.places if peer not in self._lost]

    @property
    def held_at(self) -> list[Peer]:
        """The instances of an attempt that stands still, and may still be the first; empty without one."""
        return [] if self._held is None else [stay.peer for stay in self._held.stays]

    @property
    def route(self) -> str:
        """Where it runs and ran, for the log: "p0>d0"."""
        return ">".join(self._names)

    @property
    def suspected(self) -> bool:
        """Whether it is to run alone, as it may have broken an engine."""
        return self.alone > self.received

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
            [*self.failed_at, *self.avoid, *(self._held.avoid if self._held is not None else ())],
            request.ttft_ms,
            request.tpot_ms,
            request.offline,
            self.chat,
            patience,
            bool(self.interrupted),
            self._held is not None,
            [PlacedImage(digest, tokens) for digest, tokens in {s.digest: s.length for s in request.media}.items()],
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
        self.legs = placed.route[:1] if stays else placed.route
        peers = peers_of(self.legs)
        self._stays = [_Stay(peer, self.received) for peer in peers]
        self._names = [peer.name for peer in peers]
        self._placed, self._placed_at, self._brought = placed, now, 0
        self.launches += 1
        if self.first is None:
            self.launched = now
        if (placed.ttft_ms, placed.tpot_ms) != (self.request.ttft_ms, self.request.tpot_ms):
            self.request = replace(self.request, ttft_ms=placed.ttft_ms, tpot_ms=placed.tpot_ms)
        return replace(self.request, waited=self.waited(now), generated=tuple(self.tokens), alone=self.alone)

    def fetched(self, name: str, said: Fetched) -> None:
        """What its instance was told to bring from elsewhere has come, or will not."""
        if (
            self.placed
            and said.generation == self.attempt
            and (name, said.incarnation)
            == (
                self.here.name,
                self.here.incarnation,
            )
        ):
            self._brought = said.tokens

    def resumed(self, output: TokenOutput, now: float) -> Recovery:
        """It was interrupted, and this is the first that came of it since; returns how that came about."""
        source, how = self._placed.source, "cache" if output.cached_tokens else "recompute"
        if source is not None and self._brought:
            how = "remap" if source.peer is None else "fetch"
        recovery = Recovery(
            how,
            self.route,
            source.name if source is not None and self._brought else "",
            output.cached_tokens,
            self._placed.next_ms,
            (now - self._placed_at) * 1e3,
            (now - self._since) * 1e3,
            self._placed.recompute_ms,
        )
        self.recoveries.append(recovery)
        return recovery

    def again(self) -> None:
        """It needs another placement. Messages of the earlier attempt are ignored from now on."""
        self.attempt = self._newest = max(self._newest, self.attempt) + 1
        self._leave_all()

    def _leave_all(self) -> None:
        self.heard, self.handed_over, self.stranded = 0, False, False
        self._stays, self._names = [], []
        self._lost, self._early, self.deadline = [], {}, None

    # --- beside an attempt that stands still

    @property
    def can_keep(self) -> bool:
        """Whether it is being handed over, and who has it was not told yet to keep it."""
        open_ = len(self._stays) > 1 and not (self.handed_over or self.stranded or self._held)
        return open_ and self._stays[1] is not self._kept and self.here not in self._lost

    def keep(self, now: float) -> Peer:
        """Its next instance may hang: returns who is to be told to keep it. `stayed` says so, unless it may have been
        handed over."""
        assert self.can_keep, "it is not being handed over"
        self._kept, self.hedge_at = self._stays[1], now + OBEYS
        return self.here

    @property
    def can_leave(self) -> bool:
        """Whether it is being handed over, and nothing is of use that may still come of this attempt without its first
        instance: nothing came of that, or what comes of the next one waits for it."""
        lame = len(self._stays) > 1 and (not self.heard or bool(self._early))
        return lame and self.launches < ATTEMPTS and not (self.stranded or self._held)

    def leave(self, why: str, hang: Collection[str], now: float) -> None:
        """It is stranded: its first instance may hang, as all of these."""
        assert self.can_leave, "something may come of it"
        self._strand(why, now)
        self.suspects = hang

    def can_hedge(self, now: float) -> bool:
        """Whether another attempt can be made beside this one: this one is whole, and none is held now. No more are
        made than after losses: it may be this sequence that makes engines hang."""
        free = self.placed and self._held is None and self.launches < ATTEMPTS
        return free and now >= self.hedge_at and not (self.stranded or self._early or self._lost)

    def hedge(self, why: str, hang: Collection[str], now: float) -> None:
        """Where it is, or is being handed over to, may hang, as all of these: make another attempt beside this one. It
        needs a place."""
        assert self.can_hedge(now), "an attempt is where it cannot be left"
        self._held = _Held(
            {*hang, *(stay.peer.name for stay in self._stays)},
            self._stays,
            self.attempt,
            self.heard,
            self.legs,
            self._names,
            self._placed,
            self._placed_at,
            self._brought,
            self.interrupted,
            self._since,
        )
        self.interrupted, self._since = why, now
        self.again()

    def is_held(self, name: str, incarnation: int, generation: int) -> bool:
        """Whether something is said of the attempt that stood still."""
        if self._held is None or generation != self._held.attempt:
            return False
        return any((peer.name, peer.incarnation) == (name, incarnation) for peer in self.held_at)

    def take_back(self) -> None:
        """The attempt that stood still goes on, and the other one is over."""
        held, self._held = self._held, None
        assert held is not None, "no attempt was held"
        self._leave_all()
        self.attempt, self.heard, self.legs = held.attempt, held.heard, held.legs
        self._stays, self._names = held.stays, held.names
        self._placed, self._placed_at, self._brought = held.placed, held.placed_at, held.brought
        self.interrupted, self._since = held.interrupted, held.since
        if self.first is None:
            self.launched, self.predicted_ttft = held.placed_at, held.placed.predicted_ttft

    def let_go(self) -> tuple[list[Peer], int]:
        """The attempt that stood still is over; returns where it was, and its number."""
        peers, held, self._held = self.held_at, self._held, None
        assert held is not None, "no attempt was held"
        return peers, held.attempt

    # --- hand-offs

    def move(self, peer: Peer) -> Peer | None:
        """It is to go on at `peer`. Returns who is to hand it over, or to keep it; None when this cannot be now."""
        if len(self._stays) != 1 or self.stranded or self._early:
            return None
        if peer != self.here:
            self._stays.append(_Stay(peer, self.received))
        return self.here

    def stayed(self, name: str, said: Stayed, now: float) -> bool:
        """Its instance does not hand it over, after all, to whom it is being handed over, and not to somebody before.
        Returns whether that is news. It is stranded if nobody has it."""
        here, to = (name, said.incarnation), said.peer
        if said.generation != self.attempt or self.stranded or self.handed_over or self.next is None or to is None:
            return False
        if here != (self.here.name, self.here.incarnation):
            return False
        if (to.name, to.incarnation) != (self.next.name, self.next.incarnation):
            return False
        if not said.here:
            self._strand(f"{name} does not have this request any more", now)
            return True
        if self._names[-1] == self._stays.pop().peer.name and len(self._names) > 1:
            self._names.pop()  # it was placed there
        self._lost = [peer for peer in self._lost if peer == self.here]
        self._look(now)
        return True

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
            self.recoveries,
            self.images,
            self.image_fallbacks,
        )

    # --- what comes of it

    def accept(self, name: str, incarnation: int, output: TokenOutput, now: float) -> list[TokenOutput]:
        """Accept an output of an instance's incarnation; returns what can be passed on. It may be stranded after it.

        Raises:
            EngineFailure: it cannot end well anywhere.
            InvalidRequest: the same, for what it asks for.
        """
        place = self._place_of(name, incarnation, output.start)
        if output.generation != self.attempt or place is None or self.stranded:
            return []
        if output.finish in (FinishReason.ERROR, FinishReason.ABORT):
            if self.handed_over and not place:
                return []  # its hand-off was lost
            if output.finish is FinishReason.ERROR:
                if output.error.startswith(FIELD):  # so it would end everywhere, for what its client asked
                    raise InvalidRequest(output.error, FIELD)
                raise EngineFailure(f"{name} gave this request up: {output.error}")
            self._strand(f"{name} dropped this request", now)
            self.suspects = [self._stays[-1].peer.name]  # that hand-over was lost
            return []
        self.heard += 1
        if output.tokens:
            self.launches = 1
        if place and not self.handed_over:
            self.handed_over, self.handoffs = True, self.handoffs + 1
            if self._names[-1] != name:
                self._names.append(name)
        if output.timing is not None:
            self.wait, self.images = output.timing.wait, output.timing.images
        ready = self._in_order(output)
        if ready and self.first is None:
            self.first = now
        if self.handed_over and not self._early:
            del self._stays[0]
            self.handed_over, self._lost = False, []
        self._look(now)
        return ready

    def _place_of(self, name: str, incarnation: int, start: int) -> int | None:
        """Which of its stays an output comes from; None when it is from none of them."""
        for place in range(len(self._stays) - 1, -1, -1):
            stay = self._stays[place]
            if (stay.peer.name, stay.peer.incarnation) == (name, incarnation) and stay.peer not in self._lost:
                return place if start >= stay.since or not place else None
        return None

    def lose(self, peer: Peer, reason: str, now: float) -> None:
        """An incarnation of an instance has ended."""
        if peer not in self.peers or self.stranded:
            return
        self._lost.append(peer)
        if not self.peers or (self.handed_over and peer == self._stays[-1].peer):
            self._strand(f"{peer.name} failed during this request ({reason})", now)
        else:
            self._look(now)

    def isolate(self, name: str, tokens: int, now: float) -> None:
        """It may have broken this instance: it is to run alone until it has brought so many more tokens. One that runs
        elsewhere already, among others, is stranded."""
        self.broke.append(name)
        self.alone = self.received + tokens
        if self.placed and not self.stranded and name not in [peer.name for peer in self.places]:
            self._strand(f"it is to run alone, as {name} broke while it computed this request", now)

    def tick(self, now: float) -> None:
        """Give up waiting at the deadline."""
        if self.deadline is None or now <= self.deadline or self.stranded:
            return
        if self._lost:
            self._strand(f"{self._lost[0].name} failed during this request, and nothing came of it since", now)
        else:
            self._strand(f"tokens of this request that {self.here.name} had computed did not come", now)

    def _strand(self, why: str, now: float) -> None:
        self.stranded, self.interrupted, self._since = True, why, now
        self.suspects = ()

    def _look(self, now: float) -> None:
        """Determine the possible owners, and the deadline for them to report."""
        first = self.here
        if self._early:
            if first in self._lost:
                self._strand(f"{first.name} failed during this request, its first tokens are lost", now)
            elif self.deadline is None:  # later outputs do not extend the wait for a missing one
                self.deadline = now + LEASE
        elif not self._lost:
            self.deadline = None
        elif first in self._lost and (len(self._stays) == 1 or not self.heard):
            self._strand(f"{first.name} failed during this request", now)
        elif not self.heard:
            self.deadline = None  # it is still being prefilled, and the other instance cannot have it
        elif self.deadline is None:  # it may just have been handed over
            self.deadline = now + SIGN_OF_LIFE

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
