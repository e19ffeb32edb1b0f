"""The decision that baselines make of what they chose for both stages."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.sched.cluster.base import ClusterView, Decision, Demand, InstanceLoad, Stage
from penstock.sched.cluster.stages import why


def staged_decision(
    policy: str,
    view: ClusterView,
    demand: Demand,
    prefiller: InstanceLoad,
    home: InstanceLoad,
    costs: Mapping[str, float],
    home_costs: Mapping[str, float],
) -> Decision:
    """It is prefilled by one instance behind the prompts that are there, and decodes at another or at the same.

    Args:
        costs, home_costs: of the candidates for each stage; none where a stage had no choice.
    """
    decode = home.name if home is not prefiller else None
    both: dict[Stage, Mapping[str, float]] = {"prefill": costs}
    if home_costs:
        both["decode"] = home_costs
    begins = max(view.now, prefiller.free_at)
    return Decision(
        key=demand.key,
        prefill=prefiller.name,
        decode=decode,
        policy=policy,
        reason=why(prefiller, decode),
        costs=both,
        predicted_ttft=begins + prefiller.prefill_seconds(demand.prompt_tokens) - demand.arrived,
    )
