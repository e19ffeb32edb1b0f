"""The KV pool server over real sockets: shares, holds, incarnations that end, and clients that misbehave."""

import os
import random
from dataclasses import replace

import pytest

from penstock.core.errors import ConfigError, Unavailable
from penstock.transfer.kv_pool_client import KVPoolClaim, KVPoolClient, leaves_first, pool_status
from penstock.transfer.pool import shared_pool
from penstock.transfer.records import Record
from tests.helpers.kv_pool import BLOCKS, EMPTY, LAYOUT, ROOT, PoolServer, key, rest_of, write, write_chain
from tests.helpers.waiting import eventually

# --- shares


def test_blocks_are_leased_within_the_quota(server):
    a, b = server.attach("a", 8), server.attach("b", 8)
    mine, theirs = a.exchange([], 8), b.exchange([], 5)
    assert len({*mine, *theirs}) == 13
    assert server.blocks() == {"free": BLOCKS - 13, "orphaned": 0, "held:a": 8, "held:b": 5}
    other = a.exchange(mine[:3], 2)
    assert len({*mine[3:], *theirs, *other}) == 12
    assert a.exchange(other, 0) == []
    assert server.blocks() == {"free": BLOCKS - 10, "orphaned": 0, "held:a": 5, "held:b": 5}
    assert server.counts()["clients"] == 2


def test_instances_see_the_same_bytes_and_records(server):
    a, b = server.attach("a"), server.attach("b")
    [block] = a.exchange([], 1)
    write(a, block, 7)
    assert bytes(b.memory.block(block)) == bytes([8]) * 4096
    assert b.records.get(block) == Record(block, key(7), ROOT, b.memory.checksum(block), 1)


def test_a_block_is_held_in_its_generation_or_not_at_all(server):
    a, b = server.attach("a"), server.attach("b", 2)
    one, two = a.exchange([], 2)
    own = b.exchange([], 2)
    assert not b.hold([(one, 1), (two, 2)], own)
    for absurd in [(BLOCKS - 1, 0), (BLOCKS, 1), (2**64 - 1, 1), (-1, 1), (-(2**63), 1), (one, -1), (one, 2**64 - 1)]:
        assert not b.hold([(two, 1), absurd], own)
    assert server.blocks()["held:b"] == 2
    assert b.hold([(one, 1), (two, 1)], own)
    assert not b.hold([(one, 1)], [one])  # doubled message
    assert server.blocks() == {"free": BLOCKS - 2, "orphaned": 0, "held:a": 2, "held:b": 2}
    assert a.exchange([one, two], 1) not in ([one], [two])
    assert server.blocks() == {"free": BLOCKS - 3, "orphaned": 0, "held:a": 1, "held:b": 2}


def test_another_layout_is_refused_with_both_values(server):
    server.attach("a")
    with pytest.raises(ConfigError, match="dtype: float32 here, bfloat16 there; block_bytes: 4096 here, 8192 there"):
        server.attach("b", layout=replace(LAYOUT, dtype="bfloat16", block_bytes=8192))
    other = server.attach("b", layout=replace(LAYOUT, model="other", block_bytes=8192))
    assert other.memory.block_bytes == 8192
    assert server.counts()["pools"] == 2


@pytest.mark.parametrize("block_bytes", [0, -4096, 100, 4097, 1 << 50])
def test_blocks_are_whole_pages(server, block_bytes):
    with pytest.raises(ConfigError, match="block_bytes"):
        server.attach("a", layout=replace(LAYOUT, block_bytes=block_bytes))
    assert server.counts() == EMPTY


def test_what_cannot_be_promised_is_refused(server):
    server.attach("a", 8)
    with pytest.raises(ConfigError, match=f"quota: {BLOCKS} blocks, from 1 to {BLOCKS - 8}"):
        server.attach("b", BLOCKS)
    with pytest.raises(ConfigError, match="quota: 0"):
        server.attach("b", 0)
    with pytest.raises(ConfigError, match="a is attached already"):
        server.attach("a", incarnation=1)
    assert server.blocks() == {"free": BLOCKS, "orphaned": 0, "held:a": 0}


def test_without_a_server_it_is_unavailable(tmp_path):
    before = os.listdir("/proc/self/fd")
    with pytest.raises(Unavailable, match="no KV pool server at"):
        KVPoolClient.attach(str(tmp_path / "none"), "a", 1, LAYOUT, 4)
    assert os.listdir("/proc/self/fd") == before


def test_a_server_that_goes_is_unavailable(tmp_path):
    server = PoolServer(str(tmp_path / "kv-pool"))
    client = KVPoolClient.attach(server.path, "a", 1, LAYOUT, 4)
    [block] = client.exchange([], 1)
    server.stop()
    for _ in range(2):
        with pytest.raises(Unavailable, match="has gone"):
            client.exchange([], 1)
    client.memory.block(block)[:3] = b"abc"  # what it has mapped stays
    client.close()


# --- lives


def test_a_successor_inherits_what_was_published(server):
    a = server.attach("a")
    blocks = a.exchange([], 5)
    write_chain(a, blocks[:3])
    write(a, blocks[3], 40)
    a.memory.block(blocks[4])[:] = b"?" * 4096  # written, but never published
    a.close()
    eventually(lambda: server.blocks() == {"free": BLOCKS - 4, "orphaned": 4})
    heir = server.attach("a")
    records = heir.inherited
    assert {r.block: r.key for r in records} == dict(zip(blocks, [key(1), key(2), key(3), key(40)], strict=False))
    order = [r.key for r in records]
    assert order.index(key(3)) < order.index(key(2)) < order.index(key(1))
    assert all(bytes(heir.memory.block(r.block)) == bytes([r.key[0] % 251 + 1]) * 4096 for r in records)
    assert all(heir.records.get(r.block) == r for r in records)
    assert server.blocks() == {"free": BLOCKS - 4, "orphaned": 0, "held:a": 4}


def test_opening_a_pool_fills_the_quota(server):
    first = shared_pool(server.path, "a", 1)(LAYOUT, 6)
    assert len(first.blocks) == 6
    write_chain(first.client, first.blocks[:2])
    first.close()
    again = shared_pool(server.path, "a", 2)(LAYOUT, 6)
    assert [r.block for r in again.inherited] == [first.blocks[1], first.blocks[0]]
    assert len(again.blocks) == 4
    assert not set(again.blocks) & {r.block for r in again.inherited}
    assert server.blocks()["held:a"] == 6
    again.close()


def test_a_successor_comes_before_the_end_was_seen(server):
    old = server.attach("a")
    blocks = old.exchange([], 3)
    write_chain(old, blocks[:2])
    heir = server.attach("a")
    assert [r.block for r in heir.inherited] == [blocks[1], blocks[0]]
    with pytest.raises(Unavailable):
        old.exchange(blocks, 0)
    assert server.blocks() == {"free": BLOCKS - 2, "orphaned": 0, "held:a": 2}
    assert heir.exchange([], 6)


def test_orphans_wait_so_long_and_no_longer(server):
    a, b = server.attach("a"), server.attach("b")
    write_chain(a, a.exchange([], 3))
    assert server.counts()["resident_bytes"] >= 3 * 4096
    a.close()
    eventually(lambda: server.blocks().get("orphaned") == 3)
    server.clock.advance(59)
    assert server.blocks()["orphaned"] == 3
    server.clock.advance(1)
    eventually(lambda: server.blocks() == {"free": BLOCKS, "orphaned": 0, "held:b": 0})
    assert server.attach("a").inherited == []
    b.close()


def test_a_pool_without_shares_goes(server):
    before = pool_status(server.path).counts["open_files"]
    a = server.attach("a")
    a.exchange([], 8)
    a.close()
    eventually(lambda: server.counts() == EMPTY)
    b = server.attach("b", layout=replace(LAYOUT, dtype="float16"))  # no longer in the way
    write_chain(b, b.exchange([], 2))
    b.close()
    eventually(lambda: server.blocks()["orphaned"] == 2)
    server.clock.advance(61)
    eventually(lambda: server.counts() == EMPTY)
    assert pool_status(server.path).counts["open_files"] == before


def test_memory_beyond_what_is_promised_is_returned(server):
    page = 4096
    a, b = server.attach("a", 100), server.attach("b", 10)
    for block in a.exchange([], 100):
        a.memory.block(block)[:] = b"a" * page
    mine = b.exchange([], 10)
    for block in mine:
        b.memory.block(block)[:] = b"b" * page
    assert server.counts()["resident_bytes"] >= 110 * page
    a.close()
    eventually(lambda: server.counts()["resident_bytes"] <= 20 * page)
    assert all(bytes(b.memory.block(block)) == b"b" * page for block in mine)
    other = b.exchange(mine, 10)  # down into what is promised
    assert max(other) < 10
    assert server.counts()["resident_bytes"] <= 10 * page


def test_shared_blocks_stay_when_one_holder_dies(server):
    a, b = server.attach("a"), server.attach("b")
    one, two = a.exchange([], 2)
    write_chain(a, [one, two])
    assert b.hold([(one, 1)], [])
    a.close()
    eventually(lambda: server.blocks() == {"free": BLOCKS - 2, "orphaned": 1, "held:b": 1})
    assert bytes(b.memory.block(one)) == bytes([2]) * 4096
    heir = server.attach("a")
    assert [r.block for r in heir.inherited] == [two]  # the other may be read by b
    b.close()
    eventually(lambda: server.blocks() == {"free": BLOCKS - 2, "orphaned": 1, "held:a": 1})
    assert [r.block for r in server.attach("b").inherited] == [one]


def test_what_the_old_incarnation_offered_cannot_be_held_from_the_new_one(server):
    a, b = server.attach("a"), server.attach("b")
    [block] = a.exchange([], 1)
    write(a, block, 1)
    offered = (block, a.records.generation(block))
    a.close()
    eventually(lambda: server.blocks()["orphaned"] == 1)
    heir = server.attach("a")
    assert [r.block for r in heir.inherited] == [block]
    assert not b.hold([offered], [])
    assert b.hold(rest_of(heir), [])


def test_an_orphan_can_be_taken_over(server):
    a, b = server.attach("a"), server.attach("b")
    [block] = a.exchange([], 1)
    write(a, block, 1)
    a.close()
    eventually(lambda: server.blocks()["orphaned"] == 1)
    assert b.hold([(block, 1)], [])
    assert server.attach("a").inherited == []
    assert server.blocks() == {"free": BLOCKS - 1, "orphaned": 0, "held:a": 0, "held:b": 1}


# --- incarnations that take long to begin


def test_what_is_claimed_waits_as_long_as_it_takes(server):
    a = server.attach("a", 6)
    blocks = a.exchange([], 6)
    write_chain(a, blocks[:3])
    a.close()
    eventually(lambda: server.blocks()["orphaned"] == 3)
    server.clock.advance(59)
    open_pool = shared_pool(server.path, "a", 9)
    assert open_pool.promised == 6 * LAYOUT.block_bytes
    server.clock.advance(1000)
    assert server.counts() == EMPTY | {"free": BLOCKS - 3, "orphaned": 3, "pools": 1, "resident_bytes": 3 * 4096}
    pool = open_pool(LAYOUT, 6)
    assert {r.block for r in pool.inherited} == set(blocks[:3])
    pool.close()
    eventually(lambda: server.blocks()["orphaned"] == 3)
    server.clock.advance(60)
    eventually(lambda: server.counts() == EMPTY)


def test_a_claim_that_came_to_nothing_begins_the_wait_anew(server):
    a = server.attach("a")
    write_chain(a, a.exchange([], 3))
    a.close()
    eventually(lambda: server.blocks()["orphaned"] == 3)
    place = KVPoolClaim(server.path, "a", 8)
    server.clock.advance(100)
    place.close()
    server.clock.advance(59)
    assert server.blocks()["orphaned"] == 3
    again = KVPoolClaim(server.path, "a", 9)
    server.clock.advance(100)
    last = KVPoolClaim(server.path, "a", 10)  # its end has not been seen
    with pytest.raises(Unavailable):
        again.attach(LAYOUT, 3)
    heir = last.attach(LAYOUT, 3)
    assert len(heir.inherited) == 3
    heir.close()


def test_a_claim_ends_the_incarnation_before(server):
    a = server.attach("a", 6)
    write_chain(a, a.exchange([], 3))
    place = KVPoolClaim(server.path, "a", 99)
    assert place.promised == 6 * LAYOUT.block_bytes
    with pytest.raises(Unavailable):
        a.exchange([], 1)
    place.close()


def test_nothing_was_promised_to_who_left_nothing(server):
    a = server.attach("a")
    a.exchange([], 3)
    a.close()
    eventually(lambda: server.counts() == EMPTY)
    place = KVPoolClaim(server.path, "a", 99)
    assert place.promised == 0
    place.close()


def test_all_memory_that_is_free_goes_with_a_quota(server):
    """Also where others hold blocks behind it, or a later life would find less memory than there is."""
    a, b = server.attach("a", 10), server.attach("b", 10)
    for client in (a, b):
        for block in client.exchange([], 10):
            client.memory.block(block)[:] = b"x" * 4096
    a.close()
    eventually(lambda: server.counts()["resident_bytes"] == 10 * 4096)
    assert b.exchange([], 0) == []


# --- damage


def test_what_is_damaged_is_never_inherited(server):
    a = server.attach("a", 16)
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
    heir = server.attach("a", 16)
    assert {r.block for r in heir.inherited} == whole
    assert server.blocks() == {"free": BLOCKS - 2, "orphaned": 0, "held:a": 2}


def test_damage_while_orphaned_is_seen(server):
    a, b = server.attach("a"), server.attach("b")
    one, two = a.exchange([], 2)
    write_chain(a, [one, two])
    a.close()
    eventually(lambda: server.blocks()["orphaned"] == 2)
    b.records._memory.block(one)[30] ^= 1
    heir = server.attach("a")
    assert [r.block for r in heir.inherited] == [two]
    assert heir.records.get(one) is None
    assert server.blocks()["held:a"] == 1


def test_two_blocks_of_one_key_become_one(server):
    a = server.attach("a")
    one, two = a.exchange([], 2)
    write(a, one, 5)
    write(a, two, 5)
    a.close()
    assert len(server.attach("a").inherited) == 1
    assert server.blocks()["held:a"] == 1


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
