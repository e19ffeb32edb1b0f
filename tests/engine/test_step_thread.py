"""The thread that computes: order, errors, when it tells, and that it ends."""

import gc
import select
import threading

import pytest

from penstock.engine.step_thread import StepThread


def rings(thread, seconds=0.0) -> bool:
    return bool(select.select([thread], [], [], seconds)[0])


def test_outcomes_come_in_order_and_errors_where_they_belong():
    thread = StepThread()
    for i in range(3):
        thread.give(lambda i=i: 6 // (i - 1))
    assert thread.take(wait=True) == -6
    with pytest.raises(ZeroDivisionError):
        thread.take(wait=True)
    assert thread.take(wait=True) == 6
    assert thread.take(wait=False) is None
    assert not thread.ready


def test_what_has_ended_is_told_when_the_next_job_computes():
    thread, steps = StepThread(), [threading.Event() for _ in range(4)]

    def first():
        assert steps[0].wait(20)
        return 1

    def second():
        steps[1].set()
        assert steps[2].wait(20)
        bell.computing()
        assert steps[3].wait(20)
        return 2

    bell = thread.bell
    thread.give(first)
    thread.give(second)
    assert not rings(thread)
    assert thread.take(wait=False) is None
    steps[0].set()
    assert steps[1].wait(20)
    assert not rings(thread), "the second needs the interpreter"
    assert thread.ready, "who looks finds it all the same"
    steps[2].set()
    assert rings(thread, 20)
    assert thread.take(wait=True) == 1
    assert not rings(thread)
    assert thread.take(wait=False) is None
    steps[3].set()
    assert rings(thread, 20), "nothing follows"
    assert thread.take(wait=True) == 2


def test_settling_leaves_outcomes_and_clearing_does_not():
    thread = StepThread()
    for i in range(5):
        thread.give(lambda i=i: i + 1)
    thread.settle()
    assert [thread.take(wait=False) for _ in range(5)] == [1, 2, 3, 4, 5]
    thread.give(lambda: 1)
    thread.clear()
    assert thread.take(wait=False) is None
    thread.give(lambda: 2)
    assert thread.take(wait=True) == 2


def test_it_ends_with_its_owner():
    thread = StepThread()
    thread.give(lambda: 1)
    (worker,) = [t for t in threading.enumerate() if t.name == "penstock-step" and works_for(t, thread)]
    del thread
    gc.collect()
    worker.join(20)
    assert not worker.is_alive()


def works_for(worker, thread) -> bool:
    return thread._given in worker._args
