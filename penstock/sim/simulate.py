"""One simulation, from a scenario to its result."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from penstock.sched.cluster import Random
from penstock.sim.bundles import BUNDLES
from penstock.sim.cluster import Cluster
from penstock.sim.frontend import Record
from penstock.sim.result import kept, summarise
from penstock.sim.scenario import Scenario
from penstock.sim.traffic import make_traffic
from penstock.workload.requests import WorkRequest

SAMPLES = 240  # of the instances' states, while requests arrive
TRAFFIC_STREAM, NOISE_STREAM = 0, 1


def simulate(
    scenario: Scenario,
    variant: str,
    trace: Sequence[WorkRequest] | None,
    rng: Random,
    *,
    seed: int,
    scale: float,
    allowed_misses: float | None = None,
    progress: Callable[[int, int], None] = lambda ended, total: None,
    strides: bool = True,
) -> tuple[dict[str, Any], Cluster]:
    """Run to the end of the last request, and look whether everybody's books are right.

    Args:
        variant: "POLICY" or "POLICY@LAYOUT".
        trace: see `make_traffic`.
        rng: for policies that draw lots, made of `seed`.
        seed: of traffic and of step times.
        scale: factor on the workload's native rate.
        allowed_misses: share of the requests that may miss their limits before the simulation is given up, its result
            then being incomplete; None never gives up.
        progress: told how many requests are over, and of how many.

    Raises:
        ConfigError: the variant or the workload cannot be had.
    """
    policy, groups = scenario.choose(variant)
    longest = min(group.max_model_len for group in groups)
    traffic = make_traffic(
        scenario.workload,
        trace,
        np.random.default_rng((seed, TRAFFIC_STREAM)),
        scale=scale,
        max_model_len=longest,
    )
    requests = traffic.requests
    cluster = Cluster(
        scenario,
        groups,
        BUNDLES[policy].make_dispatch(),
        requests,
        rng,
        lambda number: np.random.default_rng((seed, NOISE_STREAM, number)),
        strides=strides,
    )
    missed = 0
    allowed = len(requests) if allowed_misses is None else int(allowed_misses * len(requests) + 1e-9)

    def notice(record: Record) -> bool:
        nonlocal missed
        missed += not kept(record, scenario.slo)
        progress(cluster.ended, len(requests))
        return missed > allowed

    cluster.run(sample_every=max(requests[-1].at / SAMPLES, 0.1), notice=notice)
    result = {
        "policy": variant,
        "seed": seed,
        "scale": scale,
        "rate": traffic.native_rate * scale if math.isfinite(traffic.native_rate) else None,
        "complete": cluster.ended == len(requests),
        "cut": traffic.cut,
        **summarise(cluster, scenario.slo),
    }
    cluster.settle(scenario.transport.lease)
    cluster.check()
    return result, cluster
