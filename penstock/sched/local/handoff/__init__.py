"""Hand-offs: requests that change instances after their prompt or while they decode (HFX and xLLM 3.2's migration;
RTP-LLM's allocate, load, generate; Llumnix's live migration).

A request that decodes already moves in a few rounds: its full blocks are pushed while it goes on; when nearly all of
them have arrived it pauses after its next token, and the rest follows with the commit. Of one that is still to be
prefilled, the prefill is the only round. So there is one state machine for both.

Two state machines, `prefill_side` and `decode_side`, that exchange messages of `core.wire.handoff` over a transport
that may lose, delay, duplicate and reorder them. Invariants:

- The decode side first reserves blocks, under a lease; a side that receives nothing for the lease's time ends it.
- The decode side's answer is final: after `Committed` it owns the request, after `Rejected` or `Release` it holds
nothing under that lease and never will. It remembers ended leases. - The prefill side frees its blocks only after that
answer. Without one it does not continue either: after `Commit` only the decode side knows the owner, so silence until
the deadline ends the request here with an error.
- Before `Commit` the prefill side may cancel the hand-off and decode itself.
- A block that is being pulled is nobody else's until the transport says that this is over, though its lease has ended.
"""

from __future__ import annotations

from collections import Counter
from math import inf

from penstock.core.plan import StepPlan
from penstock.core.request import Request
from penstock.core.wire.engine import Peer, Source
from penstock.core.wire.handoff import (
    Arrived,
    AskEmbedding,
    Commit,
    Committed,
    EmbeddingPart,
    Fetch,
    Lent,
    Missing,
    NoEmbedding,
    Push,
    Rejected,
    Release,
    Renew,
    Reserve,
    Reserved,
    Sent,
    Waiting,
)
from penstock.kv.embeddings import EmbeddingCache
from penstock.sched.local.handoff.decode_side import DecodeSide
from penstock.sched.local.handoff.embeddings import GiveSide, TakeSide
from penstock.sched.local.handoff.fetches import FetchSide, LendSide
from penstock.sched.local.handoff.ports import HandoffTransport, Host, IncomingMessage, Orphans
from penstock.sched.local.handoff.prefill_side import PrefillSide
from penstock.sched.local.scheduler import Scheduler

__all__ = ["HandoffTransport", "Handoffs", "Host", "IncomingMessage", "Orphans"]


class Handoffs:
    """All hand-offs of one engine, in both directions, and what it fetches and lends. Not thread-safe: the engine's
    loop owns it.

    Args:
        lease: seconds of silence after which a hand-off is over.
        orphans: blocks that failed instances have left; None where there is no such place.
        embeddings: what this engine has made of images, for others; None keeps nothing.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        transport: HandoffTransport,
        host: Host,
        lease: float,
        orphans: Orphans | None = None,
        embeddings: EmbeddingCache | None = None,
    ) -> None:
        assert lease > 0
        self._scheduler, self._transport = scheduler, transport
        self.prefill_side = PrefillSide(scheduler, transport, host, lease)
        self.decode_side = DecodeSide(scheduler, transport, host, lease)
        self.fetch_side = FetchSide(scheduler, transport, host, lease, orphans)
        self.lend_side = LendSide(scheduler, transport, lease)
        self.give_side = GiveSide(EmbeddingCache(0) if embeddings is None else embeddings, transport)
        self.take_side = TakeSide(transport, host.embedded)

    @property
    def busy(self) -> bool:
        moves = self.prefill_side or self.decode_side or self.decode_side.pulls
        return bool(moves or self.fetch_side or self.lend_side or self.give_side or self.take_side)

    # --- called by the engine

    def begin(self, now: float, request: Request, generation: int, frontend: str, peer: Peer) -> None:
        """Hand over a request to `peer`: one that was added with `migrates`, is held, or runs and is not leaving."""
        self.prefill_side.begin(now, request, generation, frontend, peer)

    def hold(self, request: Request, generation: int, frontend: str) -> None:
        """A request, added with `migrates`, that is to be handed over after its prompt; to whom is not known."""
        self.prefill_side.hold(request, generation, frontend)

    def go_on(self, request_id: str) -> None:
        """It goes on here, unless it may be elsewhere by now."""
        self.prefill_side.go_on(request_id)

    def fetch(self, now: float, request_id: str, generation: int, source: Source) -> None:
        """Bring blocks of a request, which was added with `awaits`; then it queues."""
        self.fetch_side.begin(now, request_id, generation, source)

    def started(self, now: float, plan: StepPlan) -> None:
        """A step is about to run: have blocks reserved for those in it that are to leave."""
        self.prefill_side.started(now, (s.request_id for s in plan.sequences))

    def progress(self, now: float) -> None:
        """A step has run: push full blocks, commit what has paused, and reserve blocks for those who wait."""
        self.prefill_side.progress(now)
        self.decode_side.progress(now)

    def cancel(self, request_id: str, frontend: str, generation: float = inf) -> None:
        """The frontend has cancelled attempts up to `generation`; the caller informs the scheduler."""
        self.prefill_side.cancel(request_id, frontend, generation)
        self.decode_side.cancel(request_id, frontend, generation)

    def drop_client(self, frontend: str) -> None:
        """A frontend was lost: drop its requests; fetches end with them."""
        self.prefill_side.drop_client(frontend)
        self.decode_side.drop_client(frontend)

    def supersede(self, request_id: str) -> None:
        """The request starts here again, so it will not be taken over."""
        self.decode_side.supersede(request_id)

    def lost(self, peer: Peer, for_good: bool) -> None:
        """The link to a peer is down; `for_good` when that incarnation has ended."""
        self.prefill_side.lost(peer, for_good)
        self.decode_side.lost(peer)
        self.fetch_side.lost(peer)
        self.lend_side.lost(peer)
        self.give_side.lost(peer)
        self.take_side.lost(peer)

    def collect(self, now: float) -> bool:
        """Take note of blocks that have come, and of those that never will; `on` does so too. Returns whether there
        were any."""
        over = self._transport.poll()
        for moved in over:
            (self.fetch_side if self.fetch_side.owns(moved.handle) else self.decode_side).pulled(now, moved)
        return self.fetch_side.collect(now) or bool(over)

    def tick(self, now: float) -> None:
        """Repeat messages, renew leases, and end overdue ones; call it several times in a lease."""
        self.prefill_side.tick(now)
        self.decode_side.tick(now)
        self.fetch_side.tick(now)
        self.lend_side.tick(now)
        self.give_side.tick(now)
        self.take_side.tick(now)

    def on(self, now: float, incoming: IncomingMessage) -> None:
        """A message from a peer."""
        peer = incoming.peer
        match incoming.message:
            case Fetch() as fetch:
                self.lend_side.on_fetch(now, peer, fetch)
            case Lent() as lent:
                self.fetch_side.on_lent(now, peer, lent)
            case AskEmbedding() as ask:
                self.give_side.on_ask(now, peer, ask)
            case EmbeddingPart() as part:
                self.take_side.on_part(now, peer, part)
            case NoEmbedding() as none:
                self.take_side.on_none(peer, none)
            case Push(lease=lease) as push if lease.fetches:
                self.fetch_side.on_push(now, incoming, push)
            case Release(lease=lease) if lease.fetches:
                if not self.fetch_side.on_release(now, peer, lease):
                    self.lend_side.on_release(peer, lease)
            case Push() as push:
                self.decode_side.on_push(now, incoming, push)
            case Reserve() as reserve:
                self.decode_side.on_reserve(now, peer, reserve)
            case Renew(leases=leases):
                self.decode_side.on_renew(now, peer, leases)
            case Sent() as sent:
                self.decode_side.on_sent(now, peer, sent)
            case Commit() as commit:
                self.decode_side.on_commit(now, peer, commit)
            case Waiting() | Reserved() | Arrived() | Missing() | Committed() as answer:
                self.prefill_side.on_answer(now, peer, answer)
            case Release(lease=lease, reason=reason) | Rejected(lease=lease, reason=reason):
                if not self.decode_side.on_release(now, peer, lease) and not self.prefill_side.on_refusal(
                    now, peer, lease, reason
                ):
                    self.decode_side.remember(now, lease)
        self.collect(now)

    # --- looking

    def leaving(self, request_id: str) -> bool:
        """Whether a request is being handed over."""
        return self.prefill_side.leaving(request_id)

    def promised(self, request_id: str) -> bool:
        """Whether the decode side has reserved blocks for a request."""
        return self.prefill_side.promised(request_id)

    def counts(self) -> dict[str, int]:
        return {
            "outgoing": len(self.prefill_side),
            "incoming": len(self.decode_side),
            "pulls": self.decode_side.pulls,
            "pulled_blocks": self.decode_side.pulled_blocks,
            "migration_queue": len(self.decode_side.queue),
            "fetches": len(self.fetch_side),
            "fetched_blocks": self.fetch_side.fetched_blocks,
            "remapped_blocks": self.fetch_side.remapped_blocks,
            "loans": len(self.lend_side),
            "given_embeddings": self.give_side.given,
            "taken_embeddings": self.take_side.taken,
            "failed_embeddings": self.take_side.failed,
            "handoffs_completed": self.prefill_side.completed,
            "handoffs_abandoned": self.prefill_side.abandoned,
        }

    def check(self) -> None:
        """Raise AssertionError unless everything that is held for a hand-off belongs to one."""
        self.prefill_side.check()
        self.decode_side.check()
        self.fetch_side.check()
        pinned = Counter(self.fetch_side.pinned()) + Counter(self.lend_side.pinned())
        assert pinned == self._scheduler.kv.pinned, "a block is pinned that nobody reads or fills, or the reverse"
