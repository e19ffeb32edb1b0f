import asyncio
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.bench.slo import find_greatest_load


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
