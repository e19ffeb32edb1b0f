"""What an engine's next incarnation finds of what the last one left."""

from contextlib import ExitStack, closing

import pytest
import torch

import penstock.engine.memory
from penstock.core.clock import SystemClock
from penstock.core.errors import ConfigError
from penstock.core.plan import BLOCK_TOKENS
from penstock.engine.build import EngineOptions, build_engine
from penstock.engine.calibration import calibrated
from penstock.kv.keys import extend_keys
from penstock.kv.pool import Published
from penstock.nn import native
from penstock.transfer.memory import PoolMemory
from penstock.transfer.pool import KVPool, shared_pool
from penstock.transfer.records import Record
from tests.helpers.checkpoints import edit, write_checkpoint
from tests.helpers.engines import Collector, make_request
from tests.helpers.links import pool_server


@pytest.mark.parametrize("mode", ["contiguous", "table"])
def test_a_next_incarnation_finds_what_the_last_one_left(checkpoint, mode):
    options = EngineOptions(
        model=str(checkpoint), max_num_seqs=4, max_num_batched_tokens=256, max_model_len=512, kv_address_mode=mode
    )
    memory, left = [], []

    def open_pool(layout, quota):
        if not memory:
            memory.append(PoolMemory.memfd(2 * quota, layout.block_bytes))
        taken = {record.block for record in left}
        return KVPool(memory[0], [b for b in range(quota, 2 * quota) if b not in taken], left)

    prompt = [i % 290 + 1 for i in range(200)]
    first = build_engine(options, SystemClock(), open_pool)
    tokens = Collector(first.engine).run(make_request("a", prompt))["a"]
    added = published(first.engine.scheduler, prompt)
    assert len(added) == 3
    left += [Record(p.block, p.key, p.parent, checksum=0, generation=1) for p in reversed(added)]
    second = build_engine(options, SystemClock(), open_pool)
    collector = Collector(second.engine)
    assert collector.run(make_request("a", prompt))["a"] == tokens
    assert collector.cached["a"] == 192
    assert second.layout == first.layout
    second.close()


@pytest.mark.parametrize(("asked", "name"), [(None, "qwen3"), (12 << 20, "qwen3"), (None, "gemma3")])
def test_a_next_incarnation_has_the_memory_that_the_last_one_left(asked, name, tmp_path, monkeypatch):
    """What it left is not free on the machine, and nothing that is loaded meanwhile may be as slow as to lose it."""
    free = [30 << 20]
    monkeypatch.setattr(penstock.engine.memory, "available_memory", lambda: free[0])
    options = EngineOptions(
        model=str(write_checkpoint(tmp_path / "model", name)),
        max_num_seqs=64,
        max_num_batched_tokens=256,
        max_model_len=512,
        kv_cache_memory=asked,
    )
    prompt = [i % 290 + 1 for i in range(200)]
    with pool_server(tmp_path / "kv-pool") as path:
        first = build_engine(options, SystemClock(), shared_pool(path, "a", 1))
        Collector(first.engine).run(make_request("a", prompt))
        first.close()
        free[0] = 1 << 20
        second = build_engine(options, SystemClock(), shared_pool(path, "a", 2))
        assert second.engine.scheduler.pool.num_blocks == first.engine.scheduler.pool.num_blocks
        collector = Collector(second.engine)
        collector.run(make_request("a", prompt))
        assert collector.cached["a"] == 192
        second.close()
        if asked is not None:
            with pytest.raises(ConfigError, match="kv-cache-memory"):
                build_engine(options, SystemClock(), shared_pool(path, "b", 3))


def test_what_was_computed_with_weights_that_have_been_edited_since_is_not_found(tmp_path):
    """By its next incarnation, or by others that look for what failed ones have left."""
    folder = write_checkpoint(tmp_path / "model", "qwen3")
    options = EngineOptions(
        model=str(folder), max_num_seqs=4, max_num_batched_tokens=256, max_model_len=512, kv_cache_memory=8 << 20
    )
    prompt = [i % 290 + 1 for i in range(200)]

    def found(name, incarnation):
        """Of its own, and of what others have left."""
        with closing(build_engine(options, SystemClock(), shared_pool(path, name, incarnation))) as built:
            collector = Collector(built.engine)
            collector.run(make_request("a", prompt))
            keys = [each.key for each in published(built.engine.scheduler, prompt)]
            return collector.cached["a"], 3 - built.pool.client.find(keys).count(None)

    with pool_server(tmp_path / "kv-pool") as path:
        assert [found("a", 1), found("a", 2)] == [(0, 0), (192, 0)]
        edit(folder)
        assert [found("b", 3), found("a", 4), found("a", 5)] == [(0, 0), (0, 3), (192, 3)]


@pytest.mark.skipif(native.missing() is not None, reason="ranks of one machine meet in native code")
def test_what_other_ranks_have_rounded_is_not_found(tmp_path):
    folder = write_checkpoint(tmp_path / "model", "qwen3-moe")
    common = {"max_num_seqs": 4, "max_num_batched_tokens": 256, "max_model_len": 512, "kv_cache_memory": 8 << 20}
    prompt = [i % 290 + 1 for i in range(200)]

    def cached(incarnation, **layout):
        options = EngineOptions(model=str(folder), device="cpu", **common, **layout)
        with closing(build_engine(options, SystemClock(), shared_pool(path, "a", incarnation))) as built:
            collector = Collector(built.engine)
            collector.run(make_request("a", prompt))
            return collector.cached["a"]

    two, threads = {"tensor_parallel_size": 2}, native.threads()
    try:
        with pool_server(tmp_path / "kv-pool") as path:
            assert [cached(i, **layout) for i, layout in enumerate(({}, two, two), 1)] == [0, 0, 192]
    finally:
        native.set_threads(threads)


@pytest.mark.skipif(native.missing() is not None, reason="ranks of one machine meet in native code")
def test_ranks_that_find_out_how_fast_they_are_leave_the_blocks_of_others_as_they_are(tmp_path):
    folder, clock = write_checkpoint(tmp_path / "model", "qwen3"), SystemClock()
    common = {"max_num_seqs": 4, "max_num_batched_tokens": 256, "max_model_len": 512, "kv_cache_memory": 8 << 20}
    prompt = [i % 290 + 1 for i in range(200)]
    threads = native.threads()
    with pool_server(tmp_path / "kv-pool") as path, ExitStack() as stack:

        def build(name, incarnation, **layout):
            options = EngineOptions(model=str(folder), device="cpu", **common, **layout)
            built = build_engine(options, clock, shared_pool(path, name, incarnation))
            return stack.enter_context(closing(built))

        first = build("a", 1)
        collector = Collector(first.engine)
        tokens = list(collector.run(make_request("before", prompt))["before"])
        second = build("b", 2, tensor_parallel_size=2)
        native.set_threads(threads)
        calibrated(second.trial(), torch.device("cpu"), second.shape, clock)
        second.engine.check()
        assert second.engine.scheduler.pool.used == 0
        assert collector.run(make_request("after", prompt))["after"] == tokens
        assert collector.cached["after"] >= 192


def published(scheduler, tokens):
    """What can be found of `tokens`, parents before children."""
    keys = []
    extend_keys(keys, scheduler.root, tokens, len(tokens) // BLOCK_TOKENS)
    blocks = scheduler.pool.match(keys)
    return [Published(*each) for each in zip(blocks, keys, [scheduler.root, *keys], strict=False)]
