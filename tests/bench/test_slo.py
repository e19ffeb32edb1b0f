import asyncio
import math
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.bench.dataset import Dataset
from penstock.bench.slo import LoadTester, find_greatest_load
from penstock.core.errors import ConfigError
from penstock.workload.requests import offered_rate


def search(curve, **settings):
    async def measure(load):
        return curve(load)

    settings = {"start": 1.0, "low": 0.01, "high": 4096.0, "target": 0.9, "tolerance": 0.05} | settings
    return asyncio.run(find_greatest_load(measure, **settings))


@given(st.floats(0.02, 4000), st.floats(0.02, 4000), st.floats(0.01, 0.5))
def test_a_step_is_found_within_the_tolerance(edge, start, tolerance):
    found = search(lambda load: 1.0 if load <= edge else 0.0, start=start, tolerance=tolerance)
    if found.missed is None:
        assert found.best == 4096
    else:
        assert found.best <= edge < found.missed
        assert found.missed - found.best <= tolerance * found.best


@given(st.integers(1, 5000), st.integers(1, 1000))
def test_whole_loads_are_found_exactly_when_asked(edge, start):
    found = search(
        lambda load: 1.0 if load <= edge else 0.0, start=start, low=1, high=4096, tolerance=0.001, whole=True
    )
    assert all(probe.load == int(probe.load) for probe in found.probes)
    assert found.best <= edge
    assert found.best == min(edge, 4096) or found.missed - found.best <= 0.001 * found.best


@given(st.floats(1, 1000), st.floats(0.5, 20), st.floats(0.5, 0.99))
def test_a_smooth_fall(edge, steepness, target):
    def curve(load):
        return 1 / (1 + (load / edge) ** steepness)

    found = search(curve, target=target, low=1e-6, high=1e6)
    truth = edge * (1 / target - 1) ** (1 / steepness)
    if found.best is not None and found.missed is not None:
        assert found.best <= truth * (1 + 1e-9)
        assert found.missed >= truth * (1 - 1e-9)


@given(st.floats(0.1, 1000), st.floats(0, 0.3), st.integers(0, 2**32))
def test_noise_ends_with_a_measured_bracket(edge, noise, seed):
    rng = np.random.default_rng(seed)
    found = search(lambda load: min(1.0, edge / load) + noise * rng.standard_normal())
    kept = [probe.load for probe in found.probes if probe.kept]
    missed = [probe.load for probe in found.probes if not probe.kept]
    assert found.best == (max(kept) if kept else None)
    assert found.missed == (min(missed) if missed else None)
    assert all(probe.kept == (probe.attainment >= 0.9) for probe in found.probes)
    if kept and missed:
        assert max(kept) < min(missed)
        assert found.missed - found.best <= 0.05 * found.best
    assert len(found.probes) == len({probe.load for probe in found.probes}) <= 40


def test_bounds_are_tried_and_reported():
    always, never = search(lambda load: 1.0, high=100.0), search(lambda load: 0.0, low=0.3)
    assert (always.best, always.missed) == (100.0, None)
    assert (never.best, never.missed) == (None, 0.3)
    assert [probe.load for probe in never.probes] == [1.0, 0.5, 0.3]


def test_every_probe_is_kept_in_order():
    found = search(lambda load: 1.0 if load <= 3 else 0.5, tolerance=0.3)
    assert [probe.load for probe in found.probes] == [1.0, 2.0, 4.0, 3.0, 3.5]
    assert (found.best, found.missed) == (3.0, 3.5)


def test_an_endless_search_is_refused():
    with pytest.raises(AssertionError):
        search(lambda load: 1.0, high=math.inf)


class FakeBench:
    """Remembers what it was asked to measure; three quarters keep ttft, half keep everything."""

    def __init__(self):
        self.runs: list[Any] = []

    async def measure(self, requests, shape, limits_ms, progress):
        self.runs.append((requests, shape))
        goodput = SimpleNamespace(attainment=0.5, attainment_by_limit={"ttft": 0.75, "tpot": 0.6})
        return SimpleNamespace(summary=SimpleNamespace(goodput=goodput))


def probe(dataset, *loads, closed_loop=False, each_limit=False, seconds=0.0):
    """(what was measured, attainments)"""
    bench: Any = FakeBench()
    counts: Any = nullcontext(SimpleNamespace(request=None))
    probes = LoadTester(
        bench,
        dataset,
        {"ttft": 1.0, "tpot": 1.0},
        closed_loop=closed_loop,
        each_limit=each_limit,
        seconds=seconds,
        warmups=2,
        live_counts=lambda total: counts,
    )
    attainments = [asyncio.run(probes.measure(load)) for load in loads]
    assert len(probes.summaries) == len(loads)
    return bench.runs, attainments


def test_rates_share_one_pattern_of_arrivals():
    ((slow, _), (fast, _)), _ = probe(Dataset(count=50, seed=3), 2.0, 10.0)
    assert offered_rate(slow) == pytest.approx(2.0)
    assert offered_rate(fast) == pytest.approx(10.0)
    assert [r.at for r in slow] == pytest.approx([5 * r.at for r in fast])


def test_a_rate_is_held_for_its_seconds():
    runs, _ = probe(Dataset(count=50), 2.0, 10.0, seconds=20.0)
    assert [len(requests) for requests, _ in runs] == [50, 200]


def test_a_trace_keeps_its_pattern(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text("arrival_s,input_tokens,output_tokens\n0,5,5\n1,5,5\n4,5,5\n")
    ((requests, _),), _ = probe(Dataset(name="trace", path=str(path)), 1.0)
    assert [r.at for r in requests] == pytest.approx([0.0, 0.5, 2.0])
    path.write_text("arrival_s,input_tokens,output_tokens\n7,5,5\n7,5,5\n")
    with pytest.raises(ConfigError, match="no rate to be scaled"):
        probe(Dataset(name="trace", path=str(path)), 1.0)


def test_a_closed_loop_gives_every_user_several_requests():
    runs, _ = probe(Dataset(count=10), 2, 8, closed_loop=True)
    assert [(len(requests), shape.concurrency, shape.scheduled) for requests, shape in runs] == [
        (10, 2, False),
        (32, 8, False),
    ]


def test_every_probe_has_tokens_of_its_own_and_only_the_first_warms_up():
    runs, _ = probe(Dataset(count=10, seed=5), 1.0, 2.0, 3.0)
    assert [(shape.seed, shape.warmups) for _, shape in runs] == [(5, 2), (6, 0), (7, 0)]


def test_attainment_of_all_limits_or_of_the_worst():
    assert probe(Dataset(count=5), 1.0)[1] == [0.5]
    assert probe(Dataset(count=5), 1.0, each_limit=True)[1] == [0.6]
