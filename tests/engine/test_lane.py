"""The thread that computes: order, errors, when it tells, and that it ends."""

import gc
import select
import threading

import pytest

from penstock.engine.lane import Lane


def rings(lane, seconds=0.0) -> bool:
    return bool(select.select([lane], [], [], seconds)[0])


def test_outcomes_come_in_order_and_errors_where_they_belong():
    lane = Lane()
    for i in range(3):
        lane.give(lambda i=i: 6 // (i - 1))
    assert lane.take(wait=True) == -6
    with pytest.raises(ZeroDivisionError):
        lane.take(wait=True)
    assert lane.take(wait=True) == 6
    assert lane.take(wait=False) is None
    assert not lane.ready


def test_what_has_ended_is_told_when_the_next_job_computes():
    lane, steps = Lane(), [threading.Event() for _ in range(4)]

    def first():
        assert steps[0].wait(20)
        return 1

    def second():
        steps[1].set()
        assert steps[2].wait(20)
        lane_bell.computing()
        assert steps[3].wait(20)
        return 2

    lane_bell = lane.bell
    lane.give(first)
    lane.give(second)
    assert not rings(lane)
    assert lane.take(wait=False) is None
    steps[0].set()
    assert steps[1].wait(20)
    assert not rings(lane), "the second needs the interpreter"
    assert lane.ready, "who looks finds it all the same"
    steps[2].set()
    assert rings(lane, 20)
    assert lane.take(wait=True) == 1
    assert not rings(lane)
    assert lane.take(wait=False) is None
    steps[3].set()
    assert rings(lane, 20), "nothing follows"
    assert lane.take(wait=True) == 2


def test_settling_leaves_outcomes_and_clearing_does_not():
    lane = Lane()
    for i in range(5):
        lane.give(lambda i=i: i + 1)
    lane.settle()
    assert [lane.take(wait=False) for _ in range(5)] == [1, 2, 3, 4, 5]
    lane.give(lambda: 1)
    lane.clear()
    assert lane.take(wait=False) is None
    lane.give(lambda: 2)
    assert lane.take(wait=True) == 2


def test_it_ends_with_its_owner():
    lane = Lane()
    lane.give(lambda: 1)
    (thread,) = [t for t in threading.enumerate() if t.name == "penstock-step" and lane_of(t, lane)]
    del lane
    gc.collect()
    thread.join(20)
    assert not thread.is_alive()


def lane_of(thread, lane) -> bool:
    return lane._given in thread._args
