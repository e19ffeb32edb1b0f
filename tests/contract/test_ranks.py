"""What ranks exchange: the same bits on all of them, whatever backend computes it; and an error instead of a wait for
one that does not come."""

import mmap
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from penstock.core.errors import RankFailed
from penstock.nn import native, ops
from penstock.nn.ops import OPS
from penstock.nn.ranks import SharedMemoryRanks

pytestmark = pytest.mark.skipif(native.missing() is not None, reason="ranks of one machine meet in native code")


def ranks_of(size: int) -> list[SharedMemoryRanks]:
    memory = mmap.mmap(-1, SharedMemoryRanks.bytes_for(size))
    return [SharedMemoryRanks(memory, rank, size) for rank in range(size)]


def together(ranks, function):
    """What each rank's thread returns."""
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(function, ranks))


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_a_sum_is_the_references_on_every_rank(size, dtype):
    torch.manual_seed(0)
    shapes = [(1, 1), (3, 17), (1, 1024), (300, 1031), (2, 5)]  # the fourth takes several meetings
    own = [[torch.randn(shape).to(dtype) for shape in shapes] for _ in range(size)]
    ranks = ranks_of(size)

    def sums(rank):
        return [ops.all_reduce(x.clone(), rank) for x in own[rank.rank]]

    ours = together(ranks, sums)
    with OPS["all_reduce"].using("reference"):
        theirs = together(ranks, sums)
    for rank in range(size):
        assert all(map(torch.equal, ours[rank], theirs[0]))
    wide = [sum(x.float() for x in parts) for parts in zip(*own, strict=True)]
    assert all(torch.allclose(a.float(), b, rtol=2e-2, atol=2e-2) for a, b in zip(ours[0], wide, strict=True))


def test_gathering_brings_each_ranks_own():
    ranks = ranks_of(3)
    found = together(ranks, lambda rank: [rank.gather(torch.full((n, 7), rank.rank)) for n in (1, 20_000)])
    for own in found:
        assert [x.shape for x in own] == [(3, 1, 7), (3, 20_000, 7)]
        assert all((x == torch.arange(3)[:, None, None]).all() for x in own)


def test_what_is_for_each_comes_to_each():
    """Nothing, a little, or what takes several meetings."""
    counts = [[0, 3, 100_000], [1, 0, 0], [20_000, 7, 90_000]]
    ranks = ranks_of(3)

    def exchange(rank):
        xs = [torch.full((count, 3), 10 * rank.rank + to) for to, count in enumerate(counts[rank.rank])]
        return [rank.all_to_all(xs), rank.all_to_all([x[:1] for x in xs])]

    for to, found in enumerate(together(ranks, exchange)):
        for came, most in zip(found, (1 << 30, 1), strict=True):
            for of, x in enumerate(came):
                assert x.shape == (min(most, counts[of][to]), 3)
                assert (x == 10 * of + to).all()


def test_a_step_is_begun_by_whoever_comes_first():
    first, second = ranks_of(2)
    first.begin_step(3)
    for rank in (first, second):
        rank.await_step(3)
    second.begin_step(2)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(first.await_step, 4)
        assert not waiting.done()
        second.begin_step(5)
        waiting.result(20)
        waiting = pool.submit(first.await_step, 6)
        second.fail(1)
        with pytest.raises(RankFailed):
            waiting.result(20)


@pytest.mark.parametrize(
    "exchange", [lambda rank: ops.all_reduce(torch.zeros(0, 4), rank), lambda rank: rank.gather(torch.zeros(0))]
)
def test_an_exchange_of_nothing_is_a_meeting(exchange):
    """At the end of a step of which only K and V is wanted: then all have written theirs."""
    first, second = ranks_of(2)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(exchange, first)
        while first.awaits(0) is None:
            assert not waiting.done()
        exchange(second)
        waiting.result(20)


def test_a_rank_that_fails_ends_every_wait():
    ranks = ranks_of(3)
    started = threading.Barrier(3)

    def wait(rank):
        started.wait(20)
        with pytest.raises(RankFailed, match="rank 2 has failed"):
            ops.all_reduce(torch.zeros(4), rank)
        with pytest.raises(RankFailed):  # nor does a later one begin
            rank.gather(torch.zeros(4))
        return True

    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(wait, rank) for rank in ranks[:2]]
        started.wait(20)
        while ranks[0].awaits(0) is None and ranks[0].awaits(1) is None:
            pass
        assert {ranks[0].awaits(0), ranks[0].awaits(1)} <= {0, 1, 2, None}
        ranks[0].fail(2)
        assert all(future.result(20) for future in waiting)


def test_ranks_that_do_not_do_the_same_are_told():
    ranks = ranks_of(2)

    def exchange(rank):
        with pytest.raises(RankFailed, match="do not compute the same"):
            rank.gather(torch.zeros(4 + rank.rank))
        return True

    assert all(together(ranks, exchange))


def test_plans_are_awaited_one_by_one():
    sender, receiver = ranks_of(2)
    got = []

    def receive():
        for i in range(3):
            receiver.await_plan()
            got.append(i)

    thread = threading.Thread(target=receive)
    thread.start()
    for _ in range(3):
        sender.post()
    thread.join(20)
    assert got == [0, 1, 2]
