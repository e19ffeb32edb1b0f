"""Arrivals, lengths, prefixes, and workloads put together from them."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import ConfigError
from penstock.workload.arrivals import arrival_times, poisson_times, with_tide
from penstock.workload.lengths import (
    Empirical,
    Fixed,
    Independent,
    LogNormal,
    Uniform,
    around,
    log_normal,
    read_lengths,
)
from penstock.workload.prefixes import draw_prefixes
from penstock.workload.synthetic import synthesise


def rng(seed=0):
    return np.random.default_rng(seed)


@given(st.integers(0, 50), st.floats(0.01, 1000), st.floats(0, 5))
def test_arrivals_ascend_from_zero(count, rate, cv):
    times = arrival_times(count, rate, rng(), cv)
    assert times.shape == (count,)
    assert list(times) == sorted(times)
    assert count == 0 or times[0] == 0.0


@pytest.mark.parametrize("cv", [0.0, 0.5, 1.0, 3.0])
def test_arrivals_have_the_asked_rate_and_variation(cv):
    gaps = np.diff(arrival_times(200_001, 4.0, rng(), cv))
    assert gaps.mean() == pytest.approx(0.25, rel=0.03)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.03, abs=1e-9)


def test_infinite_rate_is_all_at_once():
    assert arrival_times(5, math.inf, rng()).tolist() == [0.0] * 5


def test_another_rate_stretches_the_same_arrivals():
    assert arrival_times(100, 2.0, rng(3)) == pytest.approx(4 * arrival_times(100, 8.0, rng(3)))


@given(st.floats(0.01, 50), st.floats(0.01, 100), st.integers(0, 100))
def test_a_poisson_process_stays_in_its_time(rate, duration, seed):
    times = poisson_times(rate, duration, rng(seed))
    assert list(times) == sorted(times)
    assert len(times) == 0 or 0 < times[0] <= times[-1] < duration


def test_a_poisson_process_has_its_rate_and_the_same_luck_at_another():
    counts = [len(poisson_times(3.0, 40.0, rng(seed))) for seed in range(400)]
    assert np.mean(counts) == pytest.approx(120, rel=0.02)
    assert np.var(counts) == pytest.approx(120, rel=0.25)
    slow, fast = poisson_times(3.0, 1000.0, rng(1)), poisson_times(6.0, 1000.0, rng(1))
    assert slow == pytest.approx(2 * fast[: len(slow)])


@given(st.lists(st.floats(0, 1), max_size=30), st.floats(0.1, 1e5), st.floats(1, 1000))
def test_a_tide_keeps_the_order_and_the_day(shares, duration, ratio):
    times = np.sort(shares) * duration
    moved = with_tide(times, duration, ratio)
    assert list(moved) == sorted(moved)
    assert len(moved) == 0 or 0 <= moved[0] <= moved[-1] <= duration
    # what comes by noon is half of all, as without tides
    assert (moved <= duration / 2 * (1 + 1e-9)).sum() >= (times <= duration / 2).sum()


@pytest.mark.parametrize("ratio", [1.0, 3.0, 10.0])
def test_a_tide_has_its_peak_over_its_trough(ratio):
    moved = with_tide(np.linspace(0, 1000, 1_000_001), 1000.0, ratio)
    counts = np.histogram(moved, bins=200, range=(0, 1000))[0]
    assert counts[99:101].mean() / counts[[0, -1]].mean() == pytest.approx(ratio, rel=0.01)
    assert counts[0] == counts.min()


@given(st.integers(1, 1000), st.floats(0, 1))
def test_lengths_around_a_value(tokens, ratio):
    drawn = around(tokens, ratio).draw(200, rng())
    assert drawn.min() >= max(1, math.floor(tokens * (1 - ratio)))
    assert drawn.max() <= math.ceil(tokens * (1 + ratio))


def test_uniform_reaches_both_ends():
    assert set(Uniform(3, 5).draw(200, rng()).tolist()) == {3, 4, 5}


def test_lognormal_has_the_asked_mean_and_variation():
    drawn = LogNormal(mean=500, cv=0.8).draw(200_000, rng())
    assert drawn.mean() == pytest.approx(500, rel=0.02)
    assert drawn.std() / drawn.mean() == pytest.approx(0.8, rel=0.03)
    clipped = LogNormal(mean=500, cv=2.0, low=100, high=600).draw(10_000, rng())
    assert (clipped.min(), clipped.max()) == (100, 600)


def test_lognormal_of_a_mean_and_a_deviation():
    drawn = log_normal(259.2, 324.9).draw(400_000, rng())
    assert (drawn.mean(), drawn.std()) == (pytest.approx(259.2, rel=0.01), pytest.approx(324.9, rel=0.03))
    assert drawn.min() >= 1
    assert set(log_normal(7, 0).draw(10, rng()).tolist()) == {7}


def test_the_first_lengths_do_not_depend_on_how_many_there_are():
    lengths = Independent(log_normal(100, 50), log_normal(20, 30))
    few, many = lengths.draw(10, rng(3)), lengths.draw(1000, rng(3))
    assert [part.tolist() for part in few] == [part[:10].tolist() for part in many]


def test_empirical_pairs_stay_together():
    pairs = Empirical(np.array([1, 2, 3]), np.array([10, 20, 30]))
    prompt, output = pairs.draw(500, rng())
    assert (output == 10 * prompt).all()
    assert set(prompt.tolist()) == {1, 2, 3}


@pytest.mark.parametrize("columns", ["num_prefill_tokens,num_decode_tokens", "prompt_tokens,completion_tokens"])
def test_length_files(tmp_path, columns):
    path = tmp_path / "lengths.csv"
    path.write_text(f"row,{columns}\n0,7,8\n1,9,10\n")
    read = read_lengths(path)
    assert read.prompt.tolist() == [7, 9]
    assert read.output.tolist() == [8, 10]


def test_length_file_errors(tmp_path):
    path = tmp_path / "lengths.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ConfigError, match="columns a,b, a length file needs num_prefill_tokens"):
        read_lengths(path)
    path.write_text("prompt_tokens,completion_tokens\n5,0\n")
    with pytest.raises(ConfigError, match=r"line 2, column completion_tokens: '0', allowed is .* at least 1"):
        read_lengths(path)
    path.write_text("prompt_tokens,completion_tokens\n")
    with pytest.raises(ConfigError, match="no rows"):
        read_lengths(path)


def test_prefix_popularity():
    uniform = np.bincount(draw_prefixes(100_000, 4, rng()), minlength=4)
    assert uniform / 100_000 == pytest.approx([0.25] * 4, abs=0.01)
    zipf = np.bincount(draw_prefixes(100_000, 3, rng(), zipf=1.0), minlength=3)
    assert zipf / 100_000 == pytest.approx([6 / 11, 3 / 11, 2 / 11], abs=0.01)


def test_synthetic_workload_with_prefixes():
    requests = synthesise(
        50, Independent(Fixed(20), Fixed(4)), rng(), rate=10.0, prefixes=3, prefix_tokens=100, zipf=1.0
    )
    assert [r.number for r in requests] == list(range(50))
    assert {(r.prompt_tokens, r.output_tokens, r.prefix_tokens) for r in requests} == {(120, 4, 100)}
    assert {r.prefix for r in requests} == {(0,), (1,), (2,)}


def test_synthetic_parts_do_not_disturb_each_other():
    lengths = Independent(Uniform(1, 100), Uniform(1, 100))
    plain = synthesise(50, lengths, rng(5), rate=10.0)
    shared = synthesise(50, lengths, rng(5), rate=20.0, prefixes=3, prefix_tokens=10)
    assert [r.output_tokens for r in plain] == [r.output_tokens for r in shared]
    assert [r.prompt_tokens + 10 for r in plain] == [r.prompt_tokens for r in shared]
    assert [r.at for r in plain] == pytest.approx([2 * r.at for r in shared])
    assert not any(r.prefix or r.prefix_tokens for r in plain)
