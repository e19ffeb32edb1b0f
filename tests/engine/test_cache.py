"""KV memory: what lies behind a slot is the block that it should be, in either address mode, whoever comes and goes."""

import ctypes
import errno
import gc
import os
import random
import subprocess
import sys
import threading
import time
import weakref
from queue import Empty, SimpleQueue

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.layout import KVLayout, attention_groups, bytes_per_block
from penstock.core.plan import SequenceStep, StepPlan
from penstock.core.sampling import SamplingParams
from penstock.engine import cache as cache_module
from penstock.engine.arena import Arena, Mapper
from penstock.engine.cache import ContiguousCache, KVCache, Prefaulter
from penstock.kv.pool import BlockPool
from penstock.kv.ranges import Change
from penstock.transfer.memory import PoolMemory
from tests.helpers.engines import Collector, make_engine, make_request
from tests.helpers.links import open_files

LAYOUT = KVLayout(
    model="", order="block", dtype="float32", groups=attention_groups((None,) * 1, 1, 8, "float32"), block_bytes=4096
)


@pytest.fixture
def memory():
    memory = PoolMemory.memfd(12, 4096)
    for block in range(12):
        memory.block(block)[:] = bytes([block + 1]) * 4096
    yield memory
    memory.close()


def read(arena: Arena, slot: int, count: int = 1) -> list[int]:
    """First byte of every block, less one."""
    return [ord(arena.buffer()[s * 4096]) - 1 for s in range(slot, slot + count)]


def test_slots_show_the_blocks_that_lie_behind_them(memory):
    arena = Arena(memory, 8)
    assert read(arena, 0, 12) == list(range(12))
    arena.map(12, 7)
    arena.map(13, 2, 3)
    assert read(arena, 12, 4) == [7, 2, 3, 4]
    arena.map(14, 7, populate=False)
    assert read(arena, 12, 4) == [7, 2, 7, 4]
    ctypes.memset(arena._address + 12 * 4096, 99, 1)
    assert memory.block(7)[0] == 99, "one memory, however it is addressed"
    assert read(arena, 14) == [98]
    arena.clear(13)
    assert not any(memory.block(2))


def test_what_is_not_mapped_cannot_be_read():
    code = """
from penstock.engine import cache as cache_module
from penstock.engine.arena import Arena
from penstock.transfer.memory import PoolMemory
arena = Arena(PoolMemory.memfd(2, 4096), 2)
arena.map(2, 0)
arena.buffer()[2 * 4096]
arena.unmap(2)
print("so far so good", flush=True)
arena.buffer()[2 * 4096]
print("read")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "so far so good\n", done.stderr
    assert done.returncode < 0


def test_an_arena_lives_as_long_as_what_looks_at_it(memory):
    before = open_memory()
    arena = Arena(memory, 8)
    buffer = arena.buffer()
    del arena
    gc.collect()
    assert buffer[0] == b"\x01"
    assert open_memory() - before
    del buffer
    assert not open_memory() - before


def test_the_thread_has_mapped_when_now_returns(memory):
    arena = Arena(memory, 8)
    mapper = Mapper(arena)
    mapper.now([Change(12, 5), Change(13, 6), Change(14, 1)])
    assert mapper.counters.calls == 2  # 5 and 6 are neighbours
    mapper.ahead([Change(15, 2), Change(13, None)], clear=[15])
    mapper.now([Change(12, 9)])
    assert read(arena, 12) == [9]
    assert read(arena, 14, 2) == [1, -1]
    c = mapper.counters
    assert (c.mapped, c.unmapped, c.ahead, c.calls) == (5, 1, 1, 5)
    assert c.exposed > 0
    mapper.close()


def test_the_arena_of_memory_that_nobody_shares_is_that_memory():
    memory = PoolMemory.anonymous(12, 4096)
    for block in range(12):
        memory.block(block)[:] = bytes([block + 1]) * 4096
    arena = Arena(memory, 0)
    assert read(arena, 0, 12) == list(range(12))
    arena.clear(5)
    arena.touch(6)
    assert not any(memory.block(5))
    memory.close()
    assert read(arena, 6, 2) == [6, 7]
    with pytest.raises(AssertionError):
        Arena(PoolMemory.anonymous(1, 4096), 1)


def test_what_comes_has_its_memory_before_it_is_used():
    memory = PoolMemory.memfd(100, 65536)
    arena = Arena(memory, 0)
    reserve = Prefaulter(arena)
    assert reserve.size == 64
    pool = BlockPool(range(100))
    reserve.expect(pool.coming(reserve.size))
    reserve.settle()
    assert memory.resident_bytes == 64 * 65536
    taken = pool.allocate(3)
    assert taken == [0, 1, 2]
    arena.buffer()[65536] = b"7"
    assert not reserve.use(taken)
    assert not reserve.use(pool.allocate(44))
    assert reserve.use(pool.allocate(2))  # fewer than a quarter are left
    reserve.expect(pool.coming(reserve.size))
    reserve.expect(taken)  # have theirs
    reserve.settle()
    assert memory.resident_bytes == 100 * 65536
    assert arena.buffer()[65536] == b"7"
    reserve.close()


def test_memory_is_found_when_nothing_runs_or_little_is_left(monkeypatch):
    touched: SimpleQueue[int] = SimpleQueue()
    monkeypatch.setattr(Arena, "touch", lambda arena, block: touched.put(block))
    monkeypatch.setattr(cache_module, "QUIET", 0.001)
    memory = PoolMemory.memfd(100, 4096)
    reserve = Prefaulter(Arena(memory, 0))
    memory.close()
    reserve.expect([0])
    assert touched.get(timeout=30) == 0
    reserve.use([0])
    reserve._wanted.put(1)
    with pytest.raises(Empty):
        touched.get(timeout=0.05)  # something runs
    reserve.expect([2])
    assert [touched.get(timeout=30) for _ in range(2)] == [1, 2]
    reserve.use([1])
    reserve.expect([3, 4], hurry=True)
    assert [touched.get(timeout=30) for _ in range(2)] == [3, 4]
    while reserve._pause._hurry:  # it ends when there is no more
        time.sleep(0.001)
    reserve.use([3])
    reserve._wanted.put(5)
    reserve.close()  # though it waits
    assert touched.empty()


def open_memory() -> set[tuple[int, str]]:
    """Files in memory that this process has open."""
    gc.collect()
    return {(number, what) for number, what in open_files() if "memfd" in what}


@pytest.mark.parametrize("make", [PoolMemory.memfd, PoolMemory.anonymous], ids=["memfd", "anonymous"])
@pytest.mark.parametrize("close", [True, False], ids=["closed", "dropped"])
def test_what_nobody_needs_any_more_is_not_touched(close, make, monkeypatch):
    begun, go_on, touched = threading.Event(), threading.Event(), []

    def touch(arena, block):
        touched.append(block)
        begun.set()
        assert go_on.wait(30)

    monkeypatch.setattr(Arena, "touch", touch)
    before = open_memory()
    memory = make(100, 4096)
    cache = KVCache.over_pool(LAYOUT, memory)
    mapping = weakref.ref(memory._map)
    memory.close()
    del memory
    cache.prefaulter.expect(range(64))
    assert begun.wait(30)
    threading.Timer(0.05, go_on.set).start()
    thread = cache.prefaulter._thread
    if close:
        cache.close()
    else:
        del cache
        gc.collect()
    thread.join(30)
    assert touched == [0]
    assert not open_memory() - before
    assert mapping() is None


@pytest.mark.parametrize("error", [errno.EINVAL, errno.ENOMEM])
def test_where_the_kernel_cannot_touch(error, monkeypatch):
    memory = PoolMemory.memfd(4, 65536)
    arena = Arena(memory, 0)
    monkeypatch.setattr("penstock.core.mappings.touch", lambda address, size: error)
    if error == errno.EINVAL:  # it is older
        arena.touch(2)
        assert memory.resident_bytes == 0
    else:
        with pytest.raises(OSError, match="madvise of block 2"):
            arena.touch(2)


def test_a_mapping_that_fails_is_not_passed_over(memory):
    arena = Arena(memory, 2)
    mapper = Mapper(arena)
    spare, arena._fd = arena._fd, os.open("/dev/null", os.O_RDONLY)
    mapper.ahead([Change(12, 1)], clear=[])
    with pytest.raises(OSError, match="mmap of 4096 bytes"):
        mapper.now([])
    os.close(arena._fd)
    arena._fd = spare


def step(name: str, blocks: list[int], ahead: list[int]) -> SequenceStep:
    start = (len(blocks) - 1) * 64
    return SequenceStep(name, start, [1], tuple(blocks), 1, SamplingParams(), 0, ahead=tuple(ahead))


PLANS = st.lists(
    st.tuples(
        st.dictionaries(
            st.sampled_from("abcd"),
            st.tuples(st.lists(st.integers(0, 11), min_size=1, max_size=4, unique=True), st.integers(0, 2)),
            max_size=4,
        ),
        st.sets(st.sampled_from("abcd")),
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=60)
@given(plans=PLANS, budget=st.integers(1, 14), max_sequences=st.integers(1, 4))
def test_kernels_see_what_the_plan_says(plans, budget, max_sequences):
    memory = PoolMemory.memfd(12, 4096)
    cache = ContiguousCache(LAYOUT, memory, max_sequences=max_sequences, range_blocks=4, budget=budget)
    memory.close()
    for wanted, released in plans:
        for block in range(12):
            cache.blocks[block] = block
        steps = [step(name, b[: len(b) - a] or b, b[len(b) - a :] * (a < len(b))) for name, (b, a) in wanted.items()]
        for s, slots in zip(steps, cache.prepare(StepPlan(tuple(steps), (), tuple(released))), strict=True):
            ids = list(slots)
            assert [cache.slots[i].unique().tolist() for i in ids] == [[block] for block in s.blocks]
            if not isinstance(slots, range):
                assert ids == list(s.blocks)
        cache.check()
    cache.close()


def test_fresh_blocks_are_clear_wherever_they_are_needed(memory):
    cache = ContiguousCache(LAYOUT, memory, max_sequences=2, range_blocks=4)
    cache.prepare(StepPlan((step("a", [1, 2], [3]),), (2, 3, 7)))
    assert cache.ranges.blocks("a") == [1, 2, 3]
    cache.prepare(StepPlan((step("a", [1, 2, 3], []),)))
    dirty = [block for block in range(12) if cache.blocks[block].any()]
    assert dirty == [block for block in range(12) if block not in (2, 3, 7)]
    assert cache.counters.ahead == 1


def test_nothing_is_cleared_once_it_has_settled(memory, monkeypatch):
    """A block that a step cleared ahead may be somebody else's as soon as the step is over."""
    may_clear, clear = threading.Event(), Arena.clear
    monkeypatch.setattr(Arena, "clear", lambda arena, slot: (may_clear.wait(20), clear(arena, slot)))
    cache = ContiguousCache(LAYOUT, memory, max_sequences=2, range_blocks=4)
    cache.prepare(StepPlan((step("a", [1, 2], [3]),), (3,)))
    assert memory.block(3)[0] == 4
    threading.Timer(0.05, may_clear.set).start()
    cache.settle()
    assert not any(memory.block(3))
    memory.block(3)[:] = b"\x07" * 4096  # its new owner's
    cache.settle()
    cache.prepare(StepPlan((step("b", [5], []),), released=("a",)))
    cache.close()
    assert bytes(memory.block(3)) == b"\x07" * 4096


def test_a_table_has_nothing_to_settle(memory):
    cache = KVCache.over_pool(LAYOUT, memory)
    cache.prepare(StepPlan((step("a", [1, 2], [3]),), (3,)))
    cache.settle()
    assert not any(memory.block(3))


@pytest.mark.parametrize("order", ["block", "token"])
def test_orders_differ_in_nothing_but_strides(order):
    groups = attention_groups((None, None, None), 2, 4, "float32")
    layout = KVLayout(model="", order=order, dtype="float32", groups=groups, block_bytes=16384)
    values = [layer.values for layer in KVCache.on_device(layout, 2, torch.device("cpu")).layers]
    assert {x.shape for x in values} == {(2, 2, 2, 64, 4)}
    token, layer = values[0].stride(3), values[1].storage_offset() - values[0].storage_offset()
    assert (token, layer) == ((4, 2 * 2 * 64 * 4) if order == "block" else (3 * 2 * 2 * 4, 2 * 2 * 4))


@pytest.mark.parametrize("order", ["block", "token"])
@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "float8_e4m3fn"])
def test_no_two_values_of_a_group_share_a_byte(order, dtype):
    groups = attention_groups((None, 100, 100, None), 2, 4, dtype)
    assert [group.layers for group in groups] == [(0, 3), (1, 2)]
    size = -(-bytes_per_block(groups) // 4096) * 4096
    layout = KVLayout(model="", order=order, dtype="bfloat16", groups=groups, block_bytes=size)
    cache = KVCache.on_device(layout, 2, torch.device("cpu"))
    for number, group in enumerate(groups):
        layers = [cache.layers[layer] for layer in group.layers]
        assert {layer.group for layer in layers} == {number}
        parts = [x for layer in layers for x in (layer.values, layer.scales) if x is not None]
        for x in parts:
            cache.slots.zero_()
            x.view({1: torch.int8, 2: torch.int16, 4: torch.int32}[x.itemsize]).fill_(-1)
            assert (cache.slots != 0).sum() == x.numel() * x.itemsize
            assert not any(y.float().any() for y in parts if y is not x)
        assert sum(x.nbytes for x in parts) == 2 * bytes_per_block(groups)


def test_an_engine_over_budget_computes_the_same(model):
    rng = random.Random(0)
    shared = [rng.randrange(1, 300) for _ in range(130)]
    requests = [
        make_request(f"r{i}", shared + [rng.randrange(1, 300) for _ in range(rng.randrange(5, 200))], max_tokens=70)
        for i in range(12)
    ]
    by_table = Collector(make_engine(model, address_mode="table")).run(*requests)
    for budget in (1000, 12):
        engine = make_engine(model, mapping_budget=budget)
        collector = Collector(engine)
        for request in requests:
            engine.add(request)
        while engine.has_work:
            collector.step()
            engine.executor.worker.cache.check()
        assert collector.tokens == by_table
        counts = engine.executor.worker.cache.ranges.counts()
        assert counts["mapped"] <= budget
        assert engine.executor.worker.cache.counters.mapped > 0
        assert (engine.executor.worker.cache.counters.unmapped > 0) == (budget == 12)
