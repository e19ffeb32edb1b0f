"""Which instances prefill and which decode, changed without a pause (xLLM, section 3.2).

Being meant for another role changes nothing about what runs on an instance: one of "decode" that still prefills
prompts, or one of "prefill" on which sequences still decode, is turning (the paper's pools P->D and D->P). So a move
costs nothing by itself. `ElasticRoles.decide` makes them by the clock, beside any dispatch policy; one that shares its
state, as `Xllm` does, makes one in the very decision that needs it.

A decoder becomes a prefiller when no prefiller meets the strictest TTFT target, those first that still prefill. A
prefiller becomes a decoder when the decoders' token intervals pass their targets on average, when none of them has
room, or when it has had nothing to do, those first that still decode. What is measured counts beside what is
predicted: the worse of the two. Two rules prevent oscillation: no instance is taken from a role that would then fall
short, and a moved instance keeps its role for a while unless a target is being missed.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import nsmallest
from math import inf
from typing import Literal

from penstock.core.plan import BLOCK_TOKENS
from penstock.core.wire.engine import Role
from penstock.sched.cluster.base import ClusterView, InstanceLoad, Move

Pool = Literal["P", "D", "P->D", "D->P"]

DWELL = 2.0  # seconds that a moved instance stays where it is, unless a target is being missed
COMPARED = 32  # decoders of which one at least has to be at ease
QUEUED = 256  # demands of the queue whose prompts are counted
FULL = 0.9  # share of an instance's blocks or sequences above which it is short of them
BUSY = 0.5  # share of that, or of the TPOT target, above which idle prefillers help decoders
MARGIN = 0.9  # share of a TPOT target that a prediction may use up


def online(instance: InstanceLoad) -> int:
    """Online sequences that run or will decode there."""
    return max(0, instance.requests - instance.offline_requests)


def turning(instance: InstanceLoad) -> bool:
    """Whether it still has work of its former role."""
    if instance.role == "prefill":
        return instance.decoding > instance.offline_requests
    return instance.role == "decode" and instance.pending_tokens > 0


def pool(instance: InstanceLoad) -> Pool | None:
    """Of the paper's; None for an instance of "any", which is in none."""
    match instance.role:
        case "prefill":
            return "D->P" if turning(instance) else "P"
        case "decode":
            return "P->D" if turning(instance) else "D"
    return None


def interval(instance: InstanceLoad) -> float:
    """Seconds between two tokens of what decodes there: measured or predicted, whichever is longer."""
    measured = instance.interval if instance.interval is not None and instance.decoding else 0.0
    return max(measured, instance.decode_seconds)


def misses(instance: InstanceLoad, ttft: float) -> bool:
    """Whether first tokens have come later than a target there lately, and more are to come."""
    return instance.ttft_measured is not None and instance.pending_tokens > 0 and instance.ttft_measured > ttft


def step_seconds(instance: InstanceLoad, *, sequences: int = 0, kv_tokens: int = 0, prompt: int = 0) -> float:
    """Predicted time of its steps with so much more: all its sequences decode beside the prompts that it has.

    Args:
        prompt: tokens to prefill, more than those it already has to.
    """
    chunk = min(instance.token_budget, instance.pending_tokens + prompt)
    return (
        instance.times.step_ms(
            [(chunk, 0)] if chunk else (), instance.requests + sequences, instance.held_tokens + kv_tokens
        )
        / 1e3
    )


def fullness(instance: InstanceLoad, *, sequences: int = 0, tokens: int = 0) -> float:
    """Share of its blocks or of its sequences that online work uses, with so many more; the larger one. Offline work
    makes room."""
    held = instance.held_tokens - instance.offline_tokens + tokens
    capacity = instance.num_blocks * BLOCK_TOKENS
    return max((online(instance) + sequences) / instance.max_sequences, held / capacity if capacity else inf)


def _weight(instance: InstanceLoad) -> tuple[int, str]:
    return instance.held_tokens, instance.name


def full(instance: InstanceLoad) -> bool:
    return fullness(instance) > FULL


def strained(instance: InstanceLoad) -> bool:
    """Whether its token interval passes the strictest target on it, or it is short of room."""
    return interval(instance) > instance.tpot or full(instance)


def short(decoders: Sequence[InstanceLoad]) -> bool:
    """Whether none of them has room, or tokens come later than targets allow, on average over their sequences."""
    if all(map(full, decoders)):
        return True
    sequences = sum(i.decoding for i in decoders)
    return sum(i.decoding * interval(i) / i.tpot for i in decoders) > sequences


class ElasticRoles:
    """A `RolePolicy`, and the roles' rules for the dispatch policy beside it.

    Args:
        dwell: seconds, see `DWELL`.
    """

    name = "elastic"
    dynamic = True

    def __init__(self, dwell: float = DWELL) -> None:
        self._dwell = dwell
        self._moved: dict[str, float] = {}  # name -> when it was moved
        self._idle_since: dict[str, float] = {}  # of those in "prefill" that have had no prompt since

    def decide(self, view: ClusterView) -> Sequence[Move]:
        """At most one move in either direction."""
        self._watch(view)
        decoders = [i for i in view.instances if i.role == "decode"]
        prefillers = [i for i in view.instances if i.role == "prefill"]
        if not decoders or not prefillers:
            return ()
        if short(decoders):
            return self._move(self.to_decode(view, missing=True), "decode", view, "decode-short")
        if self._late(view, prefillers):
            return self._move(self.to_prefill(view, missing=True), "prefill", view, "late-prompts")
        if idle := [r for r in prefillers if view.now - self._idle_since.get(r.name, view.now) >= self._dwell]:
            if all(self._busy(d) for d in decoders) and len(prefillers) > 1:
                return self._move(self._lightest_prefiller(idle, view, False), "decode", view, "idle-prefill")
        elif view.offline and not view.queue:
            idle = [d for d in decoders if not online(d)]
            return self._move(self.to_prefill(view, missing=False, among=idle), "prefill", view, "offline-prompts")
        return ()

    # --- for the dispatch policy too

    def to_prefill(
        self, view: ClusterView, *, missing: bool, among: Sequence[InstanceLoad] | None = None
    ) -> InstanceLoad | None:
        """The decode instance to move: the one with the fewest tokens, first of those that still prefill. None when
        the others would be too few, or too busy to do without it.

        Args:
            missing: a target is being missed, so that `DWELL` is ignored.
            among: the candidates, when not all decoders are.
        """
        decoders = [i for i in view.instances if i.role == "decode"]
        if len(decoders) <= self.fewest(view):
            return None
        # one decode instance with spare capacity must remain; not all need to be checked
        at_ease = [i.name for i in nsmallest(COMPARED, decoders, key=_weight) if not strained(i)][:2]
        if not at_ease:
            return None
        needed = at_ease[0] if len(at_ease) == 1 else ""
        able = [i for i in (decoders if among is None else among) if i.name != needed]
        if not missing:
            able = [i for i in able if self._settled(i, view)]
        return min(able, key=lambda i: (not i.pending_tokens, i.held_tokens, i.name), default=None)

    def to_decode(self, view: ClusterView, *, missing: bool) -> InstanceLoad | None:
        """The prefill instance to move: first of those that still decode. None when the others would be late."""
        prefillers = [i for i in view.instances if i.role == "prefill"]
        return self._lightest_prefiller(prefillers, view, missing)

    def _lightest_prefiller(
        self, candidates: Sequence[InstanceLoad], view: ClusterView, missing: bool
    ) -> InstanceLoad | None:
        prefillers = [i for i in view.instances if i.role in ("prefill", "any")]
        able = [i for i in candidates if missing or self._settled(i, view)]
        leaver = min(able, key=lambda i: (not turning(i), i.pending_tokens, i.name), default=None)
        staying = [i for i in prefillers if i is not leaver]
        return leaver if staying and not self._late(view, staying) else None

    def moved(self, name: str, view: ClusterView) -> None:
        """It has been decided."""
        self._moved[name] = view.now
        self._idle_since.pop(name, None)

    def fewest(self, view: ClusterView) -> int:
        """Decoders that always stay."""
        return 2 if len(view.instances) > 3 else 1

    # --- inner

    def _move(self, instance: InstanceLoad | None, role: Role, view: ClusterView, reason: str) -> Sequence[Move]:
        if instance is None:
            return ()
        self.moved(instance.name, view)
        return (Move(name=instance.name, role=role, reason=reason),)

    def _settled(self, instance: InstanceLoad, view: ClusterView) -> bool:
        return view.now - self._moved.get(instance.name, -inf) >= self._dwell

    def _watch(self, view: ClusterView) -> None:
        """Since when which prefillers have nothing to prefill."""
        idle = {i.name for i in view.instances if i.role == "prefill" and not i.pending_tokens}
        self._idle_since = {name: self._idle_since.get(name, view.now) for name in idle}

    @staticmethod
    def _late(view: ClusterView, prefillers: Sequence[InstanceLoad]) -> bool:
        """Whether none of them would meet the deadline of a prompt that arrives now: those before it are prefilled too
        late, or have been."""
        target = min((*(i.ttft for i in view.instances), *(d.ttft for d in view.queue[:QUEUED])), default=inf)
        queued = _queued_seconds(view, prefillers)
        return all(max(0.0, i.free_at - view.now) + queued > target or misses(i, target) for i in prefillers)

    @staticmethod
    def _busy(instance: InstanceLoad) -> bool:
        return fullness(instance) > BUSY * FULL or step_seconds(instance) > BUSY * instance.tpot


def _queued_seconds(view: ClusterView, prefillers: Sequence[InstanceLoad]) -> float:
    """For which what waits at the master keeps them busy."""
    tokens = sum(d.prompt_tokens for d in view.queue[:QUEUED])
    if not tokens:
        return 0.0
    speed = sum(i.token_budget / i.prefill_seconds(i.token_budget) for i in prefillers)  # tokens/s
    return tokens / speed
