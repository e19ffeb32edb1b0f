"""Fetches: leading blocks of a prompt are taken from another instance that has them, or from what a failed one has left
in the host's KV pool, instead of being computed again (xLLM, sections 3.4 and 3.5).

No request moves. The one that needs blocks waits outside the queue while they come; what has not come in time is
computed. A block is what its key says, and its bytes are those that were pushed: the transport compares generations or
checksums, as of hand-offs.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from math import inf

from penstock.core.plan import BLOCK_TOKENS
from penstock.core.wire.engine import Peer, Source
from penstock.core.wire.handoff import FETCH, Fetch, Lease, Lent, Push, Release
from penstock.kv.connector import Move, Moved
from penstock.sched.local.handoff.ports import HandoffTransport, Host, IncomingMessage, Orphans, same_incarnation
from penstock.sched.local.scheduler import Scheduler
from penstock.sched.local.sequence import Sequence, WantedBlock

# a fetch may take so many times what was predicted, or as long as computing would be no sooner, whichever is less, and
# so many seconds more
PATIENCE, GRACE = 4.0, 0.5
RETRIES = 20  # in a lease: how often blocks that do not come are asked for
SMOOTH = 0.3  # weight of the newest fetch in the mean times
REMEMBERED = 60.0  # seconds for which these count: where fetches are believed to be slow, there are none to measure
LENT = 0.25  # of an instance's blocks that others may be reading at a time


@dataclass(slots=True, eq=False)
class _Fetch:
    """
    Attributes:
        peer: who has the blocks; None for the host's KV pool.
        wanted: of the prefix, each pinned.
        lacking: places in `wanted` of those that are to come.
        lent: how many of the first of `wanted` the peer has; None before it said so.
        answered: when it first said so, or sent something.
        pulling, arrived: places of those that are under way, and that came and could be believed.
    """

    lease: Lease
    peer: Peer | None
    sequence: Sequence
    wanted: list[WantedBlock]
    lacking: list[int]
    began: float
    deadline: float
    retry_at: float
    lent: int | None = None
    answered: float | None = None
    pulling: set[int] = field(default_factory=set)
    arrived: set[int] = field(default_factory=set)

    @property
    def missing(self) -> list[int]:
        """Places of those that are neither there nor under way."""
        return [place for place in self.lacking if place not in self.arrived and place not in self.pulling]

    @property
    def good(self) -> int:
        """How many of the first of `wanted` are there."""
        return next((place for place in self.lacking if place not in self.arrived), len(self.wanted))

    @property
    def complete(self) -> bool:
        """Whether nothing more will come."""
        return self.lent is not None and all(place in self.arrived for place in self.lacking if place < self.lent)


class FetchSide:
    """Everything that this engine fetches.

    Args:
        orphans: blocks that failed instances have left; None where there is no such place.

    Attributes:
        block_ms: of one block from a peer, a recent mean, and wait_ms until the first of them came; None while there is
            none.
        fetched_blocks, remapped_blocks: that came from peers and from the KV pool, since the start.
    """

    def __init__(
        self, scheduler: Scheduler, transport: HandoffTransport, host: Host, lease: float, orphans: Orphans | None
    ) -> None:
        self.block_ms: float | None = None
        self.wait_ms: float | None = None
        self.fetched_blocks = self.remapped_blocks = 0
        self._scheduler = scheduler
        self._transport = transport
        self._host = host
        self._lease = lease
        self._orphans = orphans
        self._now = 0.0
        self._measured = -inf  # when the newest fetch was over
        self._took = self._came = 0.0  # ms and blocks of the latest, after their answers
        self._fetches: dict[str, _Fetch] = {}
        self._pulls: dict[int, tuple[_Fetch, int]] = {}  # handle of the transport -> whose block it is, and its place
        self._remaps: dict[int, tuple[_Fetch, list[int]]] = {}  # the same of `orphans`, with places

    def __len__(self) -> int:
        return len(self._fetches) + len(self._pulls) + len(self._remaps)

    # --- called by the engine

    def begin(self, now: float, request_id: str, generation: int, source: Source) -> None:
        """Fetch what a request that awaits blocks has not got, as far as there is room; else it queues."""
        self._now = now
        assert request_id not in self._fetches
        sequence = self._scheduler.sequence(request_id)
        assert sequence is not None
        wanted = self._scheduler.take_in(request_id, source.blocks)
        if not wanted:
            self._scheduler.fetched(request_id)
            self._host.fetched(request_id, 0, 0.0)
            return
        lacking = [place for place, each in enumerate(wanted) if not self._is_cached(each)]
        due = now + min(self._lease, min(PATIENCE * source.ms, source.worth_ms) / 1e3 + GRACE)
        fetch = _Fetch(
            Lease(request_id, generation, FETCH), source.peer, sequence, wanted, lacking, now, due, now + self._pause
        )
        self._fetches[request_id] = fetch
        if fetch.peer is None:
            self._remap(now, fetch)
        else:
            self._ask(fetch)

    def cancel(self, request_id: str) -> None:
        """The request has ended here, or leaves."""
        fetch = self._fetches.get(request_id)
        if fetch is not None:
            self._end(self._now, fetch, "cancelled")

    def lost(self, peer: Peer) -> None:
        for fetch in [f for f in self._fetches.values() if f.peer is not None and same_incarnation(f.peer, peer)]:
            self._end(self._now, fetch, "link lost", tell=False)

    def tick(self, now: float) -> None:
        self._now = now
        if now > self._measured + REMEMBERED:
            self.block_ms = self.wait_ms = None
            self._took = self._came = 0.0
        for fetch in list(self._fetches.values()):
            if now >= fetch.deadline:
                self._end(now, fetch, "it takes too long")
            elif fetch.peer is not None and now >= fetch.retry_at:
                fetch.retry_at = now + self._pause
                self._ask(fetch)

    def owns(self, handle: int) -> bool:
        """Whether a pull of the transport is for a fetch."""
        return handle in self._pulls

    def collect(self, now: float) -> bool:
        """Take note of blocks that were remapped. Returns whether there were any."""
        over = self._orphans.poll() if self._orphans is not None else []
        for handle, blocks, _ in over:
            fetch, places = self._remaps.pop(handle)
            for index, place in enumerate(places):
                self._pulled(fetch, place, blocks[index : index + 1])
            self.remapped_blocks += len(blocks)
            if self._is_open(fetch):
                self._end(now, fetch, "")
        return bool(over)

    def pulled(self, now: float, moved: Moved) -> None:
        """A pull of the transport is over."""
        fetch, place = self._pulls.pop(moved.handle)
        self._pulled(fetch, place, moved.blocks)
        self.fetched_blocks += len(moved.blocks)
        if self._is_open(fetch) and fetch.complete:
            self._end(now, fetch, "")

    # --- what the holder tells

    def on_lent(self, now: float, peer: Peer, message: Lent) -> None:
        fetch = self._of(message.lease, peer)
        if fetch is not None:
            self._answered(now, fetch)
            fetch.lent = min(message.have, len(fetch.wanted))
            if fetch.complete:
                self._end(now, fetch, "")

    def on_push(self, now: float, message: IncomingMessage, push: Push) -> None:
        fetch = self._of(push.lease, message.peer)
        if fetch is None:
            self._transport.send(message.peer, Release(push.lease, "not known, or over"))
            return
        self._answered(now, fetch)
        fetch.retry_at = now + self._pause  # the others are on their way
        place = push.index
        if place not in fetch.lacking or place in fetch.pulling or place in fetch.arrived:
            return
        if push.key != fetch.wanted[place].key:
            return
        if self._transport.shares and self._scheduler.pool.owns(push.block):
            self._regain(fetch, push)
            if fetch.complete:
                self._end(now, fetch, "")
            return
        into = fetch.wanted[place].block
        assert into is not None
        fetch.pulling.add(place)
        self._pulls[self._transport.pull(message, into)] = fetch, place

    def on_release(self, now: float, peer: Peer, lease: Lease) -> bool:
        """The holder has ended the lease."""
        fetch = self._of(lease, peer)
        if fetch is not None:
            self._end(now, fetch, "released", tell=False)
        return fetch is not None

    # --- inside

    @property
    def _pause(self) -> float:
        return self._lease / RETRIES

    def _of(self, lease: Lease, peer: Peer) -> _Fetch | None:
        fetch = self._fetches.get(lease.request_id)
        if fetch is None or fetch.lease != lease or fetch.peer is None or not same_incarnation(fetch.peer, peer):
            return None
        return fetch

    def _is_open(self, fetch: _Fetch) -> bool:
        return self._fetches.get(fetch.lease.request_id) is fetch

    @staticmethod
    def _answered(now: float, fetch: _Fetch) -> None:
        fetch.answered = now if fetch.answered is None else fetch.answered

    def _measure(self, now: float, fetch: _Fetch, came: int) -> None:
        """Of one that is over. Without an answer it has taken as long as that at least."""
        self._measured = now
        answered = now if fetch.answered is None else fetch.answered
        self.wait_ms = _mean(self.wait_ms, (answered - fetch.began) * 1e3)
        if fetch.answered is not None and (came or fetch.lent):
            self._took = (1 - SMOOTH) * self._took + (now - answered) * 1e3
            self._came = (1 - SMOOTH) * self._came + max(1, came)
            self.block_ms = self._took / self._came  # long fetches say more of it

    def _is_cached(self, wanted: WantedBlock) -> bool:
        return self._scheduler.pool.match([wanted.key]) == [wanted.block]

    def _ask(self, fetch: _Fetch) -> None:
        assert fetch.peer is not None
        if missing := fetch.missing:
            self._transport.send(fetch.peer, Fetch(fetch.lease, [each.key for each in fetch.wanted], missing))

    def _remap(self, now: float, fetch: _Fetch) -> None:
        """Take what lacks from the KV pool, up to the first block that is not there."""
        moves, places = [], []
        wanted = [fetch.wanted[place] for place in fetch.lacking]
        found = self._orphans.find([each.key for each in wanted]) if self._orphans is not None else []
        for place, each, where in zip(fetch.lacking, wanted, found, strict=False):
            if where is None:
                break
            assert each.block is not None
            moves.append(Move(each.block, where[0], each.key, where[1]))
            places.append(place)
        if not moves or self._orphans is None:
            self._end(now, fetch, "")
            return
        fetch.pulling.update(places)
        self._remaps[self._orphans.pull(moves)] = fetch, places

    def _regain(self, fetch: _Fetch, push: Push) -> None:
        """A shared block was handed over before, as part of another request, and is ours."""
        pool, wanted = self._scheduler.pool, fetch.wanted[push.index]
        if self._transport.stamp(push.block)[0] != push.generation or not pool.agrees(push.block, push.key):
            return
        if pool.regain(push.block):
            assert wanted.block is not None
            self._scheduler.kv.unpin([wanted.block])
            self._scheduler.kv.pinned[push.block] += 1
            wanted.block = push.block
            fetch.arrived.add(push.index)

    def _pulled(self, fetch: _Fetch, place: int, blocks: Items[int]) -> None:
        """Nothing writes to the block any longer; without `blocks` nothing came, or nothing that could be believed."""
        wanted, kv = fetch.wanted[place], self._scheduler.kv
        assert wanted.block is not None
        fetch.pulling.remove(place)
        if blocks and blocks[0] != wanted.block:
            kv.swap_pinned(wanted.block, blocks[0])
            wanted.block = blocks[0]
        if not self._is_open(fetch):
            kv.unpin([wanted.block])
        elif blocks:
            fetch.arrived.add(place)

    def _end(self, now: float, fetch: _Fetch, reason: str, tell: bool = True) -> None:
        """What has come can be found, and the request queues."""
        del self._fetches[fetch.lease.request_id]
        groups, before = fetch.sequence.groups, fetch.lacking[0]
        busy = {block for place in fetch.pulling if (block := fetch.wanted[place].block) is not None}
        good = fetch.good
        self._scheduler.kv.take_over(fetch.wanted, good, busy)
        came = len([place for place in fetch.arrived if place < good])
        if fetch.peer is not None and (now >= fetch.deadline or (fetch.answered is not None and not busy)):
            self._measure(now, fetch, came)
        if fetch.peer is not None and tell:
            self._transport.send(fetch.peer, Release(fetch.lease, reason))
        if self._scheduler.awaits(fetch.sequence):
            tokens = max(0, good - before) // groups * BLOCK_TOKENS
            fetch.sequence.fetched += tokens
            self._scheduler.fetched(fetch.lease.request_id)
            self._host.fetched(fetch.lease.request_id, tokens, (now - fetch.began) * 1e3)

    def check(self) -> None:
        """Raise AssertionError unless what is fetched is for requests that wait for it."""
        for request_id, fetch in self._fetches.items():
            assert fetch.lease.request_id == request_id
            assert self._scheduler.awaits(fetch.sequence), "blocks are fetched for a request that does not wait"
            assert fetch.lacking, "nothing is to come"
            assert not (fetch.pulling & fetch.arrived)
        for fetch, place in self._pulls.values():
            assert place in fetch.pulling, "a block comes that nobody knows of"

    def pinned(self) -> list[int]:
        """Blocks that are held for this, once for each fetch."""
        opened = [each.block for fetch in self._fetches.values() for each in fetch.wanted]
        remaps = ((fetch, place) for fetch, places in self._remaps.values() for place in places)
        pulls = (*self._pulls.values(), *remaps)
        closed = [fetch.wanted[place].block for fetch, place in pulls if not self._is_open(fetch)]
        return [block for block in (*opened, *closed) if block is not None]


def _mean(before: float | None, newest: float) -> float:
    return newest if before is None else before + SMOOTH * (newest - before)


@dataclass(slots=True, eq=False)
class _Loan:
    """Blocks that a peer is reading, each pinned."""

    peer: Peer
    blocks: list[int]
    deadline: float


class LendSide:
    """Everything that others fetch from this engine.

    Attributes:
        lent_blocks: that were pushed, since the start.
    """

    def __init__(self, scheduler: Scheduler, transport: HandoffTransport, lease: float) -> None:
        self.lent_blocks = 0
        self._scheduler = scheduler
        self._transport = transport
        self._lease = lease
        self._loans: dict[tuple[Lease, str, int], _Loan] = {}

    def __len__(self) -> int:
        return len(self._loans)

    def on_fetch(self, now: float, peer: Peer, message: Fetch) -> None:
        name = message.lease, peer.name, peer.incarnation
        loan = self._loans.get(name)
        if loan is None:
            room = int(LENT * self._scheduler.pool.num_blocks) - sum(len(loan.blocks) for loan in self._loans.values())
            loan = self._loans[name] = _Loan(peer, self._scheduler.pool.match(message.keys)[: max(0, room)], inf)
            self._scheduler.kv.pin(loan.blocks)
        loan.deadline = now + self._lease
        self._transport.send(peer, Lent(message.lease, len(loan.blocks)))
        for index in message.wants:
            if 0 <= index < len(loan.blocks):
                self._push(peer, message.lease, index, message.keys[index], loan.blocks[index])
        if not loan.blocks:
            del self._loans[name]

    def _push(self, peer: Peer, lease: Lease, index: int, key: bytes, block: int) -> None:
        if self._transport.shares:
            self._scheduler.pool.offer(block)
        generation, checksum = self._transport.stamp(block)
        self._transport.send(peer, Push(lease, index, key, block, generation, checksum))
        self.lent_blocks += 1

    def on_release(self, peer: Peer, lease: Lease) -> None:
        if loan := self._loans.pop((lease, peer.name, peer.incarnation), None):
            self._scheduler.kv.unpin(loan.blocks)

    def lost(self, peer: Peer) -> None:
        for lease, _, _ in [n for n, loan in self._loans.items() if same_incarnation(loan.peer, peer)]:
            self.on_release(peer, lease)

    def tick(self, now: float) -> None:
        for (lease, _, _), loan in [(n, loan) for n, loan in self._loans.items() if now >= loan.deadline]:
            self.on_release(loan.peer, lease)

    def pinned(self) -> list[int]:
        """Blocks that are held for this, once for each loan."""
        return [block for loan in self._loans.values() for block in loan.blocks]
