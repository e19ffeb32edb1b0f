"""The instance with the fewest tokens on its hands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter

from penstock.sched.cluster.base import Demand, InstanceLoad, Random, Stage
from penstock.sched.cluster.columns import Column, Costs


class LeastLoaded:
    """A cost is in tokens: those that are still to be computed, and those that are held. Among equals the lot decides,
    so that a burst does not always begin with the first."""

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
