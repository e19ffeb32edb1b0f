"""One simulation, from a scenario to its result."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from penstock.core.errors import ConfigError
from penstock.core.service_level import Bounds, Range
from penstock.sched.cluster import Random
from penstock.service.policies import Circumstances
from penstock.sim.baselines import POLICIES
from penstock.sim.bound import reusable_by_request
from penstock.sim.cluster import Cluster, media_route
from penstock.sim.frontend import SimRecord
from penstock.sim.result import Account, account_of, joined_accounts, kept, summarise
from penstock.sim.scenario import Scenario
from penstock.sim.traffic import Traffic, make_traffic
from penstock.sim.workload import SLO, WHOLE, Slice
from penstock.workload.requests import WorkRequest

SAMPLES = 240  # of the instances' states, while requests arrive
TRAFFIC_STREAM, NOISE_STREAM = 0, 1
TIGHTEST = 0.75  # of a class's target that its priority may be worth at the tightest


@contextmanager
def _uncollected() -> Iterator[None]:
    """Without the collector of cycles. A simulation makes none, and collecting them takes a third of its time with a
    thousand instances."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


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
    """Run to the end of the last request, and run all checks.

    Args:
        variant: "POLICY" or "POLICY@LAYOUT".
        trace: see `make_traffic`.
        rng: for randomised policies, made of `seed`.
        seed: of traffic and of step times.
        scale: factor on the workload's native rate.
        allowed_misses: share of the requests that may miss their limits before the simulation is given up, its result
            then being incomplete; None never gives up.
        progress: called with the number of ended requests, and their total.

    Raises:
        ConfigError: the variant or the workload cannot be had.
    """
    done, cluster = _simulate(
        scenario, variant, trace, rng, WHOLE, seed, scale, allowed_misses, progress, strides=strides
    )
    return result_of([done], variant, seed=seed, scale=scale), cluster


def simulate_slice(
    scenario: Scenario,
    variant: str,
    trace: Sequence[WorkRequest] | None,
    rng: Random,
    part: Slice,
    *,
    seed: int,
    scale: float,
    progress: Callable[[int, int], None] = lambda ended, total: None,
) -> Simulated:
    """Run a slice of it to the end of its last request.

    Args:
        rng: made of `seed` and the slice's number.
        progress: called with the number of ended requests of those that it sees, and their total at most.

    Raises:
        ConfigError: the variant or the workload cannot be had, or cannot be had in slices.
    """
    check_sliceable(scenario)
    return _simulate(scenario, variant, trace, rng, part, seed, scale, None, progress)[0]


def check_sliceable(scenario: Scenario) -> None:
    """Raises ConfigError where what happens depends on all that came before."""
    for field, given in (("workload.offline", scenario.workload.offline), ("failures", scenario.failures)):
        if given:
            raise ConfigError(f"--slices: not with {field}, whose effects outlast a slice", "--slices")


def traffic_of(
    scenario: Scenario,
    variant: str,
    trace: Sequence[WorkRequest] | None,
    *,
    seed: int,
    scale: float,
    part: Slice = WHOLE,
) -> Traffic:
    """What is simulated with these arguments of `simulate`. Raises ConfigError."""
    _, groups = scenario.choose(variant)
    longest = min(group.max_model_len for group in groups)
    rng = np.random.default_rng((seed, TRAFFIC_STREAM))
    return make_traffic(scenario.workload, trace, rng, scale=scale, max_model_len=longest, part=part)


@dataclass(frozen=True, slots=True)
class Simulated:
    """A slice of a simulation.

    Attributes:
        native_rate, cut: see `Traffic`.
        reusable: prompt tokens that a cache without end which all instances share would have found.
        complete: whether it was not given up.
    """

    account: Account
    native_rate: float
    cut: int
    reusable: int
    complete: bool


def result_of(parts: Sequence[Simulated], variant: str, *, seed: int, scale: float) -> dict[str, Any]:
    """Of all slices of a simulation, in order. `reusable_tokens`: that a cache without end would have found of prompts;
    `share_of_ideal`: how many of these were."""
    native_rate, reusable = parts[0].native_rate, sum(part.reusable for part in parts)
    summary = summarise(joined_accounts([part.account for part in parts]))
    return {
        "policy": variant,
        "seed": seed,
        "scale": scale,
        "rate": native_rate * scale if math.isfinite(native_rate) else None,
        "complete": all(part.complete for part in parts),
        "cut": sum(part.cut for part in parts),
        "reusable_tokens": reusable,
        "share_of_ideal": summary["reused_tokens"] / reusable if reusable else None,
        **summary,
    }


@_uncollected()
def _simulate(
    scenario: Scenario,
    variant: str,
    trace: Sequence[WorkRequest] | None,
    rng: Random,
    part: Slice,
    seed: int,
    scale: float,
    allowed_misses: float | None,
    progress: Callable[[int, int], None],
    *,
    strides: bool = True,
) -> tuple[Simulated, Cluster]:
    policy, groups = scenario.choose(variant)
    traffic = traffic_of(scenario, variant, trace, seed=seed, scale=scale, part=part)
    requests = traffic.requests
    slice_stream = (part.number,) if part.number else ()
    cluster = Cluster(
        scenario,
        groups,
        POLICIES[policy].make(replace(_circumstances(scenario), media_route=media_route(groups))),
        requests,
        rng,
        lambda number: np.random.default_rng((seed, NOISE_STREAM, number, *slice_stream)),
        local_policy=POLICIES[policy].local_policy,
        strides=strides,
        judged=traffic.judged,
    )
    missed = 0
    online = sum(not request.offline for request in requests)
    allowed = online if allowed_misses is None else int(allowed_misses * online + 1e-9)

    def notice(record: SimRecord) -> bool:
        nonlocal missed
        missed += record.number in cluster.judged and not record.offline and not kept(record)
        progress(cluster.ended, len(requests))
        return missed > allowed

    apart = requests[-1].at / SAMPLES if part.of == 1 else part.length / max(1, round(SAMPLES / part.of))
    cluster.run(
        sample_every=max(apart, 0.1),
        notice=notice,
        since=part.begin - part.since,
        until=part.end - part.since,
    )
    found = zip(requests, reusable_by_request(requests), strict=True)
    reusable = sum(min(tokens, r.prompt_tokens - 1) for r, tokens in found if r.number in cluster.judged)
    done = Simulated(account_of(cluster, part), traffic.native_rate, traffic.cut, reusable, cluster.over)
    cluster.settle(scenario.transport.lease)
    cluster.check()
    return done, cluster


def _circumstances(scenario: Scenario) -> Circumstances:
    """Where clients state only their priority, it implies their class's targets, or somewhat tighter ones."""
    classes: dict[int, list[SLO]] = {}
    for task in scenario.workload.tasks:
        if task.priority_only:
            classes.setdefault(task.priority, []).append(task.slo)
    bounds = {
        priority: Bounds(ttft=_range([slo.ttft for slo in slos]), tpot=_range([slo.tpot for slo in slos]))
        for priority, slos in classes.items()
    }
    at = Circumstances(priorities=bounds, live_roles=scenario.live_roles)
    if (scaling := scenario.scaling) is None:
        return at
    return replace(at, interval=scaling.interval, cooldown_out=scaling.cooldown_out, cooldown_in=scaling.cooldown_in)


def _range(targets: Sequence[float]) -> Range:
    strictest = min(targets)
    return Range(TIGHTEST * strictest, strictest)
