"""Copied blocks of a pool whose blocks have records: sums are made once, and no record outlives what it describes."""

import select
from contextlib import closing

import pytest

from penstock.kv.connector import Move
from penstock.transfer.pool import shared_pool
from penstock.transfer.tcp import CopiedBlocks
from tests.helpers.links import KEY, LAYOUT, contents, ends, pool_server


@pytest.fixture
def pool(tmp_path):
    with pool_server(tmp_path / "kv-pool") as path, closing(shared_pool(path, "a", 1)(LAYOUT, 4)) as pool:
        yield pool


def fill(pool, block, seed):
    pool.memory.block(block)[:] = contents(seed)
    pool.client.records.put(block, KEY, bytes(16), pool.memory.checksum(block))


def test_a_recorded_block_is_not_summed_up_again(pool, monkeypatch):
    path, (block, other, *_) = CopiedBlocks(pool, LAYOUT), pool.blocks
    fill(pool, block, 1)
    pool.memory.block(other)[:] = contents(2)
    right = (pool.memory.checksum(block), pool.memory.checksum(other))
    summed, checksum = [], pool.memory.checksum
    monkeypatch.setattr(pool.memory, "checksum", lambda b: (summed.append(b), checksum(b))[1])
    assert path.stamp(block) == (1, right[0])
    assert path.stamp(other) == (1, right[1])
    assert summed == [other]
    pool.client.records.clear(block)
    assert path.stamp(block) == (1, right[0])
    assert summed == [other, block]


def test_a_record_of_an_earlier_use_is_none(pool):
    path, block = CopiedBlocks(pool, LAYOUT), pool.blocks[0]
    fill(pool, block, 1)
    assert pool.client.exchange([block], 1) == [block]
    pool.memory.block(block)[:] = contents(2)
    assert path.stamp(block) == (2, pool.memory.checksum(block))


def test_what_is_landed_has_no_record_of_what_was_there(pool, tmp_path):
    """Else it would be stamped, and inherited, by the wrong sum."""
    into = pool.blocks[0]
    fill(pool, into, 1)
    with ends("tcp", tmp_path) as (a, b), closing(CopiedBlocks(pool, LAYOUT)) as path:
        a.fill(a.pool.blocks[0], 2)
        push = a.push(b.peer, a.pool.blocks[0])
        b.until(lambda: b.arrivals)
        path.pull([Move(into, push.block, push.key, push.generation, push.checksum)], b.arrivals[0])
        assert select.select([path], [], [], 10)[0]
        assert path.poll()[0].blocks == (into,)
        assert pool.client.records.get(into) is None
        assert path.stamp(into) == (1, pool.memory.checksum(into))
