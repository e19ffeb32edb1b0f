"""Exchanges beside what is computed."""

import threading
from functools import partial

import pytest
import torch

from penstock.core.errors import RankFailed
from penstock.nn.streams import Stream, Turns, by_turns, run


class Units:
    """Those of ranks, as far as exchanges have some to themselves."""

    def __init__(self):
        self.apart = 0

    def set_apart(self, units):
        self.apart = units


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

    units, stream.apart = Units(), 3
    with stream.beside(units):
        assert units.apart == 3
        found = by_turns([steps(stream, first, log, "first"), computing()])
    assert units.apart == 0
    assert [x.item() for x in found] == [1, 0]
    assert log == ["first", "second"]
    assert run(steps(stream, second, log, "alone")).item() == 0, "and at once where it is alone"


@pytest.mark.parametrize("counts", [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_all_take_part_in_two_micro_batches_where_one_has_two(counts):
    """Two ranks, each with so many of its own; all exchange in the same order, and on as many units."""
    words, barrier, order = memoryview(bytearray(16)).cast("q"), threading.Barrier(2, timeout=60), [[], []]

    def lane(rank, name, stream, units):
        def exchange(layer, what):
            order[rank].append((name, layer, what, units.apart))
            barrier.wait()

        for layer in range(3):
            for what in ("dispatch", "combine"):
                wait = stream.begin(partial(exchange, layer, what), 0)
                yield
                wait()
        return f"{rank} {name}"

    def run_rank(rank):
        stream, turns, units = Stream(), Turns(words, rank), Units()
        stream.apart = (4, 8)[rank] if counts[rank] > 1 else 0
        lanes = [lane(rank, name, stream, units) for name in range(counts[rank])]
        found[rank] = turns.run(lanes, lambda: lane(rank, 1, stream, units), stream, units), turns.two
        assert units.apart == 0

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
        apart = {(1, 1): 0, (2, 1): 4, (1, 2): 8, (2, 2): 8}[counts]
        assert [of for *_, of in order[0]] == [0, *[apart] * (len(order[0]) - 1)]
        assert len(order[0]) == 6 * max(counts)
        order[:] = [], []


def test_times_are_counted_and_failures_come_to_whoever_waits():
    stream, asked = Stream(lambda size: asked.append(size) or 0.01), []

    def fails():
        raise RankFailed("rank 1 has failed")

    for _ in range(2):
        with stream.step():
            assert run(steps(stream, lambda: torch.ones(1), [], "")).item() == 1
    assert asked == [8, 8]
    last = stream.last()
    assert last.took >= last.waited >= last.busy >= 0.01
    assert last.busy < stream.busy
    assert last.worked < 0.01, "it slept"
    with stream.beside(Units()), pytest.raises(RankFailed):
        by_turns([steps(stream, fails, [], "")] * 1)
