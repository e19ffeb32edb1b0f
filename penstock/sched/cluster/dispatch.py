"""From pools to candidates: who may read a prompt, and who may go on from there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from penstock.core.wire.engine import Pool
from penstock.sched.cluster.base import Decision, Demand, DispatchPolicy, InstanceLoad, Random, Stage

HAND_OVERS = {("prefill", "decode"), ("prefill", "any"), ("any", "decode")}


def hands_over(source: Pool, target: Pool) -> bool:
    """Whether instances of one pool hand requests over to instances of another."""
    return (source, target) in HAND_OVERS


def dispatch(policy: DispatchPolicy, demand: Demand, instances: Sequence[InstanceLoad], rng: Random) -> Decision | None:
    """Where a sequence runs; None when no instance could hold it.

    Instances of "prefill" and "any" read prompts; one of "any" may keep what it has read. When a pool has nobody to
    give, the other one does all of the work, and the reason says so.

    Args:
        instances: those that may be given work now.
    """
    needed = demand.prompt_tokens + demand.max_tokens
    fitting = [i for i in instances if needed <= i.max_model_len]
    if not fitting:
        return None
    readers = [i for i in fitting if i.pool != "decode"]
    prefill, prefill_costs = policy.choose("prefill", demand, readers or fitting, rng)
    costs: dict[Stage, Mapping[str, float]] = {"prefill": prefill_costs}
    chosen = next(i for i in fitting if i.name == prefill)
    takers = [i for i in fitting if i.name in chosen.peers and hands_over(chosen.pool, i.pool)]
    decode = None
    if takers:
        staying = [chosen] if chosen.pool == "any" else []
        name, costs["decode"] = policy.choose("decode", demand, [*staying, *takers], rng)
        decode = name if name != prefill else None
    return Decision(prefill=prefill, decode=decode, policy=policy.name, reason=_reason(chosen, decode), costs=costs)


def _reason(prefill: InstanceLoad, decode: str | None) -> str:
    if decode is not None:
        return "hand-off"
    if prefill.pool == "any":
        return "colocated"
    if prefill.pool == "decode":
        return "no-prefill: no instance that reads prompts can be given more"
    why = "; ".join(f"{name}: {reason}" for name, reason in prefill.unlinked.items())
    return f"no-decode: {why or 'no instance that decodes can be given more'}"
