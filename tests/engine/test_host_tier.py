"""A tier of KV below a real, tiny model's cache: no token knows whether its past was computed or loaded."""

import threading
import time

import pytest
import torch

import penstock.engine.host_tier
import penstock.engine.loop
from penstock.core.clock import SystemClock
from penstock.core.errors import ConfigError
from penstock.core.layout import KVLayout, attention_groups
from penstock.core.plan import BLOCK_TOKENS
from penstock.engine.build import EngineOptions, build_engine
from penstock.engine.cache import KVCache
from penstock.engine.host_tier import PinnedSlots, check_host_tier
from penstock.engine.mover import SlotMover
from penstock.kv.connector import Move
from penstock.kv.pool import Published
from penstock.kv.tier import Tier
from penstock.nn.loader import load_model
from tests.helpers.checkpoints import write_checkpoint
from tests.helpers.engines import CHECKSUM, Collector, make_engine, make_request

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]


@pytest.fixture(scope="module", params=DEVICES)
def device(request):
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return torch.device(request.param)


@pytest.fixture(scope="module", params=["qwen3", "gemma3", "mistral-window", "deepseek-v3"])
def any_model(request, device, tmp_path_factory):
    return load_model(write_checkpoint(tmp_path_factory.mktemp("model"), request.param), device)


def prompt_of(number, length):
    return [(number * 37 + 11 * k * k + k) % 318 + 1 for k in range(length)]


def close(engine):
    engine.close()
    engine.executor.worker.cache.close()


@pytest.mark.parametrize(
    ("tier", "mode", "ahead"),
    [
        ("host", "table", True),
        ("host", "table", False),
        ("host", "contiguous", True),
        ("host", "contiguous", False),
        ("disk", "table", True),
        ("disk", "contiguous", False),
        ("host and disk", "table", True),
        ("remote", "contiguous", True),
        ("host, disk and remote", "table", True),
    ],
)
def test_tokens_do_not_depend_on_how_their_past_came_about(any_model, mode, ahead, tier, tmp_path, monkeypatch):
    """Several talks that go on in turns, in a cache that never holds them all at once."""
    disk = tmp_path / "disk" if "disk" in tier else None
    store = f"file://{tmp_path}/store?timeout=20" if "remote" in tier else None
    (tmp_path / "store").mkdir()
    monkeypatch.setattr(penstock.engine.loop, "ANSWERS_IN", 20.0)
    monkeypatch.setattr(penstock.engine.loop, "GRACE", 20.0)
    windowed = any(any_model.config.windows)  # then less is held, evicted, and loaded

    def answers(slots):
        limits = {"blocks": 10 if windowed else 14, "model_len": 640, "budget": 160, "sequences": 4}
        if slots:
            limits |= {"slots": slots, "disk": disk, "host": "host" in tier, "store": store}
        engine = make_engine(any_model, address_mode=mode, ahead=ahead, **limits)
        if slots and "host and disk" in tier.replace(",", " and"):  # which has what the other one has not
            few = 8 * len(engine.scheduler.kv.windows)
            engine.scheduler.offload.lane("host").tier = Tier(few)
        collector = Collector(engine)
        talks = [prompt_of(i, 150 + 40 * i) for i in range(4)]
        for turn in range(3):
            for pair in ((0, 1), (2, 3)):
                asked = [
                    make_request(f"{i}.{turn}", talks[i], seed=i, temperature=0.8 * (i % 2), max_tokens=20)
                    for i in pair
                ]
                collector.run(*asked)
                for i in pair:
                    talks[i] = [*talks[i], *collector.tokens[f"{i}.{turn}"], *prompt_of(9 * turn + i, 30)]
        engine.settle()
        engine.move()
        engine.check()
        assert engine.scheduler.pool.used == 0
        loads = engine.scheduler.counters.prefix_loads
        close(engine)
        return collector.tokens, loads

    alone, none = answers(0)
    with_tier, loads = answers(64)
    assert with_tier == alone
    assert none == 0
    assert loads >= (1 if windowed else 8 * BLOCK_TOKENS), "several prefixes were loaded"


def flip(path, place):
    """One bit of a file."""
    with path.open("r+b") as file:
        file.seek(place)
        old = file.read(1)
        file.seek(place)
        file.write(bytes([old[0] ^ 1]))


class Watched:
    """A way on which loads may be held up, and anything may fail."""

    def __init__(self, way):
        self.way = way
        self.block_bytes = way.block_bytes
        self.open = threading.Event()
        self.open.set()
        self.fails = False
        self.loading = threading.Event()

    def store(self, moves):
        if self.fails:
            raise RuntimeError("no way")
        return self.way.store(moves)

    def load(self, moves):
        self.loading.set()
        assert self.open.wait(20)
        if self.fails:
            raise RuntimeError("no way")
        return self.way.load(moves)

    def content(self, slot):
        return self.way.content(slot)

    def close(self):
        self.open.set()
        self.way.close()


BLOCK_BYTES = 73728  # of the checkpoint's KV
PROMPT = prompt_of(0, 250)  # three full blocks and a rest


class Evicted:
    """An engine that has computed PROMPT and evicted all of it since."""

    def __init__(self, model, **options):
        self.ways, self.disk = [], options.get("disk")
        limits = {"blocks": 8, "model_len": 440, "budget": 256, "sequences": 4, "slots": 32}
        self.engine = make_engine(model, **limits, way=self.watch, **options)
        (self.way,) = self.ways
        self.collector = Collector(self.engine)
        self.collector.run(make_request("first", PROMPT))
        for i in (1, 2, 3):
            self.collector.run(make_request(f"other{i}", prompt_of(i, 250), max_tokens=1))
        self.settle()
        self.offload = self.engine.scheduler.offload
        (self.lane,) = self.offload.lanes
        assert self.lane.stored_blocks == 4 + 3 * 3

    def watch(self, way):
        self.ways.append(Watched(way))
        return self.ways[-1]

    def settle(self):
        self.engine.settle()
        self.engine.move()
        self.engine.check()

    def ask_again(self, name="again"):
        return self.collector.run(make_request(name, PROMPT))[name]

    @property
    def tokens(self):
        return self.collector.tokens["first"]

    @property
    def loaded(self):
        """Blocks of prompts that were loaded."""
        return self.engine.scheduler.counters.prefix_loads // BLOCK_TOKENS


@pytest.fixture(params=[("host", True), ("host", False), ("disk", True)], ids=["ahead", "in turn", "disk"])
def evicted(model, request, tmp_path):
    tier, ahead = request.param
    evicted = Evicted(model, address_mode="table", ahead=ahead, disk=tmp_path if tier == "disk" else None)
    yield evicted
    evicted.way.open.set()
    close(evicted.engine)


def test_what_is_not_what_was_stored_is_computed(evicted):
    slot = evicted.lane.tier.slot(evicted.lane.tier.keys()[1])
    if evicted.disk is None:
        evicted.way.content(slot)[100] ^= 1
    else:
        flip(next(evicted.disk.glob("*/0/blocks")), slot * BLOCK_BYTES + 100)
    assert evicted.ask_again() == evicted.tokens
    assert evicted.loaded == 1
    assert (evicted.lane.loads, evicted.lane.failed_loads) == (1, 1)
    evicted.settle()
    assert evicted.lane.failed_stores == 0


def test_a_way_that_fails_costs_nothing_but_time(evicted):
    evicted.way.fails = True
    assert evicted.ask_again() == evicted.tokens
    assert evicted.loaded == 0
    stored, keys = evicted.lane.stored_blocks, set(evicted.lane.tier.keys())
    evicted.collector.run(make_request("lost", prompt_of(5, 250), max_tokens=1))
    evicted.settle()
    assert evicted.lane.stored_blocks == stored
    assert (evicted.lane.failed_loads, evicted.lane.failed_stores > 0) == (1, True)
    assert set(evicted.lane.tier.keys()) <= keys, "nothing is found of a store that failed"
    evicted.way.fails = False
    evicted.collector.run(make_request("other4", prompt_of(4, 400), max_tokens=1))
    assert evicted.ask_again("third") == evicted.tokens


def test_a_load_stops_no_step(evicted):
    evicted.way.open.clear()
    evicted.engine.add(make_request("again", PROMPT))
    evicted.engine.add(make_request("short", [7] * 20, max_tokens=5))
    while "short" not in evicted.collector.finish:
        evicted.collector.step()
    assert evicted.way.loading.wait(20)
    assert "again" not in evicted.collector.tokens
    assert evicted.engine.has_work
    evicted.way.open.set()
    evicted.collector.run()
    assert evicted.collector.tokens["again"] == evicted.tokens
    assert evicted.loaded == 3


def test_who_waits_too_long_computes_and_what_comes_late_is_found(evicted, monkeypatch):
    monkeypatch.setattr(penstock.engine.loop, "GRACE", 0.05)
    evicted.way.open.clear()
    assert evicted.ask_again() == evicted.tokens
    assert (evicted.loaded, evicted.collector.cached["again"]) == (0, 0)
    assert evicted.lane.late_loads == 1
    assert evicted.offload.counts()["loads_under_way"] == 1
    evicted.way.open.set()
    evicted.settle()
    assert evicted.offload.counts()["loads_under_way"] == 0
    assert evicted.engine.scheduler.pool.used == 0
    assert evicted.ask_again("third") == evicted.tokens
    assert evicted.collector.cached["third"] == 248


def test_who_leaves_while_it_waits_leaves_nothing_behind(evicted):
    evicted.way.open.clear()
    evicted.engine.add(make_request("again", PROMPT))
    evicted.engine.cancel(["again"])
    assert not evicted.engine.has_work
    evicted.engine.check()
    evicted.way.open.set()
    evicted.settle()
    assert evicted.engine.scheduler.pool.used == 0
    assert evicted.ask_again("third") == evicted.tokens


def test_whoever_waits_for_a_load_alone_sleeps(evicted):
    evicted.way.open.clear()
    evicted.engine.add(make_request("again", PROMPT))
    threading.Timer(0.2, evicted.way.open.set).start()
    began, used = time.monotonic(), time.thread_time()
    while "again" not in evicted.collector.tokens:
        evicted.collector.step()
    assert time.monotonic() - began > 0.15
    assert time.thread_time() - used < 0.15
    evicted.collector.run()
    assert evicted.collector.tokens["again"] == evicted.tokens


class Notes:
    """A ledger. `log` is what it was told, in order."""

    def __init__(self):
        self.log = []

    def clear(self, blocks):
        self.log += [("clear", block) for block in blocks]

    def write(self, published: Published):
        self.log.append(("write", published.block, published.key))


def test_what_a_load_overwrites_is_written_down_before_and_after(evicted):
    notes = evicted.engine._ledger = Notes()
    evicted.way.open.clear()
    evicted.engine.add(make_request("again", PROMPT, max_tokens=1))
    cleared = [block for what, block in notes.log if what == "clear"]
    assert len(cleared) == 3
    evicted.way.open.set()
    evicted.settle()
    keys = evicted.engine.scheduler.sequence("again").keys
    assert notes.log[3:] == [("write", block, key) for block, key in zip(cleared, keys, strict=True)]
    evicted.collector.run()
    assert evicted.collector.tokens["again"] == evicted.tokens[:1]


# --- on a CUDA device


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_pinned_slots_bring_back_what_a_step_has_left():
    layout = KVLayout(
        model="m",
        order="block",
        dtype="bfloat16",
        groups=attention_groups((None,) * 4, 8, 128, "bfloat16"),
        block_bytes=4 << 18,
    )
    cache = KVCache.on_device(layout, 64, torch.device("cuda"))
    mover = SlotMover(PinnedSlots(cache, 48), CHECKSUM)
    assert mover._slots._slots.is_pinned()
    for _ in range(3):
        cache.blocks.random_(256)
        cache.settle()  # a step's kernels may still run when it is reported
        mover.push([Move(block, block, bytes([block])) for block in range(48)])
        mover.settle()
        before = cache.blocks.clone()
        cache.blocks.zero_()
        cache.settle()
        mover.pull([Move(block + 16, block, bytes([block])) for block in range(48)])
        mover.settle()
        assert [len(moved.blocks) for moved in mover.poll()] == [48, 48]
        assert torch.equal(cache.blocks[16:], before[:48])
        assert not cache.blocks[:16].any()
    mover.close()


# --- as it is built


@pytest.fixture
def unchecked(monkeypatch):
    """On a CPU there is no use for a tier, but it works."""
    monkeypatch.setattr("penstock.engine.build.check_host_tier", lambda *args, **options: None)


@pytest.mark.parametrize("mode", ["table", "contiguous"])
def test_built_from_options(checkpoint, unchecked, mode):
    pytest.importorskip("xxhash")
    options = EngineOptions(
        model=str(checkpoint), device="cpu", max_num_seqs=4, max_model_len=440, kv_cache_memory=8 * BLOCK_BYTES,
        max_num_batched_tokens=256, host_cache_memory=20 * BLOCK_BYTES, kv_address_mode=mode,
    )  # fmt: skip
    built = build_engine(options, SystemClock())
    assert built.layout.block_bytes == BLOCK_BYTES
    collector = Collector(built.engine)
    for name, number in (("first", 0), ("b", 1), ("c", 2), ("d", 3), ("again", 0)):
        collector.run(make_request(name, prompt_of(number, 250)))
    assert collector.tokens["again"] == collector.tokens["first"]
    assert built.engine.scheduler.counters.prefix_loads == 3 * BLOCK_TOKENS
    assert built.engine.scheduler.offload.counts()["tier_slots"] == 20
    built.close()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"device": "cpu"}, "host-cache-memory: 1.0 GiB below a CPU, .*: give kv-cache-memory more"),
        ({"device": "cuda"}, None),
        ({"device": "cuda", "asked": 3 << 30}, "host-cache-memory: 3.0 GiB, 2.0 GiB are free on this machine"),
    ],
)
def test_what_cannot_be_had_is_refused(monkeypatch, changes, says):
    monkeypatch.setattr(penstock.engine.host_tier, "available_memory", lambda: 2 << 30)
    given = {"asked": 1 << 30} | changes
    asked, device = given["asked"], torch.device(given["device"])
    check_host_tier(None, device)
    if says is None:
        check_host_tier(asked, device)
        return
    with pytest.raises(ConfigError, match=says) as refused:
        check_host_tier(asked, device)
    assert refused.value.field == "host-cache-memory"


def test_an_engine_on_a_cpu_has_no_tier(checkpoint):
    options = EngineOptions(model=str(checkpoint), device="cpu", host_cache_memory=1 << 30)
    with pytest.raises(ConfigError, match=r"host-cache-memory: 1\.0 GiB below a CPU"):
        build_engine(options, SystemClock())
