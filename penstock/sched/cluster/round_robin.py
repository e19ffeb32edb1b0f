"""Everyone in turn, whatever the load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from penstock.sched.cluster.base import Demand, InstanceLoad, Random, Stage


class RoundRobin:
    """In the order of names, each stage by itself. A cost is how many turns a candidate is away."""

    name = "round-robin"

    def __init__(self) -> None:
        self._last: dict[Stage, str] = {}

    def choose(
        self, stage: Stage, demand: Demand, candidates: Sequence[InstanceLoad], rng: Random
    ) -> tuple[str, Mapping[str, float]]:
        names = sorted(candidate.name for candidate in candidates)
        last = self._last.get(stage, "")
        turns = [n for n in names if n > last] + [n for n in names if n <= last]
        self._last[stage] = turns[0]
        return turns[0], {name: float(turn) for turn, name in enumerate(turns)}
