"""The bytes of a pool, and what is recorded of them."""

import mmap
import os
import random
import sys
import threading
import time
import weakref

import pytest

from penstock.kv.keys import KEY_BYTES
from penstock.transfer.memory import PoolMemory, copy_bytes
from penstock.transfer.records import RECORD_BYTES, Record, Records

KEY, PARENT = b"k" * KEY_BYTES, b"p" * KEY_BYTES


@pytest.fixture
def memory():
    memory = PoolMemory.memfd(8, 8192)
    yield memory
    memory.close()


@pytest.fixture
def table():
    table = PoolMemory.memfd(4, RECORD_BYTES)
    yield table
    table.close()


def test_two_mappings_are_one_memory(memory):
    other = PoolMemory(os.dup(memory.fd), 8, 8192)
    memory.block(3)[:5] = b"hello"
    assert bytes(other.block(3)[:5]) == b"hello"
    assert bytes(other.buffer[3 * 8192 : 3 * 8192 + 5]) == b"hello"
    assert other.checksum(3) == memory.checksum(3) != memory.checksum(2)
    assert other.address != memory.address
    other.close()


def test_a_tebibyte_costs_what_is_written():
    memory = PoolMemory.memfd(1 << 17, 8 << 20)
    assert memory.resident_bytes == 0
    memory.block((1 << 17) - 1)[:4096] = b"x" * 4096
    memory.block(5)[:] = b"y" * (8 << 20)
    assert 0 < memory.resident_bytes - (8 << 20) <= 2 << 20  # up to a huge page
    memory.punch(5, 1)
    assert memory.resident_bytes <= 2 << 20
    assert not any(memory.block(5)[: 1 << 16])
    memory.close()


def test_nobody_can_make_it_shorter(memory):
    with pytest.raises(PermissionError):
        os.ftruncate(memory.fd, 4096)


def test_closing_leaves_views_alone(memory):
    view = memory.block(1)
    view[:2] = b"ab"
    memory.close()
    memory.close()
    assert bytes(view[:2]) == b"ab"


def test_closing_gives_everything_back():
    before = set(os.listdir("/proc/self/fd"))
    PoolMemory.memfd(4, 4096).close()
    assert set(os.listdir("/proc/self/fd")) <= before


def test_memory_of_one_process_stays_while_somebody_holds_it():
    before = set(os.listdir("/proc/self/fd"))
    memory = PoolMemory.anonymous(8, 8192)
    assert set(os.listdir("/proc/self/fd")) <= before
    assert not any(memory.buffer)
    held = memory.held()
    memory.block(3)[:5] = b"hello"
    gone = weakref.ref(memory._map)
    memory.close()
    memory.close()
    assert held[3 * 8192 : 3 * 8192 + 5] == b"hello"
    assert gone() is not None
    del held
    assert gone() is None


def test_a_foreign_memory_must_be_large_enough(memory):
    with pytest.raises(AssertionError):
        PoolMemory(memory.fd, 9, 8192)


def test_a_record_lives_until_it_is_cleared_or_the_block_used_again(table):
    records = Records(table)
    assert records.get(2) is None
    records.begin(2, 7)
    assert records.get(2) is None
    records.put(2, KEY, PARENT, 1 << 63)
    assert records.get(2) == Record(2, KEY, PARENT, 1 << 63, 7)
    assert records.get(1) is records.get(3) is None
    records.clear(2)
    assert records.get(2) is None
    assert records.generation(2) == 7
    records.put(2, KEY, PARENT, 3)
    records.begin(2, 8)
    assert records.get(2) is None
    assert records.generation(2) == 8


@pytest.mark.parametrize("block", [4, 10**6, -1, -(2**63)])
def test_a_block_beyond_the_table_is_nobodys_row(table, block):
    records = Records(table)
    records.begin(3, 5)
    records.put(3, KEY, PARENT, 99)
    for access in (records.get, records.clear, records.generation, lambda b: records.begin(b, 1)):
        with pytest.raises(AssertionError, match=f"block {block} of 4"):
            access(block)
    assert records.get(3) is not None


def test_one_wrong_bit_makes_it_none(table):
    records = Records(table)
    records.begin(1, 5)
    records.put(1, KEY, PARENT, 99)
    whole = bytes(table.block(1))
    random.seed(0)
    for bit in range(56 * 8):
        table.block(1)[bit // 8] ^= 1 << bit % 8
        assert records.get(1) is None, f"bit {bit}"
        table.block(1)[:] = whole
    assert records.get(1) is not None


def test_a_record_written_halfway_is_none(table):
    """Whatever stood there before: nothing, or the record of an earlier use."""
    records = Records(table)
    for earlier in (False, True):
        records.begin(1, 5)
        if earlier:
            records.put(1, b"e" * KEY_BYTES, PARENT, 1)
        before = bytes(table.block(1))
        records.put(1, KEY, PARENT, 99)
        after = bytes(table.block(1))
        for written in range(9, 56):
            torn = after[:written] + before[written:]
            table.block(1)[:] = torn
            assert records.get(1) is None or torn in (before, after), written


def test_the_mapping_starts_where_it_says(memory):
    import ctypes

    memory.block(2)[:3] = b"abc"
    assert ctypes.string_at(memory.address + 2 * 8192, 3) == b"abc"
    assert memory.address % mmap.PAGESIZE == 0


def test_other_threads_run_while_bytes_are_copied():
    """With so long a switch interval they do only where the interpreter is let go of."""
    source, target, ticks, ended = memoryview(bytes(64 << 20)), memoryview(bytearray(64 << 20)), 0, False

    def tick():
        nonlocal ticks
        while not ended:
            ticks += 1
            time.sleep(1e-4)

    thread, interval = threading.Thread(target=tick), sys.getswitchinterval()
    sys.setswitchinterval(1000.0)
    try:
        thread.start()
        before, tries = ticks, 0
        while ticks == before and tries < 100:
            copy_bytes(source, target)
            tries += 1
        assert ticks > before
    finally:
        ended = True
        sys.setswitchinterval(interval)
        thread.join()
