"""The decode side of hand-offs: takes requests over."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from math import inf

from penstock.core.errors import UserError
from penstock.core.wire.engine import Peer
from penstock.core.wire.handoff import (
    Arrived,
    Commit,
    Committed,
    Lease,
    Missing,
    Push,
    Rejected,
    Release,
    Reserve,
    Reserved,
    Sent,
    Waiting,
)
from penstock.kv.connector import Moved
from penstock.kv.groups import key_of
from penstock.sched.local.handoff.migration_queue import MigrationQueue
from penstock.sched.local.handoff.ports import HandoffTransport, Host, IncomingMessage, same_incarnation
from penstock.sched.local.reservations import Reservation
from penstock.sched.local.scheduler import Scheduler
from penstock.sched.local.sequence import blocks_for

TWICE = "this request is here already"
REMEMBER = 8  # in leases: how long the end of one is remembered


@dataclass(slots=True, eq=False)
class _Incoming:
    """
    Attributes:
        pulling: indices of blocks that are under way, and their keys.
        arrived: of those that came and could be believed.
        quiet: no block has arrived since the commit.
        asked: whether the prefill side waits to hear what has arrived.
    """

    lease: Lease
    frontend: str
    sender: Peer
    reservation: Reservation
    deadline: float
    pulling: dict[int, bytes] = field(default_factory=dict)
    arrived: dict[int, bytes] = field(default_factory=dict)
    commit: Commit | None = None
    quiet: bool = False
    asked: bool = False


class DecodeSide:
    """All requests being handed over to this engine, and ended leases.

    Attributes:
        queue: those that wait for room.
        pulled_blocks, failed_pulls: blocks that arrived from other engines, and that did not, since the start.
    """

    def __init__(self, scheduler: Scheduler, transport: HandoffTransport, host: Host, lease: float) -> None:
        self.pulled_blocks = self.failed_pulls = 0
        self._scheduler = scheduler
        self._transport = transport
        self._host = host
        self._lease = lease
        self._now = 0.0
        self._incoming: dict[str, _Incoming] = {}
        self._pulls: dict[int, tuple[_Incoming, int]] = {}  # handle -> whose block it is, and its index
        self.queue = MigrationQueue()
        self._over: OrderedDict[Lease, tuple[float, bool]] = OrderedDict()  # -> (forgotten at, committed), by time

    def __len__(self) -> int:
        return len(self._incoming) + len(self.queue)

    @property
    def pulls(self) -> int:
        """Blocks that are under way."""
        return len(self._pulls)

    # --- called by the engine

    def pulled(self, now: float, moved: Moved) -> None:
        """A pull of the transport is over."""
        self._now = now
        self._pulled(*self._pulls.pop(moved.handle), moved.blocks)

    def progress(self, now: float) -> None:
        """A step has run."""
        self._grant(now)

    def cancel(self, request_id: str, frontend: str, generation: float = inf) -> None:
        incoming = self._incoming.get(request_id)
        if incoming is not None and incoming.frontend == frontend and incoming.lease.generation <= generation:
            self._end(incoming, "cancelled")
        for waiting in self.queue.drop(
            lambda w: w.id == request_id and w.frontend == frontend and w.lease.generation <= generation
        ):
            self._refuse(waiting.sender, waiting.lease, "cancelled")

    def drop_client(self, frontend: str) -> None:
        for request_id in [*self._incoming, *self.queue.ids()]:
            self.cancel(request_id, frontend)

    def supersede(self, request_id: str) -> None:
        """The request begins here anew."""
        if incoming := self._incoming.get(request_id):
            self._end(incoming, "another attempt began")
        for waiting in self.queue.drop(lambda w: w.id == request_id):
            self._refuse(waiting.sender, waiting.lease, "another attempt began")

    def lost(self, peer: Peer) -> None:
        for waiting in self.queue.drop(lambda w: same_incarnation(w.sender, peer)):
            self._close(waiting.lease, committed=False)
        for incoming in [i for i in self._incoming.values() if same_incarnation(i.sender, peer)]:
            self._end(incoming, "link lost")

    def tick(self, now: float) -> None:
        self._now = now
        for incoming in [i for i in self._incoming.values() if now >= i.deadline]:
            self._end(incoming, "nothing was heard for too long")
        for waiting in self.queue.drop(lambda w: now >= w.deadline):
            self._refuse(waiting.sender, waiting.lease, "nothing was heard for too long")
        self._grant(now)
        while self._over and now >= next(iter(self._over.values()))[0]:
            self._over.popitem(last=False)

    # --- what the prefiller tells

    def on_reserve(self, now: float, peer: Peer, message: Reserve) -> None:
        lease = message.lease
        if lease in self._over:
            self._heard(now, lease, peer)
            return
        self._now = now
        known = self._incoming.get(lease.request_id)
        if known is not None and known.lease == lease:
            if not same_incarnation(known.sender, peer):
                self._transport.send(peer, Rejected(lease, TWICE))
                return
            known.deadline = now + self._lease
            self._transport.send(peer, Reserved(lease, known.reservation.have))
            return
        if known is not None and known.lease.order < lease.order:
            self._end(known, "another attempt began")
        if not self.queue.renew(lease, now + self._lease):
            for earlier in self.queue.drop(lambda w: w.id == lease.request_id and w.lease.order < lease.order):
                self._refuse(earlier.sender, earlier.lease, "another attempt began")
            if reason := self._refuses(message):
                self._refuse(peer, lease, reason)
                return
            self.queue.add(now, peer, message, now + self._lease)
            self._grant(now)
        if lease in self.queue:
            self._transport.send(peer, Waiting(lease))

    def _grant(self, now: float) -> None:
        """Reserve blocks for those who wait, as long as there is room for the first."""
        self._now = now
        self.queue.look(now)
        while (first := self.queue.first) is not None:
            try:
                reservation = self._scheduler.reserve(first.message.request, first.message.tokens)
            except UserError as error:
                self.queue.refuse()
                self._refuse(first.sender, first.lease, str(error))
                continue
            if reservation is None:
                return
            self.queue.take(now)
            lease, until = first.lease, now + self._lease
            self._incoming[first.id] = _Incoming(lease, first.frontend, first.sender, reservation, until)
            self._transport.send(first.sender, Reserved(lease, reservation.have))

    def _refuse(self, peer: Peer, lease: Lease, reason: str) -> None:
        self._close(lease, committed=False)
        self._transport.send(peer, Rejected(lease, reason))

    def on_push(self, now: float, message: IncomingMessage, push: Push) -> None:
        incoming = self._heard(now, push.lease, message.peer)
        if incoming is None:
            return
        r = incoming.reservation
        index = push.index
        if index in incoming.arrived or index in incoming.pulling or not self._is_of_it(incoming, index, push.key):
            return
        groups = len(r.dropped)
        if not r.needs(index) or index >= groups * blocks_for(self._scheduler.limits.max_model_len):
            return
        if not self._scheduler.reservations.extend(r, index + 1):
            self._end(incoming, "no room for what came since")
            return
        if self._transport.shares and self._scheduler.pool.owns(push.block):
            self._regain(incoming, push)
            return
        incoming.pulling[index] = push.key
        self._pulls[self._transport.pull(message, r.blocks[index])] = incoming, index

    def on_sent(self, now: float, peer: Peer, sent: Sent) -> None:
        if incoming := self._heard(now, sent.lease, peer):
            incoming.asked = True
            self._tell_arrived(incoming)

    def _tell_arrived(self, incoming: _Incoming) -> None:
        """Once nothing is under way, if that was asked."""
        if not incoming.asked or incoming.pulling:
            return
        incoming.asked, r = False, incoming.reservation
        have = r.have
        while have in incoming.arrived or (have < len(r.blocks) and not r.needs(have)):
            have += 1
        self._transport.send(incoming.sender, Arrived(incoming.lease, have))

    def on_renew(self, now: float, peer: Peer, leases: list[Lease]) -> None:
        for lease in leases:
            if incoming := self._heard(now, lease, peer):
                self._transport.send(peer, Reserved(lease, incoming.reservation.have))

    def on_commit(self, now: float, peer: Peer, commit: Commit) -> None:
        incoming = self._heard(now, commit.lease, peer)
        if incoming is None:
            return
        again, incoming.commit = incoming.commit is not None, commit
        if not again and not self._complete(incoming, commit):
            self._end(incoming, "there is no room for what came since, or it is not of what was reserved")
            return
        if self._try_finish(incoming):
            return
        # blocks may arrive on other sockets after this message: ask for them after a pause
        if again and incoming.quiet and (missing := self._missing(incoming)):
            self._transport.send(peer, Missing(incoming.lease, missing))
        incoming.quiet = True

    def on_release(self, now: float, peer: Peer, lease: Lease) -> bool:
        """The prefill side has ended the lease."""
        self._now = now
        if self.queue.drop(lambda w: w.lease == lease and same_incarnation(w.sender, peer)):
            self._close(lease, committed=False)
            return True
        incoming = self._incoming.get(lease.request_id)
        if incoming is None or incoming.lease != lease or not same_incarnation(incoming.sender, peer):
            return False
        self._end(incoming, "released", tell=False)
        return True

    def remember(self, now: float, lease: Lease) -> None:
        """A release has overtaken what it ends."""
        self._now = now
        if lease not in self._over:
            self._close(lease, committed=False)

    # --- inside

    def _heard(self, now: float, lease: Lease, peer: Peer) -> _Incoming | None:
        """The hand-off of a lease, which is renewed; if it has ended, the answer is repeated."""
        self._now = now
        incoming = self._incoming.get(lease.request_id)
        if incoming is not None and incoming.lease == lease:
            if not same_incarnation(incoming.sender, peer):
                return None
            incoming.deadline = now + self._lease
            return incoming
        _, committed = self._over.get(lease, (0.0, False))
        if committed:
            self._transport.send(peer, Committed(lease))
        else:
            self._close(lease, committed=False)
            self._transport.send(peer, Release(lease, "not known, or over"))
        return None

    def _refuses(self, message: Reserve) -> str:
        """Why a request can never be taken over; "" when it can."""
        request_id = message.lease.request_id
        if request_id in self._incoming or request_id in self.queue.ids() or self._scheduler.holds(request_id):
            return TWICE
        return self._host.refuses(message.request, message.frontend)

    def _regain(self, incoming: _Incoming, push: Push) -> None:
        """A shared block was handed over before, as part of another request, and is ours."""
        pool = self._scheduler.pool
        if self._transport.stamp(push.block)[0] != push.generation or not pool.agrees(push.block, push.key):
            return
        if pool.regain(push.block):
            pool.release([incoming.reservation.blocks[push.index]])
            self._arrived(incoming, push.index, push.key, push.block)

    def _pulled(self, incoming: _Incoming, index: int, blocks: tuple[int, ...]) -> None:
        """A pull is over; without `blocks` nothing came, or nothing that could be believed."""
        key = incoming.pulling.pop(index)
        into = incoming.reservation.blocks[index]
        self.failed_pulls += not blocks
        if blocks and blocks[0] != into:
            self._scheduler.pool.replace(into, blocks[0])
        if self._incoming.get(incoming.lease.request_id) is not incoming:
            self._scheduler.reservations.end_quarantine(into, *blocks)
            return
        if blocks:
            self._arrived(incoming, index, key, *blocks)
        self._tell_arrived(incoming)

    def _arrived(self, incoming: _Incoming, index: int, key: bytes, block: int) -> None:
        """A block of the reservation has its contents, and is held once for it."""
        incoming.reservation.blocks[index] = block
        if not self._is_of_it(incoming, index, key):  # which was not known when it was asked for
            return
        incoming.arrived[index] = key
        incoming.quiet = False
        self.pulled_blocks += 1
        if incoming.commit is not None:
            self._try_finish(incoming)

    @staticmethod
    def _is_of_it(incoming: _Incoming, index: int, key: bytes) -> bool:
        """Whether a block is of this sequence's tokens, as far as they are known. What is not full has no key."""
        r = incoming.reservation
        block, group = divmod(index, len(r.dropped))
        return key == key_of(r.keys[block], group) if block < len(r.keys) else incoming.commit is None or not key

    def _complete(self, incoming: _Incoming, commit: Commit) -> bool:
        """All tokens are known. Blocks that turn out to be of others have not arrived."""
        r = incoming.reservation
        if not self._scheduler.reservations.complete(r, commit.tokens) or commit.blocks != len(r.blocks):
            return False
        arrived = incoming.arrived.items()
        incoming.arrived = {i: key for i, key in arrived if self._is_of_it(incoming, i, key)}
        return True

    @staticmethod
    def _missing(incoming: _Incoming) -> list[int]:
        r = incoming.reservation
        return [i for i in r.coming if i not in incoming.arrived and i not in incoming.pulling]

    def _try_finish(self, incoming: _Incoming) -> bool:
        """Take the request over once everything is here."""
        commit, r, lease = incoming.commit, incoming.reservation, incoming.lease
        assert commit is not None
        if len(incoming.arrived) < r.num_coming:  # counted: this is asked after every block
            return False
        del self._incoming[lease.request_id]
        self._close(lease, committed=True)
        spent = commit.queue, commit.prefill, commit.wait
        sequence = self._scheduler.resume(r, commit.cached_tokens, self._now, spent, commit.decode)
        sequence.handoffs, sequence.images = lease.attempt + 1, commit.images
        self._host.joined(r.request, incoming.frontend, lease.generation)
        self._transport.send(incoming.sender, Committed(lease))
        return True

    def _end(self, incoming: _Incoming, reason: str, tell: bool = True) -> None:
        """Free the reserved blocks; the lease has ended."""
        del self._incoming[incoming.lease.request_id]
        r = incoming.reservation
        self._scheduler.reservations.cancel(r, quarantined=[r.blocks[index] for index in incoming.pulling])
        self._close(incoming.lease, committed=False)
        if tell:
            self._transport.send(incoming.sender, Release(incoming.lease, reason))

    def _close(self, lease: Lease, *, committed: bool) -> None:
        self._over[lease] = (self._now + REMEMBER * self._lease, committed)
        self._over.move_to_end(lease)

    def check(self) -> None:
        """Raise AssertionError unless all room that is set aside is for somebody."""
        reserved = sum(len(i.reservation.held) for i in self._incoming.values())
        over = sum(self._incoming.get(i.lease.request_id) is not i for i, _ in self._pulls.values())
        assert reserved + over == self._scheduler.num_reserved_blocks, "room is set aside for nobody"
        for incoming in self._incoming.values():
            under_way = {index for i, index in self._pulls.values() if i is incoming}
            assert incoming.pulling.keys() == under_way, "a block comes that nobody knows of, or the reverse"
            assert incoming.reservation.num_coming == len(incoming.reservation.coming)
