"""Block accounting, prefix keys and eviction."""

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.plan import BLOCK_TOKENS
from penstock.kv.keys import KEY_BYTES, extend_keys, root_key
from penstock.kv.pool import BlockPool


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
