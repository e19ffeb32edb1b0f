"""Policies that place every sequence the moment it comes: from roles to candidates, in turn or to the least loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Protocol

import numpy as np

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
from penstock.sched.cluster.columns import Column, Costs
from penstock.sched.cluster.stages import hands_over, why


class InstanceChoice(Protocol):
    """Compares instances. Candidates are chosen before; see `Immediate`."""

    name: str

    def choose(
        self, stage: Stage, demand: Demand, candidates: Sequence[InstanceLoad], rng: Random
    ) -> tuple[InstanceLoad, Mapping[str, float]]:
        """The chosen candidate, and every candidate's cost; there is at least one candidate."""


class Immediate:
    """A `DispatchPolicy` that never lets sequences wait.

    Instances of "prefill" and "any" prefill prompts; one of "any" may keep what it has prefilled. When a role has no
    instance, the other one does all of the work, and the reason says so.
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


class LeastLoaded:
    """A cost is in tokens: those that are still to be computed, and those that are held. Ties are broken at random, so
    that a burst does not always begin with the first."""

    name = "least-loaded"

    def __init__(self) -> None:
        self._tokens = Column(lambda load: load.pending_tokens + load.held_tokens)
        self._requests = Column(attrgetter("requests"))

    def choose(
        self, stage: Stage, demand: Demand, candidates: Sequence[InstanceLoad], rng: Random
    ) -> tuple[InstanceLoad, Mapping[str, float]]:
        tokens = self._tokens.of(candidates)
        lightest = (tokens == tokens[tokens.argmin()]).nonzero()[0]  # `min` takes several times as long as `argmin`
        requests = self._requests.of(candidates)[lightest]
        equal = lightest[requests == requests[requests.argmin()]]
        chosen = int(equal[rng.choice(range(len(equal)))])
        return candidates[chosen], Costs(candidates, tokens.copy(), chosen)


class RoundRobin:
    """In the order of names, each stage by itself. A cost is how many turns a candidate is away."""

    name = "round-robin"

    def __init__(self) -> None:
        self._last: dict[Stage, str] = {}

    def choose(
        self, stage: Stage, demand: Demand, candidates: Sequence[InstanceLoad], rng: Random
    ) -> tuple[InstanceLoad, Mapping[str, float]]:
        ordered = sorted(candidates, key=attrgetter("name"))
        last = self._last.get(stage, "")
        turns = [c for c in ordered if c.name > last] + [c for c in ordered if c.name <= last]
        self._last[stage] = turns[0].name
        return turns[0], {c.name: float(turn) for turn, c in enumerate(turns)}
