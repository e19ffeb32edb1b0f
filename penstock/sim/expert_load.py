"""What rebalancing experts gains: popularity of experts that is drawn, `Rebalancer` as it is, and the step-time model.

Every layer has a Zipf popularity of its own. In each interval tokens are drawn by it; of the popular experts some share
then changes. A layer's ranks wait for the busiest of them, so a step is as long as the mean of its layers' imbalances
says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from penstock.core.parallel import Placement
from penstock.sched.parallel.rebalancing import ExpertRanks, Prepare, Rebalancer
from penstock.sched.steptime import StepTime

Popularity = npt.NDArray[np.float64]  # [layers, experts]


@dataclass(frozen=True, slots=True)
class Interval:
    """
    Attributes:
        fixed, moved: the busiest rank over the mean, in the mean over layers; with experts where they were, and where
            they were at the interval's start.
        worst: of any layer, where they were at the interval's start.
        fixed_ms, moved_ms, even_ms: of a decoding step with these, and with ranks that have equally much.
        loads: experts that the rank which loads most did at the interval's end.
        switches: layers that were switched then.
    """

    fixed: float
    moved: float
    worst: float
    fixed_ms: float
    moved_ms: float
    even_ms: float
    loads: int
    switches: int


def zipf(layers: int, experts: int, skew: float, rng: np.random.Generator) -> Popularity:
    """Shares of tokens' choices, in each layer in an order of its own."""
    shares = 1 / np.arange(1, experts + 1) ** skew
    return np.array([rng.permutation(shares / shares.sum()) for _ in range(layers)])


def simulate_experts(
    ranks: ExpertRanks,
    popularity: Popularity,
    times: StepTime,
    rng: np.random.Generator,
    *,
    intervals: int,
    tokens: int,
    work: tuple[int, int],
    drift: float = 0.0,
) -> list[Interval]:
    """
    Args:
        times: of a group; its imbalance is set here.
        tokens: of an interval, of all ranks together.
        work: (sequences that decode, tokens of KV that they read), of a group.
        drift: share of the experts that exchange their popularity with others after each interval.
    """
    assert times.shape.experts is not None
    chosen, rebalancer = times.shape.experts.per_token, Rebalancer(ranks)
    start = [*rebalancer.placements]
    found = []
    for _ in range(intervals):
        counts = [rng.multinomial(chosen * tokens, layer).tolist() for layer in popularity]
        fixed = _imbalances(start, counts)
        moved = _imbalances(rebalancer.placements, counts)
        rebalancer.look(counts)
        loads, switches = _move(rebalancer, ranks.ranks)
        was, now_is = float(np.mean(fixed)), float(np.mean(moved))
        was_ms, is_ms, even_ms = [replace(times, imbalance=mean).step_ms((), *work) for mean in (was, now_is, 1.0)]
        found.append(Interval(was, now_is, max(moved), was_ms, is_ms, even_ms, loads, switches))
        _drift(popularity, drift, rng)
    return found


def _imbalances(placements: Sequence[Placement], counts: Sequence[Sequence[int]]) -> list[float]:
    return [placement.imbalance(layer) for placement, layer in zip(placements, counts, strict=True)]


def _move(rebalancer: Rebalancer, ranks: int) -> tuple[int, int]:
    """(experts that one rank loads at most, layers switched), with ranks that are always ready."""
    loaded, switches = [0] * ranks, 0
    while isinstance(order := rebalancer.tick(0.0), Prepare):
        for rank, _ in order.loads:
            loaded[rank] += 1
        for rank in range(ranks):
            rebalancer.ready(rank, order.version)
        rebalancer.switched(order.version)
        switches += 1
    return max(loaded), switches


def _drift(popularity: Popularity, share: float, rng: np.random.Generator) -> None:
    count = round(share * popularity.shape[1])
    for layer in popularity:
        which = rng.choice(popularity.shape[1], count, replace=False)
        layer[which] = layer[rng.permutation(which)]
