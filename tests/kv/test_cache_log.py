"""How often an instance tells what has changed in its cache."""

import pytest

from penstock.kv.cache_log import LATEST, MANY, SOONEST, CacheLog, DeltaPace


def keys(*numbers):
    return [number.to_bytes(16, "big") for number in numbers]


@pytest.fixture
def log():
    return CacheLog()


def test_nothing_is_due_while_nothing_changes(log):
    pace = DeltaPace()
    assert pace.due([log]) == float("inf")
    log.note(keys(1), [])
    log.note([], keys(1))
    assert pace.due([log]) == float("inf"), "it came and went"


def test_the_first_change_is_told_at_once_and_few_more_are_gathered(log):
    pace = DeltaPace()
    log.note(keys(1), [])
    assert pace.due([log]) < 0.0
    assert log.take() == (keys(1), [])
    pace.told(10.0)
    log.note(keys(2), [])
    assert pace.due([log]) == 10.0 + LATEST
    pace.hurries = True
    assert pace.due([log]) == 10.0 + SOONEST
    pace.told(11.0)
    assert pace.due([log]) == 11.0 + LATEST, "the hurry is over"


def test_much_is_told_soon_in_whichever_tiers_it_changed(log):
    pace, below = DeltaPace(), CacheLog()
    pace.told(0.0)
    log.note(keys(*range(MANY - 2)), [])
    below.note([], keys(1))
    assert pace.due([log, below]) == LATEST
    below.note(keys(2), [])
    assert pace.due([log, below]) == SOONEST
