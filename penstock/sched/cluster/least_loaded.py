"""The instance with the fewest tokens on its hands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from penstock.sched.cluster.base import Demand, InstanceLoad, Random, Stage


class LeastLoaded:
    """A cost is in tokens: those that are still to be computed, and those that are held. Among equals the lot decides,
    so that a burst does not always begin with the first."""

    name = "least-loaded"

    def choose(
        self, stage: Stage, demand: Demand, candidates: Sequence[InstanceLoad], rng: Random
    ) -> tuple[InstanceLoad, Mapping[str, float]]:
        costs = {c.name: float(c.pending_tokens + c.held_tokens) for c in candidates}
        least = min(costs.values())
        lightest = [c for c, cost in zip(candidates, costs.values(), strict=True) if cost == least]
        fewest = min([c.requests for c in lightest])
        return rng.choice([c for c in lightest if c.requests == fewest]), costs
