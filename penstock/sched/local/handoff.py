"""Requests that change instances between prompt and output (HFX and xLLM 3.2's migration; RTP-LLM's allocate, load,
generate).

Two state machines, one for each end, that talk in `core.wire.handoff` over a carrier that may lose, delay, double and
reorder. What keeps them right:

- The decoder sets room aside first, under a lease; whoever hears nothing for the lease's time ends it.
- The decoder's word is final and true for ever: after `Committed` it owns the request, after `Rejected` or `Release`
  it holds nothing under that lease and never will. It remembers which leases are over.
- The prefiller lets go only after that word. Without one it does not go on either: after `Commit` was sent only the
  decoder knows who owns the request, so silence until the deadline ends the request here with an error.
- Before `Commit` was sent the prefiller may change its mind: it then decodes where it is.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, Protocol

from penstock.core.errors import UserError
from penstock.core.plan import BLOCK_TOKENS
from penstock.core.request import FinishReason, Request, TokenOutput
from penstock.core.wire.engine import Peer
from penstock.core.wire.handoff import (
    Commit,
    Committed,
    Lease,
    Missing,
    PeerMessage,
    Push,
    Rejected,
    Release,
    Renew,
    Reserve,
    Reserved,
)
from penstock.kv.keys import extend_keys
from penstock.sched.local.scheduler import Scheduler
from penstock.sched.local.sequence import Reservation, Sequence, blocks_for

RETRIES = 10  # times that a question is asked within a lease
REMEMBER = 8  # leases' time that the end of one is remembered


class Arrival(Protocol):
    """A message that came from a peer, with whatever bytes came with it."""

    @property
    def peer(self) -> Peer: ...
    @property
    def message(self) -> PeerMessage: ...


class Carrier(Protocol):
    """What moves messages and blocks; see `penstock.transfer`. `land` takes what it delivered itself."""

    @property
    def shares(self) -> bool: ...
    def send(self, peer: Peer, message: PeerMessage) -> None: ...
    def stamp(self, block: int) -> tuple[int, int]: ...
    def land(self, arrival: Any, into: int) -> int | None: ...


class Host(Protocol):
    """The engine around it."""

    def knows(self, frontend: str) -> bool:
        """Whether tokens can be sent to it."""
        ...

    def spent(self, request_id: str) -> tuple[float, float]:
        """Seconds that a request waited, and read its prompt."""
        ...

    def departed(self, request_id: str) -> None:
        """Another engine runs it now."""
        ...

    def joined(self, request: Request, frontend: str, generation: int, queue: float, prefill: float) -> None:
        """A request runs here now; its tokens go to that frontend."""
        ...

    def failed(self, output: TokenOutput) -> None:
        """A request has ended here with an error."""
        ...


class _State(Enum):
    ASKING = auto()
    STREAMING = auto()  # room was promised
    COMMITTING = auto()


@dataclass(slots=True, eq=False)
class _Outgoing:
    lease: Lease
    request: Request
    frontend: str
    peer: Peer
    retry_at: float
    state: _State = _State.ASKING
    refused: bool = False  # no room at the last attempt
    pushed: int = 0  # blocks that the decoder has or was sent
    holding: list[int] = field(default_factory=list)  # blocks kept as they are while they travel
    deadline: float | None = None  # by which an answer must have come, once the prompt is read


@dataclass(slots=True, eq=False)
class _Incoming:
    lease: Lease
    frontend: str
    sender: Peer
    reservation: Reservation
    deadline: float
    arrived: set[int] = field(default_factory=set)
    commit: Commit | None = None
    quiet: bool = False  # no block has arrived since the commit


class Handoffs:
    """All hand-offs of one engine, in both directions. Not thread-safe: the engine's loop owns it.

    Args:
        lease: seconds of silence after which a hand-off is over.
    """

    def __init__(self, scheduler: Scheduler, carrier: Carrier, host: Host, lease: float) -> None:
        assert lease > 0
        self._scheduler = scheduler
        self._carrier = carrier
        self._host = host
        self._lease = lease
        self._now = self._renew_at = 0.0
        self._outgoing: dict[str, _Outgoing] = {}
        self._incoming: dict[str, _Incoming] = {}
        self._over: dict[Lease, tuple[float, bool]] = {}  # -> (forgotten at, committed)
        self.completed = self.abandoned = 0

    @property
    def busy(self) -> bool:
        return bool(self._outgoing or self._incoming)

    def promised(self, request_id: str) -> bool:
        """Whether the decoder of a request has room for it."""
        out = self._outgoing.get(request_id)
        return out is not None and out.state is not _State.ASKING

    # --- what the engine tells

    def begin(self, now: float, request: Request, generation: int, frontend: str, peer: Peer) -> None:
        """A request that was added with `departs` shall go on at `peer`."""
        out = _Outgoing(Lease(request.id, generation), request, frontend, peer, now)
        self._outgoing[request.id] = out
        self._ask(now, out)

    def progress(self, now: float) -> None:
        """A step has run: send what is full, and commit what has its first token."""
        for out in list(self._outgoing.values()):
            sequence = self._scheduler.sequence(out.lease.request_id)
            if sequence is None:
                self._abandon(out, "ended")
            else:
                self._advance(now, out, sequence)

    def cancel(self, request_id: str, frontend: str) -> None:
        """Its owner does not want it any longer; the scheduler is told by the caller."""
        out, incoming = self._outgoing.get(request_id), self._incoming.get(request_id)
        if out is not None and out.frontend == frontend:
            self._abandon(out, "cancelled")
        if incoming is not None and incoming.frontend == frontend:
            self._end(incoming, "cancelled")

    def forsake(self, frontend: str) -> None:
        """A frontend has gone, and with it everybody who wanted its requests."""
        for request_id in {*self._outgoing, *self._incoming}:
            self.cancel(request_id, frontend)

    def lost(self, peer: Peer, for_good: bool) -> None:
        """The link to a peer is down; `for_good` when that life of it is over."""
        for out in [o for o in self._outgoing.values() if o.peer == peer]:
            if out.state is not _State.COMMITTING:
                self._stay(out, "link lost")
            elif for_good:
                self._fail(out)
        for incoming in [i for i in self._incoming.values() if i.sender == peer]:
            self._end(incoming, "link lost")

    def tick(self, now: float) -> None:
        """Ask again, renew, and end what is overdue; to be called several times in a lease."""
        for out in list(self._outgoing.values()):
            self._tick_outgoing(now, out)
        if now >= self._renew_at:
            self._renew_at = now + self._lease / 3
            self._renew()
        for incoming in [i for i in self._incoming.values() if now >= i.deadline]:
            self._end(incoming, "nothing was heard for too long")
        for lease in [lease for lease, (forgotten, _) in self._over.items() if now >= forgotten]:
            del self._over[lease]
        self._now = now

    def on(self, now: float, arrival: Arrival) -> None:
        """A message from a peer."""
        self._now = now
        match arrival.message:
            case Reserve() | Push() | Renew() | Commit():
                self._as_decoder(now, arrival)
            case Release(lease=lease) | Rejected(lease=lease) as message:
                incoming, out = self._incoming_of(lease), self._outgoing_of(lease)
                if incoming is not None and incoming.sender == arrival.peer:
                    self._end(incoming, message.reason, tell=False)
                elif out is not None:
                    self._on_refusal(now, out, message.reason)
                elif lease not in self._over:  # it has overtaken what it ends
                    self._close(now, lease, committed=False)
            case Reserved(lease=lease, have=have):
                if (out := self._outgoing_of(lease)) and out.state is _State.ASKING:
                    out.state, out.pushed = _State.STREAMING, have
                    self._progress(now, out)
            case Missing(lease=lease, indices=indices):
                out = self._outgoing_of(lease)
                if out is not None and out.state is _State.COMMITTING:
                    self._push_again(now, out, indices)
            case Committed(lease=lease):
                out = self._outgoing_of(lease)
                if out is not None and out.state is _State.COMMITTING:
                    self._forget(out)
                    self._scheduler.depart(lease.request_id)
                    self._host.departed(lease.request_id)
                    self.completed += 1

    # --- prefiller

    def _outgoing_of(self, lease: Lease) -> _Outgoing | None:
        out = self._outgoing.get(lease.request_id)
        return out if out is not None and out.lease == lease else None

    def _ask(self, now: float, out: _Outgoing) -> None:
        out.refused = False
        out.retry_at = now + self._lease / RETRIES
        self._carrier.send(out.peer, Reserve(out.lease, out.request, out.frontend))

    def _progress(self, now: float, out: _Outgoing) -> None:
        sequence = self._scheduler.sequence(out.lease.request_id)
        if sequence is not None:
            self._advance(now, out, sequence)

    def _advance(self, now: float, out: _Outgoing, sequence: Sequence) -> None:
        """Send what there is to send of a sequence that may still be reading its prompt."""
        if out.state is _State.STREAMING:
            while out.pushed < sequence.computed // BLOCK_TOKENS:
                self._push(out, sequence, out.pushed)
                out.pushed += 1
        if out.state is _State.COMMITTING or not self._scheduler.leaving(sequence.id):
            return
        if out.deadline is None:
            out.deadline = now + self._lease
        if out.refused:
            self._stay(out, "no room")
        elif out.state is _State.STREAMING:
            if sequence.computed % BLOCK_TOKENS:
                self._push(out, sequence, out.pushed)
            out.state = _State.COMMITTING
            out.deadline = now + self._lease
            self._commit(now, out, sequence)

    def _push(self, out: _Outgoing, sequence: Sequence, index: int) -> None:
        pool = self._scheduler.pool
        # its parents too, so that eviction stays leaf-first
        travelling = sequence.blocks[len(out.holding) : index + 1]
        pool.begin_transfer(travelling)
        out.holding += travelling
        block = sequence.blocks[index]
        if self._carrier.shares:
            pool.offer(block)
        full = (index + 1) * BLOCK_TOKENS <= sequence.computed
        if full:
            extend_keys(sequence.keys, self._scheduler.root, sequence.tokens, index + 1)
        generation, checksum = self._carrier.stamp(block)
        key = sequence.keys[index] if full else b""
        self._carrier.send(out.peer, Push(out.lease, index, key, block, generation, checksum))

    def _commit(self, now: float, out: _Outgoing, sequence: Sequence) -> None:
        out.retry_at = now + self._lease / RETRIES
        queue, prefill = self._host.spent(sequence.id)
        generated = sequence.tokens[len(sequence.request.prompt) :]
        blocks, cached = blocks_for(sequence.computed), sequence.cached_tokens or 0
        self._carrier.send(out.peer, Commit(out.lease, blocks, generated, cached, queue, prefill))

    def _push_again(self, now: float, out: _Outgoing, indices: list[int]) -> None:
        sequence = self._scheduler.sequence(out.lease.request_id)
        assert sequence is not None
        for index in indices:
            if 0 <= index < blocks_for(sequence.computed):
                self._push(out, sequence, index)
        self._commit(now, out, sequence)

    def _on_refusal(self, now: float, out: _Outgoing, reason: str) -> None:
        """The decoder holds nothing. Ask again while the prompt is being read, else decode here."""
        if self._scheduler.leaving(out.lease.request_id):
            self._stay(out, reason)
            return
        self._let_travel_end(out)
        lease = out.lease
        out.lease = Lease(lease.request_id, lease.generation, lease.attempt + 1)
        out.state, out.pushed, out.refused = _State.ASKING, 0, True
        out.retry_at = now + min(2.0**lease.attempt / RETRIES, 1.0) * self._lease

    def _tick_outgoing(self, now: float, out: _Outgoing) -> None:
        if out.deadline is not None and now >= out.deadline:
            if out.state is _State.COMMITTING:
                self._fail(out)
            else:
                self._stay(out, "no answer")
        elif now >= out.retry_at and out.state is _State.ASKING:
            self._ask(now, out)
        elif now >= out.retry_at and out.state is _State.COMMITTING:
            sequence = self._scheduler.sequence(out.lease.request_id)
            assert sequence is not None
            self._commit(now, out, sequence)

    def _renew(self) -> None:
        by_peer: dict[Peer, list[Lease]] = {}
        for out in self._outgoing.values():
            if out.state is not _State.ASKING:
                by_peer.setdefault(out.peer, []).append(out.lease)
        for peer, leases in by_peer.items():
            self._carrier.send(peer, Renew(leases))

    def _stay(self, out: _Outgoing, reason: str) -> None:
        """It decodes here; only before a commit was sent, or after the decoder said no."""
        self._abandon(out, reason)
        self._scheduler.stay(out.lease.request_id)

    def _fail(self, out: _Outgoing) -> None:
        """Nobody knows who owns the request: it ends here, and the frontend knows whether tokens come from there."""
        sequence = self._scheduler.sequence(out.lease.request_id)
        assert sequence is not None
        self._abandon(out, "no answer")
        self._scheduler.cancel(sequence.id)
        self._host.failed(TokenOutput(sequence.id, [], finish=FinishReason.ERROR, start=sequence.generated))

    def _abandon(self, out: _Outgoing, reason: str) -> None:
        self._forget(out)
        self.abandoned += 1
        self._carrier.send(out.peer, Release(out.lease, reason))

    def _forget(self, out: _Outgoing) -> None:
        self._let_travel_end(out)
        del self._outgoing[out.lease.request_id]

    def _let_travel_end(self, out: _Outgoing) -> None:
        self._scheduler.pool.end_transfer(out.holding)
        out.holding = []

    # --- decoder

    def _incoming_of(self, lease: Lease) -> _Incoming | None:
        incoming = self._incoming.get(lease.request_id)
        return incoming if incoming is not None and incoming.lease == lease else None

    def _as_decoder(self, now: float, arrival: Arrival) -> None:
        message, peer = arrival.message, arrival.peer
        if isinstance(message, Renew):
            for lease in message.leases:
                if incoming := self._heard(now, lease, peer):
                    incoming.deadline = now + self._lease
            return
        assert isinstance(message, Reserve | Push | Commit)
        if isinstance(message, Reserve) and message.lease not in self._over:
            self._on_reserve(now, message, peer)
        elif incoming := self._heard(now, message.lease, peer):
            incoming.deadline = now + self._lease
            if isinstance(message, Push):
                self._on_push(incoming, arrival, message)
            elif isinstance(message, Commit):
                self._on_commit(incoming, message)

    def _heard(self, now: float, lease: Lease, peer: Peer) -> _Incoming | None:
        """The hand-off of a lease; when there is none, its end is told (again)."""
        incoming = self._incoming_of(lease)
        if incoming is not None:
            return incoming if incoming.sender == peer else None
        _, committed = self._over.get(lease, (0.0, False))
        if committed:
            self._carrier.send(peer, Committed(lease))
        else:
            self._close(now, lease, committed=False)
            self._carrier.send(peer, Release(lease, "not known, or over"))
        return None

    def _on_reserve(self, now: float, message: Reserve, peer: Peer) -> None:
        lease = message.lease
        known = self._incoming.get(lease.request_id)
        if known is not None and known.lease == lease:
            known.deadline = now + self._lease
            self._carrier.send(peer, Reserved(lease, known.reservation.have))
            return
        if known is not None and (known.lease.generation, known.lease.attempt) < (lease.generation, lease.attempt):
            self._end(known, "another attempt began")
        reason, reservation = "no room", None
        if lease.request_id in self._incoming or self._scheduler.holds(lease.request_id):
            reason = "this request is here already"
        elif not self._host.knows(message.frontend):
            reason = f"the frontend {message.frontend} is not connected"
        else:
            try:
                reservation = self._scheduler.reserve(message.request)
            except UserError as error:
                reason = str(error)
        if reservation is None:
            self._close(now, lease, committed=False)
            self._carrier.send(peer, Rejected(lease, reason))
            return
        self._incoming[lease.request_id] = _Incoming(lease, message.frontend, peer, reservation, now + self._lease)
        self._carrier.send(peer, Reserved(lease, reservation.have))

    def _on_push(self, incoming: _Incoming, arrival: Arrival, push: Push) -> None:
        r = incoming.reservation
        if not r.have <= push.index < len(r.blocks) or push.index in incoming.arrived:
            return
        if push.key != (r.keys[push.index] if push.index < len(r.keys) else b""):
            return  # of other tokens
        into = r.blocks[push.index]
        block = self._land(arrival, push, into)
        if block is None:
            return
        r.blocks[push.index] = block
        incoming.arrived.add(push.index)
        incoming.quiet = False
        if incoming.commit is not None:
            self._try_finish(incoming)

    def _land(self, arrival: Arrival, push: Push, into: int) -> int | None:
        """The block that holds what was pushed, ours and held once for this; None when it cannot be believed."""
        pool = self._scheduler.pool
        if self._carrier.shares and pool.owns(push.block):
            # it was handed over before, as part of another request
            if self._carrier.stamp(push.block)[0] != push.generation or not pool.agrees(push.block, push.key):
                return None
            pool.regain(push.block)
            pool.release([into])
            return push.block
        block = self._carrier.land(arrival, into)
        if block is not None and block != into:
            pool.replace(into, block)
        return block

    def _on_commit(self, incoming: _Incoming, commit: Commit) -> None:
        again, incoming.commit = incoming.commit is not None, commit
        if self._try_finish(incoming):
            return
        missing = self._missing(incoming)
        # blocks may travel on other sockets than this message: ask for them when nothing has come for a while
        if again and incoming.quiet and missing:
            self._carrier.send(incoming.sender, Missing(incoming.lease, missing))
        incoming.quiet = True

    @staticmethod
    def _missing(incoming: _Incoming) -> list[int]:
        r = incoming.reservation
        return [i for i in range(r.have, len(r.blocks)) if i not in incoming.arrived]

    def _try_finish(self, incoming: _Incoming) -> bool:
        """Take the request over once everything is here."""
        commit, r = incoming.commit, incoming.reservation
        assert commit is not None
        if self._missing(incoming):
            return False
        if commit.blocks != len(r.blocks) or not commit.tokens:
            self._end(incoming, "the commit does not fit what was reserved", word=Rejected)
            return True
        del self._incoming[incoming.lease.request_id]
        self._close(self._now, incoming.lease, committed=True)
        self._scheduler.resume(r, commit.tokens, commit.cached_tokens)
        self._host.joined(r.request, incoming.frontend, incoming.lease.generation, commit.queue, commit.prefill)
        self._carrier.send(incoming.sender, Committed(incoming.lease))
        return True

    def _end(
        self, incoming: _Incoming, reason: str, tell: bool = True, word: type[Release] | type[Rejected] = Release
    ) -> None:
        """Give the room back; the lease is over for good."""
        del self._incoming[incoming.lease.request_id]
        self._scheduler.unreserve(incoming.reservation)
        self._close(self._now, incoming.lease, committed=False)
        if tell:
            self._carrier.send(incoming.sender, word(incoming.lease, reason))

    def _close(self, now: float, lease: Lease, *, committed: bool) -> None:
        self._over[lease] = (now + REMEMBER * self._lease, committed)

    # --- looking

    def counts(self) -> dict[str, int]:
        return {
            "outgoing": len(self._outgoing),
            "incoming": len(self._incoming),
            "handoffs_completed": self.completed,
            "handoffs_abandoned": self.abandoned,
        }

    def check(self) -> None:
        """Raise AssertionError unless every held block and every leaving sequence belongs to a hand-off."""
        pool = self._scheduler.pool
        expected: dict[int, int] = {}
        for out in self._outgoing.values():
            for block in out.holding:
                expected[block] = expected.get(block, 0) + 1
            if self._scheduler.leaving(out.lease.request_id):
                assert out.deadline is not None, "a sequence waits to leave without a deadline"
        pool.check_transfers(expected)
        leaving = sum(self._scheduler.leaving(request_id) for request_id in self._outgoing)
        assert leaving == self._scheduler.num_leaving, "a sequence waits to leave and nobody takes it"
        reserved = sum(len(i.reservation.blocks) for i in self._incoming.values())
        assert reserved == self._scheduler.num_reserved_blocks, "room is set aside for nobody"
