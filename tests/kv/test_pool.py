"""Block accounting, prefix keys and eviction."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.plan import BLOCK_TOKENS
from penstock.kv.keys import KEY_BYTES, extend_keys, root_key
from penstock.kv.pool import BlockPool, Published, Tail, TailHit, beginning_keys, sampled


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


def tail_of(tokens: list[int], interval: int = 4, parent: bytes = b"p") -> Tail:
    *keys, whole = beginning_keys(parent, tokens, 0, (*sampled(len(tokens), interval), len(tokens)))
    return Tail(parent, keys, len(tokens), whole)


def found(pool: BlockPool, tokens: list[int], interval: int = 4, parent: bytes = b"p") -> tuple[int, int] | None:
    """(tokens of the match, block)."""
    counts = sampled(len(tokens), interval)
    hit = pool.tails.find(beginning_keys(parent, tokens, 0, counts)) if counts else None
    return None if hit is None else (counts[hit[0]], hit[1])


def test_sampled_places_are_inside_a_block():
    assert [*sampled(11, 4)] == [4, 8]
    assert [*sampled(12, 4)] == [4, 8, 12]
    assert [*sampled(3, 4)] == []
    assert [*sampled(BLOCK_TOKENS, 16)] == [16, 32, 48]
    assert [*sampled(500, 32)] == [32]


def test_a_partly_filled_block_is_kept_and_found_by_what_it_begins_with():
    pool = BlockPool(range(3))
    (block,) = pool.allocate(1)
    pool.leave(block, tail_of([*range(10)]))
    pool.check()
    assert found(pool, [*range(30)]) == (8, block)
    assert not pool.exclusive(TailHit(block, 10)), "somebody holds it"
    pool.release([block])
    pool.check()
    assert (pool.used, pool.unused, pool.available) == (0, 2, 3)
    assert found(pool, [0, 1, 2, 3, 4, 9, 9, 9]) == (4, block)
    assert found(pool, [0, 1, 2, 9]) is None
    assert found(pool, [*range(30)], parent=b"q") is None, "what stands before it is another's"
    assert pool.exclusive(TailHit(block, 10))
    assert not pool.exclusive(TailHit(block, 8)), "somebody may want the rest"
    pool.allocate(3)
    pool.check()
    assert found(pool, [*range(30)]) is None
    assert not pool.tails.behind(b"p")
    assert pool.take_changes() == ([], []), "nobody else is told of tails"


def test_who_leaves_what_another_has_leaves_nothing():
    pool = BlockPool(range(4))
    first, same, longer, full = pool.allocate(4)
    pool.leave(first, tail_of([*range(10)]))
    pool.release([first])
    pool.leave(same, tail_of([*range(8)]))
    pool.release([same])
    assert pool.unused == 1
    pool.leave(longer, tail_of([*range(11)]))
    pool.release([longer])
    assert pool.unused == 1
    assert found(pool, [*range(30)]) == (8, longer)
    pool.check()
    assert pool.publish(full, b"full", b"p") == full
    pool.leave(full, tail_of([*range(BLOCK_TOKENS)]))
    pool.release([full])
    assert found(pool, [*range(62)]) == (60, full)
    assert not pool.exclusive(TailHit(full, BLOCK_TOKENS)), "it is found as a whole, too"
    pool.check()


def test_a_block_that_others_were_told_of_is_copied():
    pool = BlockPool([0, 1], Exchange())
    (block,) = pool.allocate(1)
    pool.offer(block)
    pool.leave(block, tail_of([*range(8)]))
    pool.release([block])
    pool.check()
    assert found(pool, [*range(8)]) == (8, block)
    assert not pool.exclusive(TailHit(block, 8)), "another instance may go on in it"
    pool.allocate(2)
    pool.check()
    assert found(pool, [*range(8)]) is None


@given(
    st.lists(st.tuples(st.text("ab", min_size=1, max_size=9), st.integers(0, 3)), max_size=40),
    st.sampled_from([1, 2, 3]),
)
def test_the_longest_beginning_that_was_left_last_is_found(moves, interval):
    """As long as nothing is evicted every match is as long as can be; and what is found is always what it should be."""
    pool = BlockPool(range(60))
    texts: dict[int, str] = {}
    gone = 0
    for text, evicted in moves:
        gone += evicted
        tokens = [*map(ord, text)]
        if len(tokens) >= interval:
            (block,) = pool.allocate(1)
            pool.leave(block, tail_of(tokens, interval))
            pool.release([block])
            if block in pool.tails:
                texts[block] = text
        taken = pool.allocate(min(pool.available, pool.unused + evicted))
        pool.release(taken)
        texts = {block: known for block, known in texts.items() if block in pool.tails}
        pool.check()
        longest = max((common(known, text) for known in texts.values()), default=0) // interval * interval
        hit = found(pool, tokens, interval)
        if hit is None:
            assert not longest or gone
            continue
        assert texts[hit[1]][: hit[0]] == text[: hit[0]]
        assert hit[0] == longest or gone


def common(a: str, b: str) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
