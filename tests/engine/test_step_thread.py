"""The thread that computes: order, errors, when it tells, and that it ends."""

import gc
import select
import threading

import pytest

from penstock.engine.executor.inline import StepThread


def rings(thread, seconds=0.0) -> bool:
    return bool(select.select([thread], [], [], seconds)[0])


def test_outcomes_come_in_order_and_errors_where_they_belong():
    thread = StepThread()
    jobs = [thread.give(lambda i=i: 6 // (i - 1)) for i in range(3)]
    assert jobs[2].result() == 6
    assert all(job.done() for job in jobs)
    assert jobs[0].result() == -6
    with pytest.raises(ZeroDivisionError):
        jobs[1].result()
    assert not rings(thread)


def test_what_has_ended_is_told_when_the_next_job_computes():
    thread, steps = StepThread(), [threading.Event() for _ in range(4)]

    def compute_first():
        assert steps[0].wait(20)
        return 1

    def compute_second():
        steps[1].set()
        assert steps[2].wait(20)
        bell.computing()
        assert steps[3].wait(20)
        return 2

    bell = thread.bell
    first, second = thread.give(compute_first), thread.give(compute_second)
    assert not rings(thread)
    assert not first.done()
    steps[0].set()
    assert steps[1].wait(20)
    assert not rings(thread), "the second needs the interpreter"
    assert first.done(), "who looks finds it all the same"
    steps[2].set()
    assert rings(thread, 20)
    assert first.result() == 1
    assert not rings(thread)
    assert not second.done()
    steps[3].set()
    assert rings(thread, 20), "nothing follows"
    assert second.result() == 2


def test_settling_waits_for_all_and_leaves_outcomes():
    thread = StepThread()
    jobs = [thread.give(lambda i=i: i + 1) for i in range(5)]
    thread.settle()
    assert all(job.done() for job in jobs)
    assert [job.result() for job in jobs] == [1, 2, 3, 4, 5]
    thread.settle()


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
