"""The thread between the device and the tier below it: order, what it verifies, and what a failure costs."""

import gc
import logging
import select
import threading
import time

import pytest

from penstock.engine.mover import PIECE, SlotMover
from penstock.kv.connector import Move, Moved

BYTES = 8


class Shelves:
    """`Slots`: copies between two lists. It waits at `gate`, and fails where `fails` is set."""

    block_bytes = BYTES

    def __init__(self, blocks, slots):
        self.blocks = [bytes([i]) * BYTES for i in range(blocks)]
        self.slots = [bytearray(BYTES) for _ in range(slots)]
        self.gate = threading.Event()
        self.gate.set()
        self.began = []
        self.fails = False
        self.closed = False

    def wait_begun(self):
        deadline = time.monotonic() + 20
        while not self.began:
            assert time.monotonic() < deadline
            time.sleep(0.001)

    def pass_gate(self, what):
        self.began.append(what)
        assert self.gate.wait(20)
        if self.fails:
            raise MemoryError("no way")

    def store(self, moves):
        self.pass_gate(("store", len(moves)))
        for block, slot, *_ in moves:
            self.slots[slot][:] = self.blocks[block]
        return [self.content(move.slot) for move in moves]

    def load(self, moves):
        self.pass_gate(("load",))
        count = 0
        for block, slot, *_ in moves:
            self.blocks[block] = bytes(self.slots[slot])
            count += 1
        return count

    def content(self, slot):
        return memoryview(self.slots[slot])

    def close(self):
        self.closed = True


@pytest.fixture
def shelves():
    return Shelves(blocks=2 * PIECE, slots=2 * PIECE)


@pytest.fixture
def mover(shelves):
    mover = SlotMover(shelves)
    yield mover
    shelves.gate.set()
    mover.close()


def key(i):
    return bytes([i]) * 16


def moves(count, blocks=0, slots=0):
    """Of blocks and slots that follow each other; a slot's number is that of its key."""
    return tuple(Move(blocks + i, slots + i, key(slots + i)) for i in range(count))


def has_rung(mover, seconds=0.0):
    return bool(select.select([mover], [], [], seconds)[0])


def push(moves):
    return SlotMover.push, moves


def pull(moves):
    return SlotMover.pull, moves


def give(mover, *orders):
    for start, moves in orders:
        start(mover, moves)


def carried(mover, *orders) -> list[Moved]:
    give(mover, *orders)
    mover.settle()
    return mover.poll()


def test_what_was_stored_is_loaded(mover, shelves):
    (stored,) = carried(mover, push(moves(3)))
    assert (stored.handle, len(stored.blocks)) == (1, 3)
    (loaded,) = carried(mover, pull(moves(3, blocks=5)))
    assert (loaded.handle, len(loaded.blocks)) == (2, 3)
    assert shelves.blocks[5:8] == shelves.blocks[:3]
    assert loaded.seconds >= 0


def test_it_knows_which_keys_it_has(mover):
    def there(*numbers):
        (answer,) = carried(mover, (SlotMover.ask, tuple(Move(i, 0, key(n)) for i, n in enumerate(numbers))))
        return len(answer.blocks)

    assert there(0) == 0
    carried(mover, push(moves(3)))
    assert there(0, 1, 2, 3) == 3
    assert there(9, 0) == 0
    carried(mover, push((Move(0, 1, key(9)),)))
    assert there(0, 1, 2) == 1
    assert there(9, 0) == 2


def test_it_rings_exactly_as_long_as_there_is_something_to_take(mover, shelves):
    shelves.gate.clear()
    assert mover.poll() == []
    give(mover, push(moves(1)), push(moves(1, slots=1)))
    assert mover.poll() == []
    assert not has_rung(mover, 0.01)
    shelves.gate.set()
    mover.settle()
    assert has_rung(mover)
    assert [moved.handle for moved in mover.poll()] == [1, 2]
    assert not has_rung(mover)


def test_loads_come_before_stores_that_wait_and_between_the_pieces_of_one(mover, shelves):
    carried(mover, push(moves(2)))
    shelves.began.clear()
    shelves.gate.clear()
    give(mover, push(moves(PIECE + 1, slots=2)), push(moves(1, slots=2 + PIECE + 1)))
    shelves.wait_begun()
    give(mover, pull(moves(2)), pull(moves(1)))
    shelves.gate.set()
    mover.settle()
    assert shelves.began == [("store", PIECE), ("load",), ("load",), ("store", 1), ("store", 1)]
    over = mover.poll()
    assert [moved.handle for moved in over] == [4, 5, 2, 3]
    assert [len(moved.blocks) for moved in over] == [2, 1, PIECE + 1, 1]


def test_the_wait_for_a_turn_is_not_counted(mover, shelves):
    carried(mover, push(moves(1)))
    shelves.gate.clear()
    give(mover, pull(moves(1)), pull(moves(1)))
    threading.Timer(0.2, shelves.gate.set).start()
    mover.settle()
    first, second = mover.poll()
    assert first.seconds > 0.15
    assert second.seconds < 0.1


def test_a_copy_that_changed_and_all_after_it_are_not_brought(mover, shelves, caplog):
    carried(mover, push(moves(4)))
    shelves.slots[2][5] ^= 1
    before = shelves.blocks[10:14]
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            (loaded,) = carried(mover, pull(moves(4, blocks=10)))
            assert len(loaded.blocks) == 2
    assert shelves.blocks[10:12] == shelves.blocks[:2]
    assert shelves.blocks[12:14] == before[2:]
    assert len(caplog.messages) == 1
    (again,) = carried(mover, push(moves(1, blocks=2, slots=2)))
    assert len(again.blocks) == 1
    assert len(carried(mover, pull(moves(4, blocks=10)))[0].blocks) == 4


def test_a_copy_of_something_else_is_not_brought(mover):
    carried(mover, push(moves(2)))
    wrong = (Move(9, 0, key(0)), Move(10, 1, key(7)))
    assert len(carried(mover, pull(wrong))[0].blocks) == 1
    never = (Move(9, 5, key(5)),)
    assert len(carried(mover, pull(never))[0].blocks) == 0


def test_what_fails_costs_one_order(mover, shelves, caplog):
    carried(mover, push(moves(2)))
    shelves.fails = True
    with caplog.at_level(logging.WARNING):
        over = carried(mover, push(moves(3, slots=1)), pull(moves(1)))
    assert [(moved.handle, len(moved.blocks)) for moved in over] == [(3, 0), (2, 0)]
    assert len(caplog.messages) == 1
    assert "MemoryError: no way" in caplog.text
    shelves.fails = False
    over = carried(mover, pull(moves(2, blocks=5)))
    assert len(over[0].blocks) == 1, "of the second, nobody knows what is there"


def test_a_store_of_which_a_later_piece_fails_is_none(mover, shelves):
    shelves.gate.clear()
    give(mover, push(moves(PIECE + 1)))
    shelves.wait_begun()
    store, failed = shelves.store, []

    def second_fails(moves):
        if len(moves) == 1 and not failed:
            failed.append(moves)
            raise OSError
        return store(moves)

    shelves.store = second_fails
    shelves.gate.set()
    mover.settle()
    assert [(moved.handle, len(moved.blocks)) for moved in mover.poll()] == [(1, 0)]
    assert len(carried(mover, push(moves(PIECE + 1)))[0].blocks) == PIECE + 1


def test_closing_waits_for_what_is_under_way_and_drops_the_rest(shelves):
    mover = SlotMover(shelves)
    shelves.gate.clear()
    give(mover, push(moves(1)), push(moves(1, slots=1)))
    shelves.wait_begun()
    threading.Timer(0.05, shelves.gate.set).start()
    mover.close()
    assert shelves.closed
    assert shelves.began == [("store", 1)]
    mover.settle()
    mover.close()


def test_it_ends_with_its_owner(shelves):
    before = set(threading.enumerate())
    mover = SlotMover(shelves)
    (thread,) = set(threading.enumerate()) - before
    del mover
    gc.collect()
    thread.join(20)
    assert not thread.is_alive()
    assert shelves.closed
