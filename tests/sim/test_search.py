"""The search for the greatest scale, over made-up clusters."""

import asyncio
import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.sim.search import DOUBLING, HIGHEST, LOWEST, STEP, Ladder, Trial, at_rate, searched


@dataclass
class Fake:
    """Keeps up to `edge`; a short run makes it look `rosy` times as great. No more than `most` is worth anything.
    The steeper, the more of a cliff the edge is."""

    edge: float
    rosy: float = 1.0
    most: float = float("inf")
    steep: float = 5.0
    asked: list[tuple[float, float]] = field(default_factory=list)
    guessed: list[tuple[float, float]] = field(default_factory=list)

    async def measure(self, scale, share):
        self.asked.append((scale, share))
        edge = self.edge * (self.rosy if share < 1 else 1.0)
        attainment = 0.9 * min(edge / scale, 1.2) ** self.steep
        return Trial(scale <= edge, min(1.0, attainment), min(scale, self.most))

    def guess(self, scale, share):
        self.guessed.append((scale, share))


def search(fake, short=0.1, near=None, start=1.0, **more):
    return asyncio.run(Ladder(fake, start, 0.9, **more).search(short, near))


@given(
    edge=st.floats(0.2, 500),
    rosy=st.floats(0.3, 3),
    start=st.floats(0.2, 20),
    short=st.sampled_from([0.1, 1.0]),
    near=st.one_of(st.none(), st.integers(-60, 60)),
    steep=st.floats(0.1, 1000),
)
def test_whole_simulations_have_the_last_word(edge, rosy, start, short, near, steep):
    fake = Fake(edge, rosy, steep=steep)
    found = search(fake, short, near, start)
    assert found.best <= edge < found.missed <= found.best * STEP * (1 + 1e-9)
    assert {(found.best, 1.0), (found.missed, 1.0)} <= set(fake.asked)
    assert found.best == pytest.approx(start * STEP**found.rung)


@given(edge=st.floats(0.05, 200), rosy=st.floats(0.92, 1.12), steep=st.sampled_from([0.3, 3.0, 30.0]))
def test_a_rough_look_saves_whole_simulations(edge, rosy, steep):
    fake = Fake(edge, rosy, steep=steep)
    search(fake)
    assert sum(share == 1 for _, share in fake.asked) <= 8


@given(edge=st.floats(0.05, 200), away=st.integers(-3, 3))
def test_another_seed_begins_where_the_first_one_ended(edge, away):
    first = search(Fake(edge))
    fake = Fake(edge * STEP**away)
    second = search(fake, near=first.rung)
    assert abs(second.rung - first.rung - away) <= 1
    assert len(fake.asked) <= 6
    assert all(share == 1 for _, share in fake.asked)


def test_what_is_never_kept_and_what_always_is():
    never = search(Fake(0.0))
    assert never.best is None
    assert never.missed == pytest.approx(STEP**LOWEST)
    always = search(Fake(float("inf")))
    assert always.best == pytest.approx(STEP**HIGHEST)
    assert always.missed is None


@given(most=st.floats(1.0, 300), start=st.floats(0.1, 1.0))
def test_nothing_is_tried_beyond_the_greatest_scale(most, start):
    fake = Fake(float("inf"))
    found = search(fake, start=start, most=most)
    assert most / STEP * (1 - 1e-9) <= found.best <= most * (1 + 1e-9)
    assert max(scale for scale, _ in [*fake.asked, *fake.guessed]) <= most * (1 + 1e-9)


def test_it_ends_where_more_load_brings_no_more():
    """As offline work that queues without anybody minding."""
    fake = Fake(float("inf"), most=5.0)
    found = search(fake)
    assert found.missed is None
    assert 5.0 <= found.best <= 5.0 * STEP ** (3 * DOUBLING)
    assert max(scale for scale, _ in fake.asked) <= 5.0 * STEP ** (3 * DOUBLING)


def test_guesses_change_nothing_and_are_often_right():
    rng, right, guesses = random.Random(1), 0, 0
    for _ in range(50):
        fake = Fake(rng.uniform(0.1, 100))
        search(fake)
        right += len(set(fake.guessed) & set(fake.asked))
        guesses += len(set(fake.guessed))
    assert right > 0.2 * guesses


def test_noise_leaves_a_kept_rung_below_a_missed_one():
    class Noisy(Fake):
        async def measure(self, scale, share):
            await super().measure(scale, share)
            kept = scale <= 3 or 3.4 < scale < 3.6
            return Trial(kept, 0.9 + 0.01 * kept, scale)

    for start in (0.5, 1.0, 1.7, 3.5, 8.0):
        found = search(Noisy(3.0), start=start)
        assert found.missed == pytest.approx(found.best * STEP)
        assert found.best <= 3 or 3.4 < found.best < 3.6


# --- several seeds as one row


def test_a_search_is_the_seed_in_the_middle():
    rows = {0: {"rate": 7.0, "ttft": 1}, 1: {"rate": 5.0, "ttft": 2}, 2: {"rate": 6.0, "ttft": 3}}
    found = searched(rows, "rate")
    assert (found["seed"], found["rate"], found["ttft"], found["spread"]) == (2, 6.0, 3, [5.0, 7.0])
    assert searched(rows | {1: {"rate": None, "ttft": 2}}, "rate")["spread"] is None


def test_a_rate_is_medians():
    rows = {0: {"attainment": 0.9, "ttft": None}, 1: {"attainment": 0.5, "ttft": 4}, 2: {"attainment": 0.8, "ttft": 2}}
    found = at_rate(20.0, rows)
    assert (found["rate"], found["attainment"], found["ttft"], found["spread"]) == (20.0, 0.8, 3, [0.5, 0.9])
