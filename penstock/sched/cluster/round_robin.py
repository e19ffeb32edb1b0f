"""Everyone in turn, whatever the load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter

from penstock.sched.cluster.base import Demand, InstanceLoad, Random, Stage


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
