"""What a priority is worth as targets."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import ConfigError
from penstock.core.service_level import Bounds, Range
from penstock.sched.cluster.priority_slo import PriorityMapping

CLASSES = range(4)
BOUNDS = {p: Bounds(Range(0.5 * (p + 1), 1.0 * (p + 1)), Range(0.05 * (p + 1), 0.1 * (p + 1))) for p in CLASSES}
LOOSE = {0: Bounds(Range(0.001, 1000.0), Range(0.001, 1000.0))}


def test_before_anything_is_measured_a_class_gets_its_easiest_targets():
    assert PriorityMapping(BOUNDS).target(2, 0) == (3.0, pytest.approx(0.3))
    assert PriorityMapping(BOUNDS).target(9, 0) == (4.0, pytest.approx(0.4)), "the nearest class that is known"


def test_the_place_in_the_window_follows_the_counts_of_higher_priorities_and_who_of_its_own_is_ahead():
    mapping = PriorityMapping(LOOSE)
    for i in range(10):
        mapping.observe(0, 1.0 + i, 0.1, queued=0.0)
    for i in range(10):
        mapping.observe(1, 20.0 + i, 0.2, queued=0.0)
    assert mapping.target(0, 0) == (1.0, 0.1)
    assert mapping.target(0, 3) == (4.0, 0.1), "behind three of its class"
    assert mapping.target(0, 99)[0] == 10.0, "never beyond its own class"
    assert mapping.target(1, 0) == (20.0, 0.2), "behind all ten of the higher class"
    assert mapping.target(1, 4) == (24.0, 0.2)
    assert mapping.target(2, 0)[0] == 29.0, "behind everything"


def test_a_wave_of_queueing_that_is_over_is_taken_off_the_target():
    mapping = PriorityMapping(LOOSE)
    for _ in range(3):
        mapping.observe(0, 5.0, None, queued=4.0)
    assert mapping.target(0, 0) == (5.0, 1000.0), "it still queues; nothing is known of its tokens"
    mapping.observe(0, 1.5, None, queued=0.5)
    assert mapping.target(0, 1)[0] == pytest.approx(1.5)
    mapping.observe(0, 9.0, None, queued=8.0)
    assert mapping.target(0, 2)[0] == 5.0, "that the newest queues longer than its reference changes nothing"


def test_a_target_is_never_tighter_than_anybody_asks_for():
    mapping = PriorityMapping(BOUNDS)
    for _ in range(5):
        mapping.observe(3, 0.2, 0.01, queued=0.0)
    assert mapping.target(3, 0) == (2.0, 0.2)


def test_the_window_forgets():
    mapping = PriorityMapping(LOOSE, window=4)
    for _ in range(4):
        mapping.observe(0, 9.0, 0.9, queued=3.0)
    for _ in range(4):
        mapping.observe(1, 1.0, 0.1, queued=0.0)
    assert mapping.target(0, 0) == (1.0, 0.1), "nothing of its own class is left, nor its queueing"
    assert mapping.target(1, 0) == (1.0, 0.1)


def test_the_staircase():
    """Figure 7: the lowest class alone gets its tightest targets; higher ones that join put it off, to its easiest."""
    mapping = PriorityMapping(BOUNDS)
    promised = []
    for newest in reversed(CLASSES):
        active = range(newest, 4)
        for _ in range(150):
            for priority in active:
                # under contention a class is as slow as there are classes before it
                latency = 0.9 * (1 + priority - newest)
                mapping.observe(priority, latency, latency / 10, queued=0.0)
        promised.append(mapping.target(3, 5)[0])
        targets = [mapping.target(p, 5)[0] for p in active]
        assert targets == sorted(targets), "a higher priority never gets the looser target"
    assert promised[0] == BOUNDS[3].ttft.low, "alone it is promised as much as it may be"
    assert promised == sorted(promised)
    assert promised[-1] > promised[0]


@given(
    st.lists(st.tuples(st.integers(0, 3), st.floats(0.0, 9.0), st.floats(0.0, 1.0), st.floats(0.0, 9.0)), max_size=60),
    st.integers(1, 20),
    st.integers(0, 9),
)
def test_targets_stay_in_bounds_and_depend_on_the_window_only(completed, window, ahead):
    long, short = PriorityMapping(BOUNDS, window), PriorityMapping(BOUNDS, window)
    for each in completed:
        long.observe(*each)
    for each in completed[-window:]:
        short.observe(*each)
    for priority in CLASSES:
        ttft, tpot = long.target(priority, ahead)
        assert (ttft, tpot) == short.target(priority, ahead)
        assert BOUNDS[priority].ttft.low <= ttft <= BOUNDS[priority].ttft.high
        assert BOUNDS[priority].tpot.low <= tpot <= BOUNDS[priority].tpot.high


@pytest.mark.parametrize("bounds", [{}, {1: Bounds(Range(2.0, 1.0), Range(0.1, 0.2))}])
def test_bad_bounds_are_refused(bounds):
    with pytest.raises(ConfigError, match="priorit"):
        PriorityMapping(bounds)


def test_what_a_sequence_waited_for_a_place_is_not_taken_off_its_time_per_token():
    mapping = PriorityMapping(LOOSE)
    for queued in (8.0, 8.0, 8.0, 0.0):
        mapping.observe(0, 10.0, 0.2, queued=queued)
    assert mapping.target(0, 0) == (pytest.approx(2.0), 0.2)
