"""Which slow instance is restarted, and when."""

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.sched.cluster import Pace, Restart, SlowInstances
from penstock.sched.cluster.slow import BACKOFF, BESIDE, GIVES_UP, LOOK, MOST_BACKOFF, SETTLES, SLOW

AFTER = 30.0


class Fleet:
    """Instances with speeds, of which those that are restarted come back after 5 s."""

    def __init__(self, *, after=AFTER, least=1, **speeds):
        self.slow = SlowInstances(after, least)
        self.speeds, self.roles, self.idle = dict(speeds), {}, set()
        self.lives = dict.fromkeys(speeds, 1)
        self.away = {}  # until when
        self.models = {}  # ms of a step by their own models, of those that have measured them
        self.now, self.restarts = 0.0, []

    def paces(self):
        return [
            Pace(name, self.lives[name], self.roles.get(name, "any"), speed, name not in self.idle, *self.kind(name))
            for name, speed in self.speeds.items()
            if name not in self.away
        ]

    def kind(self, name):
        return ("cpu", self.models[name]) if name in self.models else ()

    def run(self, seconds, back=5.0):
        """Names of those that were restarted."""
        began, until = len(self.restarts), self.now + seconds
        while self.now < until:
            self.now += 0.5
            for name in [name for name, due in self.away.items() if due <= self.now]:
                del self.away[name]
                self.lives[name] += 1
            restart = self.slow.look(self.now, self.paces())
            if restart is not None:
                assert isinstance(restart, Restart)
                assert not self.away, "one at a time"
                self.restarts.append((self.now, restart.name))
                self.away[restart.name] = self.now + back
        return [name for _, name in self.restarts[began:]]


def test_one_that_is_slow_for_a_while_is_restarted():
    fleet = Fleet(a=1.0, b=0.3, c=0.95)
    assert fleet.run(AFTER) == []
    assert fleet.slow.verdicts == {"b": "0.30 of its model's speed, others 0.97; for 30 s"}
    assert fleet.run(1) == ["b"]
    assert fleet.slow.verdicts["b"].endswith("it is drained and started again")
    fleet.speeds["b"] = None  # too few steps yet
    fleet.run(10)
    fleet.speeds["b"] = 1.0
    assert fleet.run(2 * BACKOFF) == []
    assert fleet.slow.verdicts == {}


@pytest.mark.parametrize(
    "speeds",
    [
        {"a": 0.3, "b": 0.35, "c": 0.4},  # the machine, or the model
        {"a": 1.0, "b": 0.4, "c": 1.0},  # not so slow
        {"a": 0.3},  # nobody is beside it
        {"a": 0.3, "b": None, "c": None},
        {"a": 1.0, "b": None},
    ],
)
def test_who_is_not_slow(speeds):
    fleet = Fleet(**speeds)
    assert fleet.run(20 * AFTER) == []
    assert fleet.slow.verdicts == {}


def test_only_work_counts_and_it_has_to_be_slow_all_along():
    fleet = Fleet(a=1.0, b=0.2)
    fleet.run(0.9 * AFTER)
    fleet.idle.add("b")
    assert fleet.run(10 * AFTER) == [], "what it says is old"
    fleet.idle.clear()
    fleet.speeds["b"] = 0.9
    fleet.run(1)
    fleet.speeds["b"] = 0.2
    assert fleet.run(0.9 * AFTER) == []
    fleet.now += 100 * AFTER  # whoever looks stood still
    assert fleet.slow.look(fleet.now, fleet.paces()) is None
    assert fleet.run(AFTER) == ["b"]


def test_the_others_have_to_be_able_to_stand_in_for_it():
    fleet = Fleet(p0=1.0, p1=0.2, d0=0.1, d1=1.0)
    fleet.roles = {"p0": "prefill", "p1": "prefill", "d0": "decode", "d1": "decode"}
    fleet.slow._least = 4
    assert fleet.run(2 * AFTER) == []
    assert fleet.slow.verdicts["d0"].endswith("others cannot stand in for it")
    fleet.slow._least = 3
    assert fleet.run(10) == ["d0"], "the slowest first"
    assert fleet.run(SETTLES + 10) == ["p1"]


def test_one_whose_model_is_slow_is_slow_beside_others_of_its_kind():
    fleet = Fleet(a=1.0, b=0.9, c=1.0)
    fleet.models = {"a": 10.0, "b": 40.0, "c": 10.0}
    assert fleet.run(2 * AFTER) == ["b"]
    assert fleet.restarts[0][0] == pytest.approx(AFTER, abs=1)
    fleet.models = {"b": 40.0}  # others have another kind of device
    assert fleet.run(3 * BACKOFF) == []
    fleet.models = {"a": 40.0, "b": 40.0, "c": 10.0}
    fleet.speeds |= {"b": 1.0, "c": 4.0}  # whoever measures a busy device is faster later
    assert fleet.run(3 * BACKOFF)[:1] in (["a"], ["b"])


def test_what_somebody_else_has_restarted_waits_as_long():
    fleet = Fleet(a=1.0, b=0.2, c=1.0)
    fleet.slow.recall(0.0, "b", 2, ago=100.0)
    fleet.slow.recall(0.0, "c", 1, ago=2 * BACKOFF)  # long ago
    assert fleet.run(2 * BACKOFF - 110) == []
    assert fleet.run(20) == ["b"]
    assert (fleet.slow.times("b"), fleet.slow.times("c")) == (3, 0)
    fleet.slow.recall(fleet.now, "b", 2, ago=0.0)
    assert fleet.slow.times("b") == 3, "it knows better"


def test_a_restart_that_does_not_help_is_repeated_later_and_later():
    fleet = Fleet(a=1.0, b=0.2, c=1.0)
    fleet.run(8 * BACKOFF)
    at = [when for when, _ in fleet.restarts]
    assert [round((later - earlier) / BACKOFF, 1) for earlier, later in pairwise(at)] == [1, 2, 4]
    assert "it was restarted 4 times in vain, and is again in" in fleet.slow.verdicts["b"]
    fleet.speeds["b"] = 1.0
    fleet.run(9 * BACKOFF)  # that is forgotten once it has long been well
    fleet.speeds["b"] = 0.2
    before = len(fleet.restarts)
    assert fleet.run(2 * AFTER) == ["b"]
    assert fleet.run(1.5 * BACKOFF) == ["b"]
    assert len(fleet.restarts) == before + 2


def test_one_that_does_not_come_back_does_not_keep_others_waiting_for_ever():
    fleet = Fleet(a=1.0, b=0.2, c=1.0, d=1.0)
    assert fleet.run(2 * AFTER, back=1e9) == ["b"]
    fleet.speeds["c"] = 0.1
    fleet.away["b"] = 1e9
    assert fleet.run(GIVES_UP - 2 * AFTER) == []
    assert fleet.slow.verdicts["c"].endswith("b is restarted first")
    fleet.away.clear()
    assert fleet.run(SETTLES + 2 * AFTER)[:1] == ["c"]


SPEEDS = st.one_of(st.none(), st.floats(0.01, 1.5))


@settings(max_examples=60)
@given(st.lists(st.dictionaries(st.sampled_from("abcde"), SPEEDS, min_size=5), min_size=1, max_size=40))
def test_whatever_they_say_restarts_are_few_and_of_slow_ones(looks):
    """Speeds that change every 20 s."""
    fleet = Fleet(after=10.0, least=2, **dict.fromkeys("abcde", 1.0))
    for speeds in looks:
        fleet.speeds.update(speeds)
        for name in fleet.run(20.0):
            others = [s for n, s in fleet.speeds.items() if n != name and s is not None]
            assert fleet.speeds[name] <= SLOW
            assert fleet.speeds[name] <= BESIDE * max(others)
    for (earlier, _), (later, _) in pairwise(fleet.restarts):
        assert later - earlier >= SETTLES
    for name, count in Counter(name for _, name in fleet.restarts).items():
        at = [when for when, which in fleet.restarts if which == name]
        assert all(later - earlier >= BACKOFF for earlier, later in pairwise(at)), count
    assert LOOK < AFTER < BACKOFF < MOST_BACKOFF
