"""Block accounting, prefix keys and eviction."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.plan import BLOCK_TOKENS
from penstock.kv.keys import KEY_BYTES, extend_keys, root_key
from penstock.kv.pool import BlockPool, Published


def test_a_key_names_everything_before_it():
    a, b = [1] * BLOCK_TOKENS, [2] * BLOCK_TOKENS
    keys_ab: list[bytes] = []
    keys_bb: list[bytes] = []
    extend_keys(keys_ab, root_key("m"), a + b, 2)
    extend_keys(keys_bb, root_key("m"), b + b, 2)
    assert keys_ab[1] != keys_bb[1]
    one_by_one: list[bytes] = []
    extend_keys(one_by_one, root_key("m"), a, 1)
    extend_keys(one_by_one, root_key("m"), a + b, 2)
    assert one_by_one == keys_ab
    assert len(set(keys_ab + keys_bb)) == 4
    assert {len(k) for k in keys_ab} == {KEY_BYTES}


def test_roots_do_not_run_together():
    assert root_key("ab", "c") != root_key("a", "bc") != root_key("abc")


def publish_chain(pool: BlockPool, names: str) -> list[int]:
    """A sequence whose blocks are keyed by the prefixes of `names`."""
    keys = [names[: i + 1].encode() for i in range(len(names))]
    blocks = pool.match(keys)
    pool.hold(blocks)
    for i in range(len(blocks), len(names)):
        block = pool.allocate(1)[0]
        blocks.append(pool.publish(block, keys[i], keys[i - 1] if i else b""))
    return blocks


def test_eviction_takes_leaves_oldest_first():
    pool = BlockPool(range(5))
    old = publish_chain(pool, "ab")
    new = publish_chain(pool, "xyz")
    pool.release(old)
    pool.release(new)
    pool.check()
    assert pool.allocate(4) == [old[1], old[0], new[2], new[1]]
    assert pool.match([b"x"]) == [new[0]]
    pool.check()


def test_a_hit_makes_a_prefix_young_again():
    pool = BlockPool(range(4))
    first, second = publish_chain(pool, "ab"), publish_chain(pool, "xy")
    pool.release(first)
    pool.release(second)
    again = publish_chain(pool, "ab")
    assert again == first
    pool.release(again)
    assert pool.allocate(2) == [second[1], second[0]]


def test_computing_a_block_twice_leaves_one():
    pool = BlockPool(range(4))
    one, two = pool.allocate(2)
    assert pool.publish(one, b"k", b"") == one
    assert pool.publish(two, b"k", b"") == one
    assert pool.holders(one) == 2
    assert pool.available == 3
    pool.check()


@settings(max_examples=150)
@given(
    st.integers(3, 12),
    st.lists(st.tuples(st.text("ab", min_size=1, max_size=5), st.booleans(), st.integers(0, 9)), max_size=60),
)
def test_every_block_is_accounted_for(num_blocks, moves):
    pool = BlockPool(range(num_blocks))
    held: list[list[int]] = []
    for names, enter, pick in moves:
        keys = [names[: i + 1].encode() for i in range(len(names))]
        hit = pool.match(keys)
        room = pool.available - sum(map(pool.idle, hit))
        if enter and len(names) - len(hit) <= room:
            held.append(publish_chain(pool, names))
        elif held:
            pool.release(held.pop(pick % len(held)))
        pool.check()
        assert pool.used + pool.available == num_blocks
    for blocks in held:
        pool.release(blocks)
    assert pool.used == 0
    coming = pool.coming(num_blocks)
    assert len(coming) == pool.unused
    assert pool.coming(2) == coming[:2]
    assert pool.allocate(num_blocks)[: len(coming)] == coming
    assert pool.cached == 0
    pool.check()


class Exchange:
    """A source that always has blocks which nobody saw before."""

    def __init__(self) -> None:
        self.given: list[int] = []

    def exchange(self, give, want):
        self.given += give
        return [1000 + len(self.given) + i for i in range(want)]


@given(st.lists(st.tuples(st.integers(1, 4), st.booleans()), max_size=30))
def test_a_range_is_handed_out_like_blocks_that_are_written_down(moves):
    pools = BlockPool(range(12)), BlockPool(list(range(12)))
    held: list[list[int]] = []
    for count, gives_back in moves:
        coming = pools[0].coming(count)
        assert coming == pools[1].coming(count)
        if gives_back and held:
            blocks = held.pop()
            for pool in pools:
                pool.release(blocks)
        elif count <= pools[0].available:
            blocks, same = [pool.allocate(count) for pool in pools]
            assert blocks == same == coming
            held.append(blocks)
        for pool in pools:
            pool.check()
        assert pools[0].counts() == pools[1].counts()


@pytest.mark.parametrize("blocks", [range(4), [0, 1, 2, 3]])
@pytest.mark.parametrize("source", [None, Exchange()])
def test_inherited_blocks_are_found_held_evicted_and_given_away(blocks, source):
    pool = BlockPool(blocks, source)
    pool.restore([Published(2, b"ab", b"a"), Published(1, b"a", b"")])
    pool.check()
    assert (pool.unused, pool.available) == (2, 4)
    found = pool.match([b"a", b"ab"])
    assert found == [1, 2]
    pool.hold(found[:1])
    assert (pool.holders(1), pool.holders(2)) == (1, 0)
    pool.check()
    pool.offer(1)
    pool.release(found[:1])
    taken = pool.allocate(4)
    pool.check()
    if source is None:
        assert sorted(taken) == [0, 1, 2, 3]
    else:  # somebody else may be reading it
        assert source.given == [1]
        assert not pool.owns(1)
        assert max(taken) >= 1001
        source.given.clear()
