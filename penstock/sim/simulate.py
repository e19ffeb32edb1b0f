"""One simulation, from a scenario to its result."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from penstock.sched.cluster import Random
from penstock.sched.cluster.priority_slo import Bounds, Range
from penstock.service.bundles import BUNDLES, Circumstances
from penstock.sim.cluster import Cluster
from penstock.sim.frontend import Record
from penstock.sim.result import kept, summarise
from penstock.sim.scenario import Scenario
from penstock.sim.traffic import make_traffic
from penstock.sim.workload import SLO
from penstock.workload.requests import WorkRequest

SAMPLES = 240  # of the instances' states, while requests arrive
TRAFFIC_STREAM, NOISE_STREAM = 0, 1
TIGHTEST = 0.75  # of a class's target that its priority may be worth at the tightest


@contextmanager
def _uncollected() -> Iterator[None]:
    """Without the collector of cycles. A simulation makes none, and going through the books of a thousand instances in
    search of some takes a third of its time."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@_uncollected()
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
        BUNDLES[policy].make(_circumstances(scenario)),
        requests,
        rng,
        lambda number: np.random.default_rng((seed, NOISE_STREAM, number)),
        pacing=BUNDLES[policy].pacing,
        strides=strides,
    )
    missed = 0
    online = sum(not request.offline for request in requests)
    allowed = online if allowed_misses is None else int(allowed_misses * online + 1e-9)

    def notice(record: Record) -> bool:
        nonlocal missed
        missed += not record.offline and not kept(record)
        progress(cluster.ended, len(requests))
        return missed > allowed

    cluster.run(sample_every=max(requests[-1].at / SAMPLES, 0.1), notice=notice)
    result = {
        "policy": variant,
        "seed": seed,
        "scale": scale,
        "rate": traffic.native_rate * scale if math.isfinite(traffic.native_rate) else None,
        "complete": cluster.over,
        "cut": traffic.cut,
        **summarise(cluster),
    }
    cluster.settle(scenario.transport.lease)
    cluster.check()
    return result, cluster


def _circumstances(scenario: Scenario) -> Circumstances:
    """Where clients say only their priority, it may be worth what their class is judged by, or somewhat less."""
    classes: dict[int, list[SLO]] = {}
    for task in scenario.workload.tasks:
        if task.priority_only:
            classes.setdefault(task.priority, []).append(task.slo)
    bounds = {
        priority: Bounds(ttft=_range([slo.ttft for slo in slos]), tpot=_range([slo.tpot for slo in slos]))
        for priority, slos in classes.items()
    }
    interval = scenario.scaling.interval if scenario.scaling is not None else None
    return Circumstances(interval=interval, priorities=bounds)


def _range(targets: Sequence[float]) -> Range:
    strictest = min(targets)
    return Range(TIGHTEST * strictest, strictest)
