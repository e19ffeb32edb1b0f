"""How long outputs are, while some go on."""

from collections import Counter
from statistics import fmean

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.sched.cluster.lengths import Lengths

SHARES = [(i + 0.5) / 1000 for i in range(1000)]


def cut(lengths, ages):
    """Those that have ended, and how far the others are, where one token takes one unit of age."""
    pairs = list(zip(lengths, ages, strict=True))
    return [n for n, age in pairs if n <= age], [int(age) for n, age in pairs if n > age]


@pytest.mark.parametrize("kind", ["exponential", "lognormal"])
def test_what_has_not_ended_yet_is_not_left_out(kind):
    """Requests that came over a time in which few of the long ones have ended."""
    rng = np.random.default_rng(0)
    drawn = rng.exponential(100, 4000) if kind == "exponential" else rng.lognormal(4.1, 1.0, 4000)
    lengths = [1 + int(n) for n in drawn]
    ended, so_far = cut(lengths, rng.uniform(0, 300, 4000))
    assert fmean(ended) < 0.8 * fmean(lengths), "those alone that have ended are too short"
    known = Lengths(ended, so_far)
    assert fmean(known.above(0, share) for share in SHARES) == pytest.approx(fmean(lengths), rel=0.1)
    for tokens in (50, 200):
        longer = [n for n in lengths if n > tokens]
        assert fmean(known.above(tokens, share) for share in SHARES) == pytest.approx(fmean(longer), rel=0.1)


def test_by_hand():
    """One of four goes on after 2 tokens, so the two longer ones stand for three."""
    known = Lengths([1, 5, 9], [2])
    assert [known.above(0, share) for share in (0.2, 0.3, 0.6, 0.65, 0.99)] == [1, 5, 5, 9, 9]
    assert [known.above(5, share) for share in (0.01, 0.99)] == [9, 9]
    assert known.above(9, 0.5) == 9 + 6, "17 tokens, and three ends"
    assert Lengths([2], [10]).above(0, 0.6) == 10 + 12


@given(st.lists(st.integers(1, 50), min_size=1), st.lists(st.integers(0, 50)), st.integers(0, 60), st.data())
def test_lengths_are_longer_than_what_there_is(ended, so_far, tokens, data):
    known = Lengths(ended, so_far)
    low, high = sorted(data.draw(st.floats(0.001, 0.999)) for _ in range(2))
    assert tokens < known.above(tokens, low) <= known.above(tokens, high)


@given(st.lists(st.integers(1, 50), min_size=1))
def test_where_all_have_ended_it_is_they(ended):
    shares = [(i + 0.5) / len(ended) for i in range(len(ended))]
    assert Counter(Lengths(ended, []).above(0, share) for share in shares) == Counter(ended)
