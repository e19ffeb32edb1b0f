"""Policies that place every sequence the moment it comes: from roles to candidates, and a comparison of these."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from penstock.core.wire.engine import Role
from penstock.sched.cluster.base import (
    ClusterView,
    Decision,
    Demand,
    InstanceLoad,
    Later,
    Random,
    Stage,
    fitting,
)
from penstock.sched.cluster.columns import Column

HAND_OVERS = {("prefill", "decode"), ("prefill", "any"), ("any", "decode")}


def hands_over(source: Role, target: Role) -> bool:
    """Whether instances of one role hand requests over to instances of another."""
    return (source, target) in HAND_OVERS


class InstanceChoice(Protocol):
    """Compares instances. Who is a candidate at all is decided before it is asked; see `Immediate`."""

    name: str

    def choose(
        self, stage: Stage, demand: Demand, candidates: Sequence[InstanceLoad], rng: Random
    ) -> tuple[InstanceLoad, Mapping[str, float]]:
        """The chosen candidate, and every candidate's cost; there is at least one candidate."""


class Immediate:
    """A `DispatchPolicy` that lets nobody wait.

    Instances of "prefill" and "any" prefill prompts; one of "any" may keep what it has prefilled. When a role has
    nobody to give, the other one does all of the work, and the reason says so.
    """

    wants_keys = False

    def __init__(self, comparison: InstanceChoice) -> None:
        self.name = comparison.name
        self._comparison = comparison
        self._only_decode = Column(lambda load: load.role == "decode", bool)

    def decide(self, view: ClusterView, rng: Random) -> Decision | Later:
        for demand in (*view.queue, *view.offline):
            if able := fitting(view, demand):
                return self._place(demand, able, rng)
        return Later()

    def _place(self, demand: Demand, able: Sequence[InstanceLoad], rng: Random) -> Decision:
        prefillers: Sequence[InstanceLoad] = able
        if np.count_nonzero(self._only_decode.of(able)):
            prefillers = [i for i in able if i.role != "decode"] or able
        prefill, prefill_costs = self._comparison.choose("prefill", demand, prefillers, rng)
        costs: dict[Stage, Mapping[str, float]] = {"prefill": prefill_costs}
        takers: list[InstanceLoad] = []
        if prefill.peers:
            takers = [i for i in able if i.name in prefill.peers and hands_over(prefill.role, i.role)]
        decode = None
        if takers:
            staying = [prefill] if prefill.role == "any" else []
            home, costs["decode"] = self._comparison.choose("decode", demand, [*staying, *takers], rng)
            decode = home.name if home is not prefill else None
        return Decision(
            key=demand.key,
            prefill=prefill.name,
            decode=decode,
            policy=self.name,
            reason=why(prefill, decode),
            costs=costs,
        )


def why(prefill: InstanceLoad, decode: str | None) -> str:
    """The reason of a decision that follows the roles."""
    if decode is not None:
        return "hand-off"
    if prefill.role == "any":
        return "colocated"
    if prefill.role == "decode":
        return "no-prefill: no instance that prefills prompts can be given more"
    reasons = "; ".join(f"{name}: {reason}" for name, reason in prefill.unlinked.items())
    return f"no-decode: {reasons or 'no instance that decodes can be given more'}"
