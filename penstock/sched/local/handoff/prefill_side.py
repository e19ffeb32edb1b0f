"""The prefill side of hand-offs: gives requests away, after their prompt or in the middle."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto
from math import inf

from penstock.core.plan import BLOCK_TOKENS
from penstock.core.request import FinishReason, Request, TokenOutput
from penstock.core.wire.engine import Peer
from penstock.core.wire.handoff import (
    Arrived,
    Commit,
    Committed,
    Lease,
    Missing,
    PeerMessage,
    Push,
    Release,
    Renew,
    Reserve,
    Reserved,
    Sent,
    Waiting,
)
from penstock.kv.groups import key_of
from penstock.sched.local.handoff.ports import HandoffTransport, Host, same_incarnation
from penstock.sched.local.scheduler import Scheduler
from penstock.sched.local.sequence import Sequence, blocks_for

RETRIES = 10  # parts of a lease from the first question to the second; then doubled
HOLD = 5  # parts of a lease: how long what can run no further here waits for room there, before it goes on here
ROUNDS = 3  # in which blocks of what decodes on may be sent; as many as Llumnix allows
LAST = 4  # full blocks that may be on their way when it pauses


class _State(Enum):
    OPEN = auto()  # nobody has said to whom
    QUEUED = auto()  # it has not run since: no reservation yet
    ASKING = auto()
    STREAMING = auto()  # blocks are reserved
    COMMITTING = auto()


@dataclass(slots=True, eq=False)
class _Outgoing:
    """
    Attributes:
        retry_at: when to ask again; `pause`: how long to wait after that.
        push_again_at: when blocks may be sent once more, however often the decode side asks.
        asked: when the decode side was first asked.
        heard: when it last answered; before that, when it was asked.
        seen: for each group of layers, its first block that is still seen where the request goes on.
        pushed: blocks that the decode side has or was sent.
        arrived: leading ones that it has, as far as is known.
        rounds: in which blocks were sent while it decodes on; `in_round`: whether the end of the last is awaited.
        lacking: blocks that the decode side asked for last, after the commit.
        deadline: by which an answer must have come, once prefill is over.
    """

    lease: Lease
    request: Request
    frontend: str
    peer: Peer | None
    seen: list[int]
    state: _State = _State.QUEUED
    retry_at: float = 0.0
    pause: float = 0.0
    push_again_at: float = 0.0
    asked: float = 0.0
    heard: float = 0.0
    pushed: int = 0
    arrived: int = 0
    rounds: int = 0
    in_round: bool = False
    lacking: int = 0
    deadline: float | None = None


class PrefillSide:
    """All requests being handed over from this engine."""

    def __init__(self, scheduler: Scheduler, transport: HandoffTransport, host: Host, lease: float) -> None:
        self.completed = self.abandoned = 0
        self._scheduler = scheduler
        self._transport = transport
        self._host = host
        self._lease = lease
        self._renew_at = 0.0
        self._outgoing: dict[str, _Outgoing] = {}

    def __len__(self) -> int:
        return len(self._outgoing)

    def leaving(self, request_id: str) -> bool:
        """Whether a request is being handed over."""
        out = self._outgoing.get(request_id)
        return out is not None and out.state is not _State.OPEN

    def promised(self, request_id: str) -> bool:
        """Whether the decode side has reserved blocks for a request."""
        out = self._outgoing.get(request_id)
        return out is not None and out.state in (_State.STREAMING, _State.COMMITTING)

    # --- called by the engine

    def begin(self, now: float, request: Request, generation: int, frontend: str, peer: Peer) -> None:
        assert not self.leaving(request.id)
        known, sequence = self._outgoing.get(request.id), self._scheduler.sequence(request.id)
        assert sequence is not None
        sequence.moving = not sequence.migrates
        seen = sequence.seen_from(max(len(request.context), sequence.settled))
        out = _Outgoing(_new_lease(sequence, generation), request, frontend, peer, seen)
        self._outgoing[request.id] = out
        if known is not None and self._scheduler.migrating(request.id):  # it was held
            self._advance(now, out, sequence)

    def hold(self, request: Request, generation: int, frontend: str) -> None:
        """It is not to run on after its prompt until it is said where, but not for long."""
        out = _Outgoing(Lease(request.id, generation), request, frontend, None, [], _State.OPEN)
        self._outgoing[request.id] = out

    def go_on(self, request_id: str) -> None:
        """It stays, unless the decode side may have it by now."""
        out = self._outgoing.get(request_id)
        if out is not None and out.state is not _State.COMMITTING:
            self._stay(out, "it is to go on here")

    def started(self, now: float, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            out = self._outgoing.get(request_id)
            if out is not None and out.state is _State.QUEUED:
                self._ask(now, out)

    def progress(self, now: float) -> None:
        for out in list(self._outgoing.values()):
            sequence = self._scheduler.sequence(out.lease.request_id)
            if sequence is None:
                self._abandon(out, "ended")
            else:
                self._advance(now, out, sequence)

    def cancel(self, request_id: str, frontend: str, generation: float = inf) -> None:
        out = self._outgoing.get(request_id)
        if out is not None and out.frontend == frontend and out.lease.generation <= generation:
            self._abandon(out, "cancelled")

    def drop_client(self, frontend: str) -> None:
        for request_id in list(self._outgoing):
            self.cancel(request_id, frontend)

    def lost(self, peer: Peer, for_good: bool) -> None:
        for out in [o for o in self._outgoing.values() if o.peer is not None and same_incarnation(o.peer, peer)]:
            if out.state is not _State.COMMITTING:
                self._stay(out, "link lost")
            elif for_good:
                self._fail(out)

    def tick(self, now: float) -> None:
        for out in list(self._outgoing.values()):
            self._tick(now, out)
        if now >= self._renew_at:
            self._renew_at = now + self._lease / 3
            self._renew()

    # --- messages of the decode side

    def on_answer(self, now: float, peer: Peer, message: Waiting | Reserved | Arrived | Missing | Committed) -> None:
        out = self._of(message.lease, peer)
        if out is None:
            return
        out.heard = now
        match message:
            case Waiting():
                out.retry_at = now + self._lease / 3  # to stay in the queue
            case Reserved(have=have):
                if out.state is _State.ASKING:
                    out.state, out.pushed, out.arrived = _State.STREAMING, have, have
                    self._look_at(now, out)
            case Arrived(have=have):
                if out.state is _State.STREAMING and out.in_round:
                    out.in_round, out.arrived = False, have
                    out.pushed = min(out.pushed, have)  # what was sent before is there, or lost
                    self._look_at(now, out)
            case Missing(indices=indices):
                if out.state is _State.COMMITTING and now >= out.push_again_at:
                    self._push_again(now, out, indices)
            case Committed(lease=lease):
                if out.state is _State.COMMITTING:
                    del self._outgoing[lease.request_id]
                    self._scheduler.migrated(lease.request_id)
                    self._host.migrated(lease.request_id)
                    self.completed += 1

    def on_refusal(self, now: float, peer: Peer, lease: Lease, reason: str) -> bool:
        """The decode side refused, or has given it up."""
        out = self._of(lease, peer)
        if out is not None:
            self._stay(out, reason)
        return out is not None

    # --- inside

    def _of(self, lease: Lease, peer: Peer) -> _Outgoing | None:
        out = self._outgoing.get(lease.request_id)
        if out is None or out.peer is None or out.lease != lease or not same_incarnation(out.peer, peer):
            return None
        return out

    def _tell(self, out: _Outgoing, message: PeerMessage) -> None:
        assert out.peer is not None
        self._transport.send(out.peer, message)

    def _ask(self, now: float, out: _Outgoing) -> None:
        if out.state is _State.QUEUED:
            out.state, out.asked, out.heard = _State.ASKING, now, now
        self._wait_longer(now, out)
        sequence = self._scheduler.sequence(out.lease.request_id)
        assert sequence is not None
        sampled = _sampled(sequence)
        if sampled and sampled[-1] < 0:  # it is still being computed
            sampled.pop()
        self._tell(out, Reserve(out.lease, out.request, out.frontend, sampled))

    def _wait_longer(self, now: float, out: _Outgoing) -> None:
        out.pause = min(2 * out.pause or self._lease / RETRIES, self._lease)
        out.retry_at = now + out.pause

    def _look_at(self, now: float, out: _Outgoing) -> None:
        sequence = self._scheduler.sequence(out.lease.request_id)
        if sequence is not None:
            self._advance(now, out, sequence)

    def _advance(self, now: float, out: _Outgoing, sequence: Sequence) -> None:
        """Send what there is to send of a sequence that may still be prefilling, or that decodes on."""
        if out.state is _State.STREAMING:
            while out.pushed < sequence.settled // BLOCK_TOKENS * sequence.groups:
                self._push(out, sequence, out.pushed)
                out.pushed += 1
            if not sequence.migrates and not out.in_round:
                self._send_on(now, out)
                if out.lease.request_id not in self._outgoing:
                    return
        if out.state is _State.COMMITTING or not self._scheduler.migrating(sequence.id):
            return
        if out.deadline is None:
            out.deadline = now + self._lease / HOLD
        if out.state is _State.QUEUED:  # it was told to leave when its last step here was under way
            self._ask(now, out)
        elif out.state is _State.STREAMING:
            for index in range(out.pushed, blocks_for(sequence.computed) * sequence.groups):  # that are not full
                self._push(out, sequence, index)
            out.state = _State.COMMITTING
            out.deadline, out.pause = now + self._lease, 0.0
            self._commit(now, out, sequence)

    def _send_on(self, now: float, out: _Outgoing) -> None:
        """It decodes on: pause it if little is on its way, else find out how much of this arrives."""
        if out.pushed - out.arrived <= LAST * len(out.seen):
            self._scheduler.leave(out.lease.request_id)
        elif out.rounds == ROUNDS:
            self._stay(out, "its blocks do not arrive as fast as it decodes")
        else:
            out.rounds, out.in_round, out.pause = out.rounds + 1, True, 0.0
            self._ask_arrived(now, out)

    def _ask_arrived(self, now: float, out: _Outgoing) -> None:
        self._wait_longer(now, out)
        self._tell(out, Sent(out.lease))

    def _push(self, out: _Outgoing, sequence: Sequence, index: int) -> None:
        """Unless no row to come sees the block."""
        place, group = divmod(index, sequence.groups)
        if place < out.seen[group]:
            return
        self._scheduler.begin_transfer(sequence, index)
        block = sequence.blocks[index]
        if self._transport.shares:
            self._scheduler.pool.offer(block)
        full = (place + 1) * BLOCK_TOKENS <= sequence.settled
        if full:
            sequence.extend_keys(place + 1)
        generation, checksum = self._transport.stamp(block)
        key = key_of(sequence.keys[place], group) if full else b""
        self._tell(out, Push(out.lease, index, key, block, generation, checksum))

    def _commit(self, now: float, out: _Outgoing, sequence: Sequence) -> None:
        out.retry_at = now + self._lease / RETRIES
        assert sequence.answered is not None
        blocks, cached = sequence.blocks_until(sequence.computed), sequence.cached_tokens or 0
        decode = max(0.0, now - sequence.answered)
        self._tell(out, Commit(out.lease, blocks, _sampled(sequence), cached, *sequence.spent, decode, sequence.images))

    def _push_again(self, now: float, out: _Outgoing, indices: list[int]) -> None:
        """Send blocks that have not arrived once more: RETRIES times within a lease at most, four times while none of
        them arrives. The deadline stays: after its commit a hand-off ends within a lease.
        """
        sequence = self._scheduler.sequence(out.lease.request_id)
        assert sequence is not None
        # the decode side may ask at once and several times: the pause doubles while nothing that is sent arrives
        arrives = out.lacking > len(indices)
        out.pause = self._lease / RETRIES if arrives or not out.pause else 2 * out.pause
        out.push_again_at, out.lacking = now + out.pause, len(indices)
        for index in indices:
            if 0 <= index < sequence.blocks_until(sequence.computed):
                self._push(out, sequence, index)
        self._commit(now, out, sequence)

    def _tick(self, now: float, out: _Outgoing) -> None:
        if out.state is _State.COMMITTING:
            assert out.deadline is not None
            if now >= out.deadline:
                self._fail(out)
            elif now >= out.retry_at:
                sequence = self._scheduler.sequence(out.lease.request_id)
                assert sequence is not None
                self._commit(now, out, sequence)
        elif out.state is _State.OPEN:
            if out.deadline is not None and now >= out.deadline:
                self._stay(out, "nobody said where it is to go on")
        elif out.state is not _State.QUEUED:
            sequence = self._scheduler.sequence(out.lease.request_id)
            decodes = sequence is not None and not sequence.migrates
            overdue = now >= (inf if out.deadline is None else out.deadline)
            if out.state is _State.ASKING and (overdue or (decodes and now >= out.asked + self._lease)):
                self._stay(out, "no room in time")
            elif overdue or now >= out.heard + self._lease:
                self._stay(out, "no answer")
            elif out.state is _State.ASKING and now >= out.retry_at:
                self._ask(now, out)
            elif out.in_round and now >= out.retry_at:
                self._ask_arrived(now, out)

    def _renew(self) -> None:
        """The decode side answers each, so that a failure is noticed before the commit."""
        by_peer: dict[Peer, list[Lease]] = {}
        for out in self._outgoing.values():
            if out.peer is not None and out.state in (_State.STREAMING, _State.COMMITTING):
                by_peer.setdefault(out.peer, []).append(out.lease)
        for peer, leases in by_peer.items():
            self._transport.send(peer, Renew(leases))

    def _stay(self, out: _Outgoing, reason: str) -> None:
        """Decode here; only before a commit was sent, or after a refusal."""
        self._abandon(out, reason)
        self._scheduler.stay(out.lease.request_id)
        self._host.stayed(out.lease.request_id, out.peer, reason)

    def _fail(self, out: _Outgoing) -> None:
        """The owner is unknown: end the request here. The frontend sees whether the other side sends tokens, and else
        recovers it."""
        sequence = self._scheduler.sequence(out.lease.request_id)
        assert sequence is not None
        self._abandon(out, "no answer")
        self._scheduler.cancel(sequence.id)
        self._host.failed(TokenOutput(sequence.id, [], finish=FinishReason.ABORT, start=sequence.generated))

    def _abandon(self, out: _Outgoing, reason: str) -> None:
        del self._outgoing[out.lease.request_id]
        self._scheduler.end_transfer(out.lease.request_id)
        if (sequence := self._scheduler.sequence(out.lease.request_id)) is not None:
            sequence.moving = False
        self.abandoned += 1
        if out.state not in (_State.OPEN, _State.QUEUED):
            self._tell(out, Release(out.lease, reason))

    def check(self) -> None:
        """Raise AssertionError unless every transferring block and every leaving sequence belongs to a hand-off."""
        for request_id in self._scheduler.transferring():
            assert request_id in self._outgoing, "blocks are being sent and no hand-off sends them"
        leaving = [out for out in self._outgoing.values() if self._scheduler.migrating(out.lease.request_id)]
        assert len(leaving) == self._scheduler.num_migrating, "a sequence waits to leave and nobody takes it"
        assert all(out.deadline is not None for out in leaving), "a sequence waits to leave without a deadline"


def _new_lease(sequence: Sequence, generation: int) -> Lease:
    """Of its next hand-off: no other has the same, wherever it goes, and whether it comes back."""
    attempt, sequence.handoffs = sequence.handoffs, sequence.handoffs + 1
    return Lease(sequence.id, generation, attempt)


def _sampled(sequence: Sequence) -> list[int]:
    """What was generated since its context was given."""
    return sequence.tokens[len(sequence.request.context) :]
