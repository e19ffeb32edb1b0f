"""Requests that change instances between prompt and output (HFX and xLLM 3.2's migration; RTP-LLM's allocate, load,
generate).

Two state machines, `prefiller` and `decoder`, that talk in `core.wire.handoff` over a carrier that may lose, delay,
double and reorder. What keeps them right:

- The decoder sets room aside first, under a lease; whoever hears nothing for the lease's time ends it.
- The decoder's word is final and true for ever: after `Committed` it owns the request, after `Rejected` or `Release`
  it holds nothing under that lease and never will. It remembers which leases are over.
- The prefiller lets go only after that word. Without one it does not go on either: after `Commit` was sent only the
  decoder knows who owns the request, so silence until the deadline ends the request here with an error.
- Before `Commit` was sent the prefiller may change its mind: it then decodes where it is.
"""

from __future__ import annotations

from math import inf

from penstock.core.plan import StepPlan
from penstock.core.request import Request
from penstock.core.wire.engine import Peer
from penstock.core.wire.handoff import (
    Commit,
    Committed,
    Missing,
    Push,
    Rejected,
    Release,
    Renew,
    Reserve,
    Reserved,
)
from penstock.sched.local.handoff.decoder import Decoder
from penstock.sched.local.handoff.ports import Arrival, Carrier, Host
from penstock.sched.local.handoff.prefiller import Prefiller
from penstock.sched.local.scheduler import Scheduler

__all__ = ["Arrival", "Carrier", "Handoffs", "Host"]


class Handoffs:
    """All hand-offs of one engine, in both directions. Not thread-safe: the engine's loop owns it.

    Args:
        lease: seconds of silence after which a hand-off is over.
    """

    def __init__(self, scheduler: Scheduler, carrier: Carrier, host: Host, lease: float) -> None:
        assert lease > 0
        self.prefiller = Prefiller(scheduler, carrier, host, lease)
        self.decoder = Decoder(scheduler, carrier, host, lease)

    @property
    def busy(self) -> bool:
        return bool(self.prefiller or self.decoder)

    # --- what the engine tells

    def begin(self, request: Request, generation: int, frontend: str, peer: Peer) -> None:
        """A request that was added with `departs` shall go on at `peer`."""
        self.prefiller.begin(request, generation, frontend, peer)

    def started(self, now: float, plan: StepPlan) -> None:
        """A step is about to run: room is asked for whose prompt it begins."""
        self.prefiller.started(now, (s.request_id for s in plan.sequences))

    def progress(self, now: float) -> None:
        """A step has run: send what is full, commit what has its first token, and make room that had to wait."""
        self.prefiller.progress(now)
        self.decoder.progress(now)

    def cancel(self, request_id: str, frontend: str, generation: float = inf) -> None:
        """The frontend that gave it does not want it any longer, in attempts up to `generation`; the scheduler is told
        by the caller."""
        self.prefiller.cancel(request_id, frontend, generation)
        self.decoder.cancel(request_id, frontend, generation)

    def forsake(self, frontend: str) -> None:
        """A frontend has gone, and with it everybody who wanted its requests."""
        self.prefiller.forsake(frontend)
        self.decoder.forsake(frontend)

    def supersede(self, request_id: str) -> None:
        """The request begins here anew, so it will not be taken over."""
        self.decoder.supersede(request_id)

    def lost(self, peer: Peer, for_good: bool) -> None:
        """The link to a peer is down; `for_good` when that life of it is over."""
        self.prefiller.lost(peer, for_good)
        self.decoder.lost(peer)

    def tick(self, now: float) -> None:
        """Ask again, renew, and end what is overdue; to be called several times in a lease."""
        self.prefiller.tick(now)
        self.decoder.tick(now)

    def on(self, now: float, arrival: Arrival) -> None:
        """A message from a peer."""
        peer = arrival.peer
        match arrival.message:
            case Push() as push:
                self.decoder.on_push(now, arrival, push)
            case Reserve() as reserve:
                self.decoder.on_reserve(now, peer, reserve)
            case Renew(leases=leases):
                self.decoder.on_renew(now, peer, leases)
            case Commit() as commit:
                self.decoder.on_commit(now, peer, commit)
            case Reserved() | Missing() | Committed() as answer:
                self.prefiller.on_answer(now, peer, answer)
            case Release(lease=lease, reason=reason) | Rejected(lease=lease, reason=reason):
                if not self.decoder.on_release(now, peer, lease) and not self.prefiller.on_refusal(
                    now, peer, lease, reason
                ):
                    self.decoder.remember(now, lease)

    # --- looking

    def promised(self, request_id: str) -> bool:
        """Whether the decoder of a request has room for it."""
        return self.prefiller.promised(request_id)

    def counts(self) -> dict[str, int]:
        return {
            "outgoing": len(self.prefiller),
            "incoming": len(self.decoder),
            "handoffs_completed": self.prefiller.completed,
            "handoffs_abandoned": self.prefiller.abandoned,
        }

    def check(self) -> None:
        """Raise AssertionError unless everything that is held for a hand-off belongs to one."""
        self.prefiller.check()
        self.decoder.check()
