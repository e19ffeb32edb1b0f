"""Exchanges beside what is computed."""

import threading

import pytest
import torch

from penstock.core.errors import RankFailed
from penstock.nn.streams import Stream, Turns, by_turns, run


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


@pytest.mark.parametrize("counts", [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_all_take_part_in_two_micro_batches_where_one_has_two(counts):
    """Two ranks, each with so many of its own; all exchange in the same order."""
    words, barrier, order = memoryview(bytearray(16)).cast("q"), threading.Barrier(2, timeout=60), [[], []]

    def lane(rank, name, stream):
        for layer in range(3):
            for what in ("dispatch", "combine"):
                wait = stream.begin(lambda step=(name, layer, what): order[rank].append(step) or barrier.wait(), 0)
                yield
                wait()
        return f"{rank} {name}"

    def run_rank(rank):
        stream, turns = Stream(), Turns(words, rank)
        lanes = [lane(rank, name, stream) for name in range(counts[rank])]
        found[rank] = turns.run(lanes, lambda: lane(rank, 1, stream), stream), turns.two

    for _ in range(3):
        found = [None, None]
        threads = [threading.Thread(target=run_rank, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for rank, (results, two) in enumerate(found):
            assert results == [f"{rank} {name}" for name in range(counts[rank])]
            assert two == (max(counts) == 2)
        assert order[0] == order[1]
        assert len(order[0]) == 6 * max(counts)
        order[:] = [], []


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
