"""An engine that sleeps has given its memory back, and says the same when it is woken up."""

import json
import os
from contextlib import closing

import numpy as np
import pytest
import torch

from penstock.core.clock import SystemClock
from penstock.core.errors import ConfigError, RankFailed
from penstock.core.memory import PARTS
from penstock.core.wire.engine import Sleep, Slept, WakeUp
from penstock.engine.build import EngineOptions, build_engine
from penstock.engine.cache import KVCache, make_layout
from penstock.engine.sleeper import CANNOT, GIVEN_UP, Sleeper
from penstock.kv.pool import BlockPool
from penstock.nn import native
from penstock.nn.loader import load_model
from penstock.transfer.pool import memfd_pool, shared_pool
from tests.helpers.checkpoints import edit, write_checkpoint
from tests.helpers.engines import Collector, make_request
from tests.helpers.links import pool_server
from tests.helpers.waiting import eventually

LIFE = 5
LONG = [(7 * i) % 300 + 1 for i in range(400)]
ENGINES = {
    "table": {"kv_address_mode": "table"},
    "contiguous": {"kv_address_mode": "contiguous"},
    "ranks": {"tensor_parallel_size": 2},
}


@pytest.fixture
def folder(tmp_path):
    pytest.importorskip("transformers")
    return write_checkpoint(tmp_path, "qwen3", dtype=torch.float32)


def build(folder, open_pool=memfd_pool, **options):
    threads = native.threads()
    try:
        return build_engine(
            EngineOptions(
                model=str(folder), device="cpu", kv_cache_memory=8 << 20, max_num_seqs=4, weight_cache=False, **options
            ),
            SystemClock(),
            open_pool,
        )
    finally:
        native.set_threads(threads)


def ask(built, name="a", **changes):
    """(tokens, how many of the prompt were cached)"""
    collector = Collector(built.engine)
    tokens = collector.run(make_request(name, LONG, **({"max_tokens": 12} | changes)))[name]
    return tokens, collector.cached[name]


def resident(address, length):
    """Bytes of a stretch of this process's addresses that have memory. Not by mappings: of two side by side the system
    makes one."""
    page = os.sysconf("SC_PAGE_SIZE")
    first, last = address // page, (address + length - 1) // page
    with open("/proc/self/pagemap", "rb", buffering=0) as pages:
        entries = np.frombuffer(os.pread(pages.fileno(), 8 * (last - first + 1), 8 * first), np.uint64)
    return page * int(np.count_nonzero(entries >> np.uint64(62)))  # present, or swapped out


def kv_bytes(built):
    block = built.runner.cache.block(0)
    return resident(block.data_ptr(), built.runner.cache.blocks.nbytes)


def carry_out(sleeper, *commands):
    """What is said of each, in the order in which it is."""
    said = [answer for command in commands for answer in sleeper.order("f", command)]
    while sleeper.orders:
        said += sleeper.tick()
        sleeper.settle()
    return [answer for _, answer in said]


def digests(model):
    return {name: hash(place.numpy().tobytes()) for name, place in model.state_dict().items()}


@pytest.mark.parametrize("kind", list(ENGINES))
def test_memory_is_given_back_and_tokens_are_the_same_afterwards(folder, kind):
    if kind == "ranks" and native.missing() is not None:
        pytest.skip("ranks of one machine meet in native code")
    with closing(build(folder, **ENGINES[kind])) as built:
        built.engine.log_cache()
        sleeper = Sleeper(LIFE, built.engine, built.memory)
        tokens, cached = ask(built)
        assert cached == 0
        assert ask(built) == (tokens, 396)
        weights = digests(built.worker.model)
        log = built.engine.cache_logs["device"]
        log.take()
        for number, level in enumerate((1, 2, 1)):
            built.engine._prefaulter.settle()
            assert kv_bytes(built) > 0
            assert carry_out(sleeper, Sleep(LIFE, number, level)) == [Slept(LIFE, number, level)]
            assert kv_bytes(built) == 0
            assert (built.worker.model.device.type == "meta") == (level == 2)
            assert log.take()[1], "the master is told that nothing is cached"
            built.engine.check()
            assert carry_out(sleeper, WakeUp(LIFE, number, ["kv_cache"])) == [Slept(LIFE, number, level)]
            assert carry_out(sleeper, WakeUp(LIFE, number, ["weights"])) == [Slept(LIFE, number, 0)]
            assert digests(built.worker.model) == weights
            assert ask(built) == (tokens, 0)
            log.take()
        if kind == "ranks":
            carry_out(sleeper, Sleep(LIFE, 4, 2))
            os.truncate(folder / "model.safetensors", 1000)
            with pytest.raises(RankFailed):  # the others would wait for one that has no weights
                carry_out(sleeper, WakeUp(LIFE, 5, list(PARTS)))


def test_what_runs_ends_before_it_sleeps_and_who_wakes_it_earlier_is_told_so(folder):
    with closing(build(folder)) as built:
        sleeper = Sleeper(LIFE, built.engine, built.memory)
        tokens, _ = ask(built)
        collector = Collector(built.engine)
        built.engine.add(make_request("b", LONG, max_tokens=12))
        collector.step()
        assert sleeper.order("f", Sleep(LIFE, 1, 2)) == []
        assert (sleeper.tick(), sleeper.level) == ([], 2)
        assert sleeper.order("g", WakeUp(LIFE, 1, list(PARTS))) == [("f", Slept(LIFE, 1, 0, GIVEN_UP))]
        assert sleeper.tick() == [("g", Slept(LIFE, 1, 0))]
        sleeper.order("f", Sleep(LIFE, 2, 1))
        sleeper.order("g", Sleep(LIFE, 1, 2))
        while built.engine.has_work:
            assert sleeper.tick() == []
            collector.step()
        assert collector.tokens["b"] == tokens
        assert [a.level for a in carry_out(sleeper, Sleep(LIFE, 3, 1))] == [2, 2, 2], "it only sleeps deeper"
        assert carry_out(sleeper, WakeUp(LIFE, 4, list(PARTS)), WakeUp(LIFE, 5, list(PARTS)))[-1] == Slept(LIFE, 5, 0)
        assert ask(built)[0] == tokens


def test_an_order_that_comes_while_another_is_carried_out_is_next(folder):
    with closing(build(folder)) as built:
        sleeper = Sleeper(LIFE, built.engine, built.memory)
        sleeper.order("f", Sleep(LIFE, 1, 2))
        told = sleeper.tick()  # it has begun
        told += sleeper.order("f", WakeUp(LIFE, 2, list(PARTS)))
        sleeper.order("f", Sleep(LIFE, 3, 1))
        eventually(lambda: told.extend(sleeper.tick()) or not sleeper.orders)
        assert [answer for _, answer in told] == [Slept(LIFE, 1, 2), Slept(LIFE, 2, 1), Slept(LIFE, 3, 1)]


def test_another_checkpoint_is_refused_and_the_right_one_is_read_later(folder):
    with closing(build(folder)) as built:
        sleeper = Sleeper(LIFE, built.engine, built.memory)
        tokens, _ = ask(built)
        carry_out(sleeper, Sleep(LIFE, 1, 2))
        config = folder / "config.json"
        before = config.read_text()
        config.write_text(json.dumps(json.loads(before) | {"rope_theta": 1234.0}))
        (answer,) = carry_out(sleeper, WakeUp(LIFE, 2, list(PARTS)))
        assert answer.level == 2
        assert "the checkpoint is another one now" in answer.error
        config.write_text(before)
        elsewhere = folder.rename(folder.with_name("elsewhere"))
        assert "config.json: not found" in carry_out(sleeper, WakeUp(LIFE, 3, list(PARTS)))[0].error
        elsewhere.rename(folder)
        assert carry_out(sleeper, WakeUp(LIFE, 4, list(PARTS))) == [Slept(LIFE, 4, 0)]
        assert ask(built)[0] == tokens


def test_weights_that_were_edited_meanwhile_are_refused_with_the_times_that_they_had(folder):
    """Behind the first bytes of each tensor, too: what is on disk and in other engines is of the former ones."""
    with closing(build(folder)) as built:
        sleeper = Sleeper(LIFE, built.engine, built.memory)
        carry_out(sleeper, Sleep(LIFE, 1, 2))
        edit(folder)
        (answer,) = carry_out(sleeper, WakeUp(LIFE, 2, list(PARTS)))
        assert (answer.level, "the checkpoint is another one now" in answer.error) == (2, True)


def test_an_engine_without_memory_to_give_back_says_so(folder):
    with closing(build(folder)) as built:
        assert carry_out(Sleeper(LIFE, built.engine, None), Sleep(LIFE, 1, 1)) == [Slept(LIFE, 1, 0, CANNOT)]


def test_no_memory_is_a_named_error_and_waking_can_be_tried_again(folder, monkeypatch):
    with closing(build(folder)) as built:
        built.memory.sleep(1)
        with monkeypatch.context() as patched:
            patched.setattr(built.runner.cache, "remember", lambda: (_ for _ in ()).throw(torch.OutOfMemoryError("x")))
            with pytest.raises(ConfigError, match="no room to wake up"):
                built.memory.wake_up(PARTS)
        built.memory.wake_up(PARTS)


def test_in_a_shared_pool_only_its_own_blocks_are_given_back_and_the_next_incarnation_finds_nothing(folder, tmp_path):
    with (
        pool_server(tmp_path / "kv-pool") as path,
        closing(build(folder, shared_pool(path, "b", 1))) as other,
    ):
        with closing(build(folder, shared_pool(path, "a", 1))) as built:
            tokens, _ = ask(built)
            assert ask(other) == (tokens, 0)
            before = built.pool.memory.resident_bytes
            carry_out(Sleeper(LIFE, built.engine, built.memory), Sleep(LIFE, 1, 1))
            assert before - built.pool.memory.resident_bytes >= 6 * built.layout.block_bytes
            assert ask(other) == (tokens, 396), "what another one has is as it was"
        with closing(build(folder, shared_pool(path, "a", 2))) as built:
            assert ask(built) == (tokens, 0)


def test_a_cache_of_a_device_of_its_own_has_no_memory_meanwhile(folder):
    model = load_model(folder, torch.device("cpu"))
    layout = make_layout(model.config, model.dtype, "block", "m")
    cache = KVCache.on_device(layout, 4, torch.device("cpu"))
    shapes = [layer.values.shape for layer in cache.layers]
    cache.forget()
    assert cache.slots.nbytes == cache.blocks.nbytes == 0
    cache.forget()
    cache.remember()
    assert cache.blocks.nbytes == 4 * layout.block_bytes
    assert [layer.values.shape for layer in cache.layers] == shapes
    cache.close()


def test_blocks_that_another_instance_may_read_keep_their_memory():
    class Source:
        def exchange(self, give, want):
            raise AssertionError("nothing is to be exchanged")

    pool = BlockPool(range(6), Source())
    kept, told = pool.allocate(2), pool.allocate(1)
    for block, name in zip([*kept, *told], "abc", strict=True):
        pool.publish(block, name.encode(), b"root")
    pool.offer(told[0])
    pool.release(kept[1:])
    pool.release(told)
    assert pool.clear() == sorted({*range(6)} - {kept[0], told[0]})
    assert pool.match([b"b"]) == pool.match([b"c"]) == []
    assert pool.match([b"a"]) == kept[:1]
    assert sorted(pool.take_changes()[1]) == []
    pool.check()
