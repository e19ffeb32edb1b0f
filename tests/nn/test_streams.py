"""Exchanges beside what is computed."""

import threading

import pytest
import torch

from penstock.core.errors import RankFailed
from penstock.nn.streams import Stream, by_turns, run


def steps(stream, exchange, log, name):
    log.append(name)
    wait = stream.begin(exchange, 8)
    yield
    return wait()


def test_what_one_micro_batch_exchanges_goes_on_while_the_other_computes():
    """The first one's exchange ends only after the second has begun to compute."""
    stream, computes, log = Stream(), threading.Event(), []

    def first():
        assert computes.wait(60)
        return torch.ones(1)

    def second():
        return torch.zeros(1)

    def computing():
        computes.set()
        return (yield from steps(stream, second, log, "second"))

    with stream.beside():
        found = by_turns([steps(stream, first, log, "first"), computing()])
    assert [x.item() for x in found] == [1, 0]
    assert log == ["first", "second"]
    assert run(steps(stream, second, log, "alone")).item() == 0, "and at once where it is alone"


def test_times_are_counted_and_failures_come_to_whoever_waits():
    stream, asked = Stream(lambda size: asked.append(size) or 0.01), []

    def fails():
        raise RankFailed("rank 1 has failed")

    assert run(steps(stream, lambda: torch.ones(1), [], "")).item() == 1
    assert asked == [8]
    assert stream.busy >= 0.01
    assert stream.waited >= stream.busy
    with stream.beside(), pytest.raises(RankFailed):
        by_turns([steps(stream, fails, [], "")] * 1)
