"""The keeper over real sockets: shares, holds, lives that end, and clients that misbehave."""

import contextlib
import os
import random
import socket
import struct
import threading
import time
from dataclasses import replace

import msgspec
import pytest

from penstock.core.clock import ManualClock
from penstock.core.errors import ConfigError, Unavailable
from penstock.core.layout import KVLayout
from penstock.core.wire import PROTOCOL
from penstock.core.wire.keeper import Attach, Exchange, KeeperRefused, Status, StatusReport, decode_reply
from penstock.kv.keys import KEY_BYTES
from penstock.transfer.keeper import KeeperServer
from penstock.transfer.keeper_client import KeeperClient, Place, keeper_status, leaves_first
from penstock.transfer.keeper_link import MAX_MESSAGE, frame
from penstock.transfer.pool import keeper_pool
from penstock.transfer.records import Record
from tests.helpers.links import no_descriptors

LAYOUT = KVLayout(model="m", order="block", dtype="float32", layers=1, kv_heads=1, head_dim=8, block_bytes=4096)
ROOT = b"r" * KEY_BYTES
EMPTY = {"free": 0, "orphaned": 0, "pools": 0, "clients": 0, "resident_bytes": 0}
BLOCKS = 1 << 20  # room in the keeper's pool for blocks of this size


def key(number: int) -> bytes:
    return number.to_bytes(KEY_BYTES, "little")


def eventually(condition):
    """The first true value of the condition."""
    deadline = time.monotonic() + 20
    while not (value := condition()):
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.002)
    return value


class Keeper:
    """A server in a thread, and everything that a test attached to it."""

    def __init__(self, path):
        self.path = path
        self.clock = ManualClock()
        self.server = KeeperServer(path, orphan_seconds=60, clock=self.clock)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self.server.run, args=(self._stopped.is_set, 0.005))
        self._thread.start()
        self._open = contextlib.ExitStack()
        self._lives = 0

    def attach(self, name, quota=8, layout=LAYOUT, incarnation=None):
        self._lives += 1
        client = KeeperClient.attach(self.path, name, incarnation or self._lives, layout, quota)
        self._open.callback(client.close)
        return client

    def counts(self):
        report = keeper_status(self.path)
        assert report.broken == ""
        report.counts.pop("open_files")
        return report.counts

    def blocks(self):
        return {state: n for state, n in self.counts().items() if state not in ("pools", "clients", "resident_bytes")}

    def stop(self):
        self._open.close()
        self._stopped.set()
        self._thread.join(20)
        self.server.close()


@pytest.fixture
def keeper(tmp_path):
    before = set(os.listdir("/proc/self/fd"))
    keeper = Keeper(str(tmp_path / "keeper"))
    yield keeper
    keeper.stop()
    assert set(os.listdir("/proc/self/fd")) == before, "descriptors leak"
    assert not os.path.exists(keeper.path)


def write(client, block, number, parent=ROOT):
    """Fill a block and publish it."""
    client.memory.block(block)[:] = bytes([number % 251 + 1]) * LAYOUT.block_bytes
    client.records.put(block, key(number), parent, client.memory.checksum(block))


def write_chain(client, blocks, first=1):
    """Publish blocks as one sequence, head first."""
    parent = ROOT
    for number, block in enumerate(blocks, first):
        write(client, block, number, parent)
        parent = key(number)


def rest_of(client):
    """What it holds as (block, generation)."""
    return [(r.block, r.generation) for r in client.inherited]


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


# --- clients that misbehave


def raw(keeper):
    client = socket.socket(socket.AF_UNIX)
    client.settimeout(20)
    client.connect(keeper.path)
    return client


def read(client, length):
    """So many bytes, or what there was before the end."""
    data = b""
    while len(data) < length and (more := client.recv(length - len(data))):
        data += more
    return data


def answer(client):
    head = read(client, 4)
    return decode_reply(read(client, *struct.unpack("<I", head))) if head else None


def attach_raw(client, name="x", **changes):
    client.sendall(frame(msgspec.structs.replace(Attach(name, 99, LAYOUT, 4), **changes)))
    return answer(client)


@pytest.mark.parametrize(
    "rubbish",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        struct.pack("<I", 0),
        struct.pack("<I", MAX_MESSAGE + 1),
        struct.pack("<I", 5) + b"\xff\xff\xff\xff\xff",
        struct.pack("<I", 2) + b"\x80\x00",
        frame(StatusReport({})),
        frame(Exchange([], 1)),  # not attached
        os.urandom(4096),
    ],
)
def test_rubbish_ends_that_connection_only(keeper, rubbish):
    good = keeper.attach("good")
    with raw(keeper) as client:
        client.sendall(rubbish)
        if rubbish[3] == 0 and struct.unpack_from("<I", rubbish)[0] > len(rubbish) - 4:
            client.shutdown(socket.SHUT_WR)  # it might be waiting for the rest
        assert answer(client) is None
    assert len(good.exchange([], 8)) == 8
    assert keeper.counts()["clients"] == 1


@pytest.mark.parametrize(
    "request_of",
    [
        lambda held: Exchange(held, 5),  # beyond its quota
        lambda held: Exchange([], -1),
        lambda held: Exchange([BLOCKS - 1], 1),  # not its own
        lambda held: Exchange([-1], 1),
        lambda held: Exchange([held[0], held[0]], 1),
        lambda held: Attach("x", 100, LAYOUT, 4),  # twice
    ],
)
def test_what_no_sound_client_asks_ends_its_life(keeper, request_of):
    with raw(keeper) as client:
        attach_raw(client)
        client.sendall(frame(Exchange([], 4)))
        held = answer(client).blocks
        client.sendall(frame(request_of(held)))
        assert answer(client) is None
    eventually(lambda: keeper.counts() == EMPTY)


def test_another_protocol_is_refused_with_both_values(keeper):
    with raw(keeper) as client:
        refused = attach_raw(client, protocol=1)
        assert isinstance(refused, KeeperRefused)
        assert f"protocol: {PROTOCOL} here, 1 there" in refused.message


def test_a_message_may_come_in_pieces(keeper):
    with raw(keeper) as client:
        for byte in frame(Status()):
            client.sendall(bytes([byte]))
        assert isinstance(answer(client), StatusReport)
        client.sendall(frame(Status()) * 3)
        assert all(isinstance(answer(client), StatusReport) for _ in range(3))


def test_nobody_waits_for_one_who_does_not_read(keeper):
    good = keeper.attach("good")
    with raw(keeper) as lazy:
        lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        attach_raw(lazy, quota=100_000)
        asked = frame(Exchange([], 100_000)) + frame(Exchange([], 0)) * 3
        lazy.sendall(asked)  # an answer of 500 KB that stays unread
        [block] = good.exchange([], 1)
        for _ in range(50):
            [block] = good.exchange([block], 1)
        assert keeper.blocks()["held:x"] == 100_000
        assert len(answer(lazy).blocks) == 100_000  # all of it arrives in the end
        assert [answer(lazy).blocks for _ in range(3)] == [[], [], []]
        lazy.sendall(frame(Status()) * 500)  # and it may leave with answers unread
    eventually(lambda: keeper.blocks() == {"free": BLOCKS - 1, "orphaned": 0, "held:good": 1})


def test_without_descriptors_it_waits_and_does_not_spin(keeper, monkeypatch, caplog):
    tries = []
    accept = KeeperServer._accept
    monkeypatch.setattr(KeeperServer, "_accept", lambda server: (tries.append(1), accept(server)))
    good = keeper.attach("good")
    with socket.socket(socket.AF_UNIX) as late:
        late.settimeout(20)
        before = len(tries)
        with no_descriptors():
            late.connect(keeper.path)
            eventually(lambda: len(tries) > before)
            for _ in range(20):
                assert len(good.exchange([], 0)) == 0  # whoever is here is served
                assert "open_files" not in good.status().counts
            keeper.clock.advance(1)
            eventually(lambda: len(tries) > before + 1)
        assert len(tries) == before + 2
        keeper.clock.advance(1)
        assert attach_raw(late) is not None
    assert [record.getMessage() for record in caplog.records if "accepted" in record.getMessage()] == [
        "no connection can be accepted for now: [Errno 24] Too many open files"
    ]


def test_one_keeper_a_path(keeper, tmp_path):
    with pytest.raises(ConfigError, match="nobody can listen there"):
        KeeperServer(keeper.path)
    assert keeper.counts() == EMPTY  # the first one is still there
    (tmp_path / "file").write_text("precious")
    with pytest.raises(ConfigError, match="nobody can listen there"):
        KeeperServer(str(tmp_path / "file"))
    assert (tmp_path / "file").read_text() == "precious"
    with pytest.raises(ConfigError, match="nobody can listen there"):
        KeeperServer(str(tmp_path / ("x" * 200)))


def test_the_socket_of_a_killed_keeper_is_replaced(tmp_path):
    path = str(tmp_path / "keeper")
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(path)
    KeeperServer(path).close()
    assert not os.path.exists(path)
