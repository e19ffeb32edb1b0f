"""Arrivals, lengths, prefixes, and workloads put together from them."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import ConfigError
from penstock.workload.arrivals import arrival_times
from penstock.workload.lengths import Empirical, Fixed, Independent, LogNormal, Uniform, around, read_lengths
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
