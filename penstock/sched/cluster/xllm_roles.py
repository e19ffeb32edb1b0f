"""xLLM's elastic roles: which instances prefill and which decode, changed without a pause (xLLM, section 3.2).

Being meant for another role changes nothing about what runs on an instance: one of "decode" that still prefills
prompts, or one of "prefill" on which sequences still decode, is turning (the paper's roles P->D and D->P). So a move
costs nothing by itself, and the dispatch policy makes one in the very decision that needs it; `XllmRoles.decide` does
the rest by the clock. Two rules prevent oscillation: no instance is taken from a role that would then fall short, and a
moved instance keeps its role for a while unless a target is being missed.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import nsmallest
from math import inf

from penstock.core.plan import BLOCK_TOKENS
from penstock.core.wire.engine import Role
from penstock.sched.cluster.base import ClusterView, InstanceLoad, Move

DWELL = 2.0  # seconds that a moved instance stays where it is, unless a target is being missed
COMPARED = 32  # decoders of which one at least has to be at ease
FULL = 0.9  # share of an instance's blocks or sequences above which it is short of them
BUSY = 0.5  # share of that, or of the TPOT target, above which decode instances need help
MARGIN = 0.9  # share of a target that a prediction may use up


def online(instance: InstanceLoad) -> int:
    """Online sequences that run or will decode there."""
    return max(0, instance.requests - instance.offline_requests)


def turning(instance: InstanceLoad) -> bool:
    """Whether it still has work of its former role."""
    if instance.role == "prefill":
        return instance.decoding > instance.offline_requests
    return instance.role == "decode" and instance.pending_tokens > 0


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


def strained(instance: InstanceLoad) -> bool:
    """Whether its token interval, measured or predicted, passes the strictest target on it, or it is short of room."""
    measured = instance.interval if instance.interval is not None and instance.decoding else 0.0
    return max(measured, instance.decode_seconds) > instance.tpot or fullness(instance) > FULL


class XllmRoles:
    """A `RolePolicy`, and the roles' rules for the dispatch policy beside it.

    Args:
        dwell: seconds, see `DWELL`.
    """

    name = "xllm"
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
        if all(strained(d) for d in decoders):
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
        """Whether none of them would meet the deadline of a prompt that arrives now."""
        target = min((i.ttft for i in view.instances), default=inf)
        return all(i.free_at - view.now > MARGIN * target for i in prefillers)

    @staticmethod
    def _busy(instance: InstanceLoad) -> bool:
        return fullness(instance) > BUSY * FULL or step_seconds(instance) > BUSY * instance.tpot
