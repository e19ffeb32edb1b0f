"""The keeper over real sockets: shares, holds, lives that end, and clients that misbehave."""

import os
import random
from dataclasses import replace

import pytest

from penstock.core.errors import ConfigError, Unavailable
from penstock.transfer.keeper_client import KeeperClient, Place, keeper_status, leaves_first
from penstock.transfer.pool import keeper_pool
from penstock.transfer.records import Record
from tests.helpers.keepers import BLOCKS, EMPTY, LAYOUT, ROOT, Keeper, eventually, key, rest_of, write, write_chain

# --- shares


def test_blocks_are_leased_within_the_quota(keeper):
    a, b = keeper.attach("a", 8), keeper.attach("b", 8)
    mine, theirs = a.exchange([], 8), b.exchange([], 5)
    assert len({*mine, *theirs}) == 13
    assert keeper.blocks() == {"free": BLOCKS - 13, "orphaned": 0, "held:a": 8, "held:b": 5}
    other = a.exchange(mine[:3], 2)
    assert len({*mine[3:], *theirs, *other}) == 12
    assert a.exchange(other, 0) == []
    assert keeper.blocks() == {"free": BLOCKS - 10, "orphaned": 0, "held:a": 5, "held:b": 5}
    assert keeper.counts()["clients"] == 2


def test_instances_see_the_same_bytes_and_records(keeper):
    a, b = keeper.attach("a"), keeper.attach("b")
    [block] = a.exchange([], 1)
    write(a, block, 7)
    assert bytes(b.memory.block(block)) == bytes([8]) * 4096
    assert b.records.get(block) == Record(block, key(7), ROOT, b.memory.checksum(block), 1)


def test_a_block_is_held_in_its_generation_or_not_at_all(keeper):
    a, b = keeper.attach("a"), keeper.attach("b", 2)
    one, two = a.exchange([], 2)
    own = b.exchange([], 2)
    assert not b.hold([(one, 1), (two, 2)], own)
    for absurd in [(BLOCKS - 1, 0), (BLOCKS, 1), (2**64 - 1, 1), (-1, 1), (-(2**63), 1), (one, -1), (one, 2**64 - 1)]:
        assert not b.hold([(two, 1), absurd], own)
    assert keeper.blocks()["held:b"] == 2
    assert b.hold([(one, 1), (two, 1)], own)
    assert not b.hold([(one, 1)], [one])  # doubled message
    assert keeper.blocks() == {"free": BLOCKS - 2, "orphaned": 0, "held:a": 2, "held:b": 2}
    assert a.exchange([one, two], 1) not in ([one], [two])
    assert keeper.blocks() == {"free": BLOCKS - 3, "orphaned": 0, "held:a": 1, "held:b": 2}


def test_another_layout_is_refused_with_both_values(keeper):
    keeper.attach("a")
    with pytest.raises(ConfigError, match="dtype: float32 here, bfloat16 there; block_bytes: 4096 here, 8192 there"):
        keeper.attach("b", layout=replace(LAYOUT, dtype="bfloat16", block_bytes=8192))
    other = keeper.attach("b", layout=replace(LAYOUT, model="other", block_bytes=8192))
    assert other.memory.block_bytes == 8192
    assert keeper.counts()["pools"] == 2


@pytest.mark.parametrize("block_bytes", [0, -4096, 100, 4097, 1 << 50])
def test_blocks_are_whole_pages(keeper, block_bytes):
    with pytest.raises(ConfigError, match="block_bytes"):
        keeper.attach("a", layout=replace(LAYOUT, block_bytes=block_bytes))
    assert keeper.counts() == EMPTY


def test_what_cannot_be_promised_is_refused(keeper):
    keeper.attach("a", 8)
    with pytest.raises(ConfigError, match=f"quota: {BLOCKS} blocks, from 1 to {BLOCKS - 8}"):
        keeper.attach("b", BLOCKS)
    with pytest.raises(ConfigError, match="quota: 0"):
        keeper.attach("b", 0)
    with pytest.raises(ConfigError, match="a is attached already"):
        keeper.attach("a", incarnation=1)
    assert keeper.blocks() == {"free": BLOCKS, "orphaned": 0, "held:a": 0}


def test_without_a_keeper_it_is_unavailable(tmp_path):
    before = os.listdir("/proc/self/fd")
    with pytest.raises(Unavailable, match="no keeper at"):
        KeeperClient.attach(str(tmp_path / "none"), "a", 1, LAYOUT, 4)
    assert os.listdir("/proc/self/fd") == before


def test_a_keeper_that_goes_is_unavailable(tmp_path):
    keeper = Keeper(str(tmp_path / "keeper"))
    client = KeeperClient.attach(keeper.path, "a", 1, LAYOUT, 4)
    [block] = client.exchange([], 1)
    keeper.stop()
    for _ in range(2):
        with pytest.raises(Unavailable, match="has gone"):
            client.exchange([], 1)
    client.memory.block(block)[:3] = b"abc"  # what it has mapped stays
    client.close()


# --- lives


def test_a_successor_inherits_what_was_published(keeper):
    a = keeper.attach("a")
    blocks = a.exchange([], 5)
    write_chain(a, blocks[:3])
    write(a, blocks[3], 40)
    a.memory.block(blocks[4])[:] = b"?" * 4096  # written, but never published
    a.close()
    eventually(lambda: keeper.blocks() == {"free": BLOCKS - 4, "orphaned": 4})
    heir = keeper.attach("a")
    records = heir.inherited
    assert {r.block: r.key for r in records} == dict(zip(blocks, [key(1), key(2), key(3), key(40)], strict=False))
    order = [r.key for r in records]
    assert order.index(key(3)) < order.index(key(2)) < order.index(key(1))
    assert all(bytes(heir.memory.block(r.block)) == bytes([r.key[0] % 251 + 1]) * 4096 for r in records)
    assert all(heir.records.get(r.block) == r for r in records)
    assert keeper.blocks() == {"free": BLOCKS - 4, "orphaned": 0, "held:a": 4}


def test_opening_a_pool_fills_the_quota(keeper):
    first = keeper_pool(keeper.path, "a", 1)(LAYOUT, 6)
    assert len(first.blocks) == 6
    write_chain(first.keeper, first.blocks[:2])
    first.close()
    again = keeper_pool(keeper.path, "a", 2)(LAYOUT, 6)
    assert [r.block for r in again.inherited] == [first.blocks[1], first.blocks[0]]
    assert len(again.blocks) == 4
    assert not set(again.blocks) & {r.block for r in again.inherited}
    assert keeper.blocks()["held:a"] == 6
    again.close()


def test_a_successor_comes_before_the_end_was_seen(keeper):
    old = keeper.attach("a")
    blocks = old.exchange([], 3)
    write_chain(old, blocks[:2])
    heir = keeper.attach("a")
    assert [r.block for r in heir.inherited] == [blocks[1], blocks[0]]
    with pytest.raises(Unavailable):
        old.exchange(blocks, 0)
    assert keeper.blocks() == {"free": BLOCKS - 2, "orphaned": 0, "held:a": 2}
    assert heir.exchange([], 6)


def test_orphans_wait_so_long_and_no_longer(keeper):
    a, b = keeper.attach("a"), keeper.attach("b")
    write_chain(a, a.exchange([], 3))
    assert keeper.counts()["resident_bytes"] >= 3 * 4096
    a.close()
    eventually(lambda: keeper.blocks().get("orphaned") == 3)
    keeper.clock.advance(59)
    assert keeper.blocks()["orphaned"] == 3
    keeper.clock.advance(1)
    eventually(lambda: keeper.blocks() == {"free": BLOCKS, "orphaned": 0, "held:b": 0})
    assert keeper.attach("a").inherited == []
    b.close()


def test_a_pool_without_shares_goes(keeper):
    before = keeper_status(keeper.path).counts["open_files"]
    a = keeper.attach("a")
    a.exchange([], 8)
    a.close()
    eventually(lambda: keeper.counts() == EMPTY)
    b = keeper.attach("b", layout=replace(LAYOUT, dtype="float16"))  # no longer in the way
    write_chain(b, b.exchange([], 2))
    b.close()
    eventually(lambda: keeper.blocks()["orphaned"] == 2)
    keeper.clock.advance(61)
    eventually(lambda: keeper.counts() == EMPTY)
    assert keeper_status(keeper.path).counts["open_files"] == before


def test_memory_beyond_what_is_promised_is_returned(keeper):
    page = 4096
    a, b = keeper.attach("a", 100), keeper.attach("b", 10)
    for block in a.exchange([], 100):
        a.memory.block(block)[:] = b"a" * page
    mine = b.exchange([], 10)
    for block in mine:
        b.memory.block(block)[:] = b"b" * page
    assert keeper.counts()["resident_bytes"] >= 110 * page
    a.close()
    eventually(lambda: keeper.counts()["resident_bytes"] <= 20 * page)
    assert all(bytes(b.memory.block(block)) == b"b" * page for block in mine)
    other = b.exchange(mine, 10)  # down into what is promised
    assert max(other) < 10
    assert keeper.counts()["resident_bytes"] <= 10 * page


def test_shared_blocks_stay_when_one_holder_dies(keeper):
    a, b = keeper.attach("a"), keeper.attach("b")
    one, two = a.exchange([], 2)
    write_chain(a, [one, two])
    assert b.hold([(one, 1)], [])
    a.close()
    eventually(lambda: keeper.blocks() == {"free": BLOCKS - 2, "orphaned": 1, "held:b": 1})
    assert bytes(b.memory.block(one)) == bytes([2]) * 4096
    heir = keeper.attach("a")
    assert [r.block for r in heir.inherited] == [two]  # the other may be read by b
    b.close()
    eventually(lambda: keeper.blocks() == {"free": BLOCKS - 2, "orphaned": 1, "held:a": 1})
    assert [r.block for r in keeper.attach("b").inherited] == [one]


def test_what_the_old_life_offered_cannot_be_held_from_the_new_one(keeper):
    a, b = keeper.attach("a"), keeper.attach("b")
    [block] = a.exchange([], 1)
    write(a, block, 1)
    offered = (block, a.records.generation(block))
    a.close()
    eventually(lambda: keeper.blocks()["orphaned"] == 1)
    heir = keeper.attach("a")
    assert [r.block for r in heir.inherited] == [block]
    assert not b.hold([offered], [])
    assert b.hold(rest_of(heir), [])


def test_an_orphan_can_be_taken_over(keeper):
    a, b = keeper.attach("a"), keeper.attach("b")
    [block] = a.exchange([], 1)
    write(a, block, 1)
    a.close()
    eventually(lambda: keeper.blocks()["orphaned"] == 1)
    assert b.hold([(block, 1)], [])
    assert keeper.attach("a").inherited == []
    assert keeper.blocks() == {"free": BLOCKS - 1, "orphaned": 0, "held:a": 0, "held:b": 1}


# --- lives that take long to begin


def test_what_is_claimed_waits_as_long_as_it_takes(keeper):
    a = keeper.attach("a", 6)
    blocks = a.exchange([], 6)
    write_chain(a, blocks[:3])
    a.close()
    eventually(lambda: keeper.blocks()["orphaned"] == 3)
    keeper.clock.advance(59)
    open_pool = keeper_pool(keeper.path, "a", 9)
    assert open_pool.promised == 6 * LAYOUT.block_bytes
    keeper.clock.advance(1000)
    assert keeper.counts() == EMPTY | {"free": BLOCKS - 3, "orphaned": 3, "pools": 1, "resident_bytes": 3 * 4096}
    pool = open_pool(LAYOUT, 6)
    assert {r.block for r in pool.inherited} == set(blocks[:3])
    pool.close()
    eventually(lambda: keeper.blocks()["orphaned"] == 3)
    keeper.clock.advance(60)
    eventually(lambda: keeper.counts() == EMPTY)


def test_a_claim_that_came_to_nothing_begins_the_wait_anew(keeper):
    a = keeper.attach("a")
    write_chain(a, a.exchange([], 3))
    a.close()
    eventually(lambda: keeper.blocks()["orphaned"] == 3)
    place = Place(keeper.path, "a", 8)
    keeper.clock.advance(100)
    place.close()
    keeper.clock.advance(59)
    assert keeper.blocks()["orphaned"] == 3
    again = Place(keeper.path, "a", 9)
    keeper.clock.advance(100)
    last = Place(keeper.path, "a", 10)  # its end has not been seen
    with pytest.raises(Unavailable):
        again.attach(LAYOUT, 3)
    heir = last.attach(LAYOUT, 3)
    assert len(heir.inherited) == 3
    heir.close()


def test_a_claim_ends_the_life_before(keeper):
    a = keeper.attach("a", 6)
    write_chain(a, a.exchange([], 3))
    place = Place(keeper.path, "a", 99)
    assert place.promised == 6 * LAYOUT.block_bytes
    with pytest.raises(Unavailable):
        a.exchange([], 1)
    place.close()


def test_nothing_was_promised_to_who_left_nothing(keeper):
    a = keeper.attach("a")
    a.exchange([], 3)
    a.close()
    eventually(lambda: keeper.counts() == EMPTY)
    place = Place(keeper.path, "a", 99)
    assert place.promised == 0
    place.close()


def test_all_memory_that_is_free_goes_with_a_quota(keeper):
    """Also where others hold blocks behind it, or a later life would find less memory than there is."""
    a, b = keeper.attach("a", 10), keeper.attach("b", 10)
    for client in (a, b):
        for block in client.exchange([], 10):
            client.memory.block(block)[:] = b"x" * 4096
    a.close()
    eventually(lambda: keeper.counts()["resident_bytes"] == 10 * 4096)
    assert b.exchange([], 0) == []


# --- damage


def test_what_is_damaged_is_never_inherited(keeper):
    a = keeper.attach("a", 16)
    blocks = a.exchange([], 12)
    for number, block in enumerate(blocks, 1):
        write(a, block, number)
    bytes_of, line_of = a.memory.block, a.records._memory.block
    bytes_of(blocks[0])[4095] ^= 1  # a bit of the block
    bytes_of(blocks[1])[:64] = bytes(64)
    line_of(blocks[2])[8] ^= 128  # of its key
    line_of(blocks[3])[24] ^= 1  # of its parent
    line_of(blocks[4])[40] ^= 1  # of its checksum
    line_of(blocks[5])[48] ^= 1  # of the seal
    line_of(blocks[6])[:] = line_of(blocks[7])  # somebody else's record
    line_of(blocks[8])[0] += 1  # another generation
    a.records.clear(blocks[9])
    bytes_of(blocks[10])[:] = b"new" * 1365 + b"!"  # evicted, written anew, and its record not cleared
    whole = {blocks[7], blocks[11]}
    a.close()
    heir = keeper.attach("a", 16)
    assert {r.block for r in heir.inherited} == whole
    assert keeper.blocks() == {"free": BLOCKS - 2, "orphaned": 0, "held:a": 2}


def test_damage_while_orphaned_is_seen(keeper):
    a, b = keeper.attach("a"), keeper.attach("b")
    one, two = a.exchange([], 2)
    write_chain(a, [one, two])
    a.close()
    eventually(lambda: keeper.blocks()["orphaned"] == 2)
    b.records._memory.block(one)[30] ^= 1
    heir = keeper.attach("a")
    assert [r.block for r in heir.inherited] == [two]
    assert heir.records.get(one) is None
    assert keeper.blocks()["held:a"] == 1


def test_two_blocks_of_one_key_become_one(keeper):
    a = keeper.attach("a")
    one, two = a.exchange([], 2)
    write(a, one, 5)
    write(a, two, 5)
    a.close()
    assert len(keeper.attach("a").inherited) == 1
    assert keeper.blocks()["held:a"] == 1


def test_children_come_before_parents():
    generator = random.Random(3)
    parents = {key(n): key(generator.randrange(n)) for n in range(1, 300)}  # a tree; the root itself is no record
    numbers = list(parents)
    generator.shuffle(numbers)
    records = {k: Record(i, k, parents[k], 0, 1) for i, k in enumerate(numbers)}
    order = [record.key for record in leaves_first(records)]
    place = {k: i for i, k in enumerate(order)}
    assert sorted(order) == sorted(parents)
    assert all(place[k] < place[parent] for k, parent in parents.items() if parent in place)


def test_a_circle_is_no_chain():
    records = {key(1): Record(1, key(1), key(2), 0, 1), key(2): Record(2, key(2), key(1), 0, 1)}
    assert leaves_first(records) == []
