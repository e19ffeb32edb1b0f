"""A tier below modelled devices: digests travel as KV would, and the server sleeps while somebody waits for them."""

import contextlib
import json
import random
import threading
import time
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

import penstock.engine.loop
from penstock.cli.scenario_file import make_tables
from penstock.core.clock import ManualClock, SystemClock
from penstock.core.digest import offline
from penstock.core.errors import ConfigError
from penstock.core.plan import BLOCK_TOKENS
from penstock.core.wire.engine import AskCache, CacheDelta, Peer, Ready, Shutdown, StepReport
from penstock.engine.modelled import ModelledOptions, build_modelled
from penstock.engine.modelled_tier import ModelledSlots, PacedCopier
from penstock.engine.server import EngineServer, stats_of
from penstock.kv.connector import Move
from penstock.sched.steptime import DEVICES, GEOMETRIES, StepTime
from penstock.service.checkpoint import DEMO
from penstock.sim.scenario import parse
from penstock.transfer.memory import PoolMemory
from tests.engine.test_server import LIFE, Frontend
from tests.helpers import engines

GEOMETRY = "llama-3.1-8b"
BLOCK = GEOMETRIES[GEOMETRY].kv_bytes_per_token * BLOCK_TOKENS


def build(clock=None, **options):
    sizes = {"geometry": GEOMETRY, "max_model_len": 1024, "kv_blocks": 20, "host_cache_memory": 64 * BLOCK + 5}
    return build_modelled(ModelledOptions(model=str(DEMO), **{**sizes, **options}), clock or SystemClock())


make_request = partial(engines.make_request, max_tokens=8)


def prompt_of(number, length=900):
    rng = random.Random(number)
    return [rng.randrange(3, 4096) for _ in range(length)]


def expected(request, built):
    return offline(request.prompt, max_tokens=request.max_tokens, token_ids=built.runner.token_ids)[0]


def run(built, request):
    """(tokens, how many of the prompt were found)"""
    built.engine.add(request)
    tokens, cached = [], 0
    while built.engine.has_work:
        for output in built.engine.step()[0]:
            tokens += output.tokens
            cached = output.cached_tokens
        built.engine.check()
    return tokens, cached


# --- the way


def test_a_block_takes_as_long_as_its_kv_would():
    slept: list[float] = []
    memory = PoolMemory.memfd(8, 4096)
    digests = np.frombuffer(memory.buffer, dtype=np.uint64).reshape(8, -1)
    digests[:, :64] = np.arange(8, dtype=np.uint64)[:, None] + 1
    slots = ModelledSlots(memory, 4, seconds=0.5, block_bytes=1000, sleep=slept.append)
    slots.store([Move(block, slot, b"") for block, slot in ((3, 0), (4, 1), (5, 2))])
    assert slots.load(iter([Move(0, 1, b""), Move(1, 0, b"")])) == 2
    assert slept == [1.5, 1.0]
    assert digests[:2, 0].tolist() == [5, 4]
    assert np.frombuffer(slots.content(2), dtype=np.uint64).tolist() == [6] * BLOCK_TOKENS
    del digests


class NoStore:
    """A `Copier` that takes no time; half of what is asked for has come."""

    piece, block_bytes, away, full = 1, 512, False, False

    def store(self, moves):
        pass

    def load(self, moves):
        return len(moves) // 2

    find = load

    def close(self):
        pass


def test_what_goes_to_a_store_takes_as_long_as_kv_would_or_as_it_does_if_that_is_longer():
    for seconds, least in ((100.0, 99.0), (0.0, 0.0)):
        slept: list[float] = []
        copier = PacedCopier(NoStore(), seconds=seconds, block_bytes=8 << 20, sleep=slept.append)
        moves = [Move(block, 0, b"") for block in range(4)]
        copier.store(moves)
        assert copier.load(moves) == copier.find(moves) == 2
        assert copier.block_bytes == 8 << 20
        stored, loaded = slept
        assert 4 * least <= stored <= 4 * seconds
        assert 2 * least <= loaded <= 2 * seconds, "of those that came"


def test_disk_and_store_are_as_quick_as_in_the_simulator(tmp_path):
    """And as large: the same settings mean the same."""
    settings = {"disk-cache-size": f"{BLOCK * 100}", "disk-cache-gbps": 30, "remote-cache-gbps": 40, "slowdown": 3}
    engine = {"geometry": GEOMETRY, "host-cache-memory": "1G", "kv-blocks": 64, "max-model-len": 1024, **settings}
    scenario = {
        "workload": {"synthetic": {}},
        "slo": {"ttft-ms": 1, "tpot-ms": 1},
        "engine": {"device": "modelled:h200", "remote-cache-size": "1G", **engine},
        "instances": [{"count": 1}],
    }
    (group,) = parse("s.yaml", json.dumps(scenario), make_tables()).layouts[""]
    options = {key.replace("-", "_"): value for key, value in settings.items()} | {"disk_cache_size": BLOCK * 100}
    built = build(remote_cache=f"file://{tmp_path}?timeout=20", **options)
    built.engine.scheduler.predict_by(StepTime(built.device_model, GEOMETRIES[GEOMETRY]))
    lanes = built.engine.scheduler.offload.lanes
    assert [lane.name for lane in lanes] == ["host", "disk", "remote"]
    assert [lane.seconds_each for lane in lanes] == pytest.approx(list(group.tier_seconds.values()))
    assert [lane.tier.num_slots for lane in lanes[1:]] == [group.disk_blocks, 0]
    assert {mover.block_bytes for mover in built.engine.movers.values()} == {BLOCK}
    built.close()


def test_what_it_takes_is_the_devices_times_the_slowdown():
    built = build(slowdown=3.0)
    times = StepTime(DEVICES["h200"], GEOMETRIES[GEOMETRY])
    assert built.engine.movers["host"].block_bytes == BLOCK
    slowed = StepTime(built.device_model, GEOMETRIES[GEOMETRY])
    assert slowed.load_ms(640) == pytest.approx(3 * times.load_ms(640))
    assert slowed.step_ms([(640, 0)]) == pytest.approx(3 * times.step_ms([(640, 0)]))
    built.close()


# --- the engine


@pytest.fixture
def built():
    built = build()
    yield built
    built.close()


def test_what_was_evicted_is_loaded_and_the_text_is_the_same(built):
    for name, number in (("first", 0), ("other", 1), ("again", 0)):
        request = make_request(name, prompt_of(number))
        tokens, cached = run(built, request)
        assert tokens == expected(request, built)
    assert cached == 14 * BLOCK_TOKENS
    assert built.engine.scheduler.counters.prefix_loads > 8 * BLOCK_TOKENS
    built.engine.settle()
    built.engine.move()
    loads = built.engine.scheduler.counters.prefix_loads // BLOCK_TOKENS
    assert built.engine.scheduler.offload.lanes[0].loaded_blocks == loads
    (said,) = stats_of(built.engine).tiers
    assert (said.stored_bytes, said.loaded_bytes) == (2 * 14 * BLOCK, loads * BLOCK)
    assert loads < 2 * 14


def test_many_talks_that_do_not_fit(built):
    """Also with a tier that holds few of them, and a mover that fails now and then."""
    rng = random.Random(5)
    way = built.engine.movers["host"]._slots
    store, stored = way.store, []

    def often(moves):
        stored.append(len(moves))
        if len(stored) % 3 == 0:
            raise OSError("now and then")
        return store(moves)

    way.store = often
    talks = [prompt_of(i, rng.randint(60, 400)) for i in range(8)]
    for _ in range(30):
        talk = rng.choice(talks)
        request = make_request(str(rng.random()), list(talk))
        tokens, _ = run(built, request)
        assert tokens == expected(request, built)
        talk += [*tokens, *prompt_of(rng.random(), rng.randint(1, 80))]
        del talk[900:]
    assert built.engine.scheduler.counters.prefix_loads


@pytest.fixture
def patient(monkeypatch):
    """Whoever waits does so until there is an answer."""
    monkeypatch.setattr(penstock.engine.loop, "ANSWERS_IN", 60.0)
    monkeypatch.setattr(penstock.engine.loop, "GRACE", 60.0)


def test_what_one_has_put_into_a_store_another_one_finds(tmp_path, patient):
    """Until it is spoiled; and what both have evicted since is on their disks."""
    quick = {"host_cache_memory": None, "remote_cache_gbps": 3e3}
    store, disk = {"remote_cache": f"file://{tmp_path}?timeout=20"}, {"disk_cache_size": 99 * BLOCK}
    first = build(**quick, **store)
    request = make_request("a", prompt_of(0), max_tokens=40)
    assert run(first, request) == (expected(request, first), 0)
    first.engine.settle()
    second = build(**quick, **store, **disk, disk_cache_gbps=3e3)
    assert run(second, request) == (expected(request, second), 14 * BLOCK_TOKENS)
    for number in (1, 2):
        run(second, make_request(f"other{number}", prompt_of(number)))
    second.engine.settle()
    second.engine.move()
    for path in tmp_path.rglob("*"):
        if path.is_file():
            path.write_bytes(bytes(path.stat().st_size))
    assert run(second, replace(request, id="again")) == (expected(request, second), 14 * BLOCK_TOKENS)
    disk, remote = stats_of(second.engine).tiers
    assert (disk.name, remote.name) == ("disk", "remote")
    assert disk.hit_tokens + remote.hit_tokens == second.engine.scheduler.counters.prefix_loads
    assert remote.hit_tokens == 14 * BLOCK_TOKENS
    assert remote.loaded_bytes == 14 * BLOCK
    assert disk.hit_tokens > 0
    third = build(**quick, **store)
    assert run(third, request) == (expected(request, third), 0)
    assert third.store == first.store == second.store
    for built in (first, second, third):
        built.close()


@pytest.mark.parametrize("place", [0, 7])
def test_a_copy_that_changed_is_never_used(built, place):
    first = make_request("first", prompt_of(0))
    run(built, first)
    for number in (1, 2):
        run(built, make_request(str(number), prompt_of(number)))
    way = built.engine.movers["host"]._slots
    built.engine.settle()
    built.engine.move()
    tier = built.engine.scheduler.offload.lanes[0].tier
    assert len(tier.keys()) == 3 * 14
    way._slots[tier.slot(tier.keys()[place]), 13] += np.uint64(1)
    again = make_request("again", prompt_of(0))
    assert run(built, again)[0] == expected(first, built)
    assert built.engine.scheduler.counters.prefix_loads == place * BLOCK_TOKENS


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"host_cache_memory": 1000}, "host-cache-memory: 0.0 MiB, at least one block of 64 tokens is needed, 8.0 MiB"),
        (
            {"host_cache_memory": 1 << 30, "prefix_cache": False},
            "host-cache-memory: 1.0 GiB without prefix caching",
        ),
        ({"disk_cache_size": 1000}, "disk-cache-size: 0.0 MiB, at least one block of 64 tokens is needed, 8.0 MiB"),
        ({"remote_cache": "ftp://x"}, "remote-cache: 'ftp://x', allowed: file://"),
        (
            {"remote_cache": "file:///tmp", "prefix_cache": False, "host_cache_memory": None},
            "remote-cache: .* without prefix caching",
        ),
    ],
)
def test_what_cannot_be_had_is_refused(options, says):
    with pytest.raises(ConfigError, match=says) as refused:
        build(ManualClock(), **options)
    assert refused.value.field == says.partition(":")[0]


# --- the server


class Served:
    """A server of a modelled engine, a frontend and a master; loads may be held up.

    Attributes:
        beats: of the server's turns in which nothing was computed.
    """

    def __init__(self, folder, blocks):
        self.built = build(kv_blocks=blocks)
        self.way = self.built.engine.movers["host"]._slots
        self.open = threading.Event()
        self.open.set()
        load, self.loading = self.way.load, threading.Event()

        def held_up(moves):
            self.loading.set()
            assert self.open.wait(20)
            return load(moves)

        self.way.load = held_up
        self.beats = 0
        address = f"ipc://{folder}/engine"
        self.server = EngineServer(address, SystemClock())
        ready = Ready(
            peer=Peer("engine", LIFE, ""), max_model_len=1024, vocab_size=4096, num_blocks=20, token_budget=64,
            device="none", dtype="none",
        )  # fmt: skip
        self.thread = threading.Thread(
            target=self.server.run, args=(self.built.engine, ready), kwargs={"beat": self.beat}, daemon=True
        )
        self.thread.start()
        self.frontend, self.master = Frontend(address, "f"), Frontend(address, "m")
        self.frontend.hello()
        self.master.hello(kind="master")

    def beat(self, tokens):
        self.beats += not tokens

    def ask(self, name, number):
        request = make_request(name, prompt_of(number))
        self.frontend.ask(request)
        return request

    def answer(self, name, number):
        request = self.ask(name, number)
        assert self.frontend.tokens_of(name) == expected(request, self.built)

    def evict(self):
        """Prompt 0 was computed, and is not on the device any longer."""
        for number in range(3):
            self.answer(f"first{number}", number)

    def deltas(self, count):
        """What the master hears next of any cache."""
        return [self.master.until(lambda e: isinstance(e, CacheDelta)) for _ in range(count)]

    def close(self):
        self.open.set()
        self.frontend.say(Shutdown())
        self.thread.join(20)
        assert not self.thread.is_alive()
        for client in (self.frontend, self.master):
            client.socket.close()
        self.server.close()
        self.built.close()


@pytest.fixture
def served(tmp_path, request):
    with contextlib.closing(Served(tmp_path, getattr(request, "param", 20))) as served:
        yield served


def test_a_master_hears_of_each_tier(served):
    assert [(d.tier, d.whole, d.sequence) for d in served.deltas(2)] == [("device", True, 0), ("host", True, 0)]
    served.evict()
    found, sequences = {"device": set(), "host": set()}, {"device": [], "host": []}
    while len(found["host"]) < 3 * 14 or len(found["device"]) > 20:
        (delta,) = served.deltas(1)
        assert not delta.whole
        found[delta.tier] = (found[delta.tier] - set(delta.removed)) | set(delta.added)
        sequences[delta.tier].append(delta.sequence)
    assert all(numbers == list(range(1, len(numbers) + 1)) for numbers in sequences.values())
    served.master.say(AskCache(LIFE))
    whole = {delta.tier: delta for delta in served.deltas(2)}
    assert all(delta.whole and delta.sequence >= sequences[tier][-1] for tier, delta in whole.items())
    assert set(whole["host"].added) == found["host"]
    assert len(whole["device"].added) <= 20


def test_what_was_loaded_is_told(served):
    served.evict()
    served.answer("again", 0)
    stats = served.frontend.until(lambda e: isinstance(e, StepReport) and not e.stats.running).stats
    loads = served.built.engine.scheduler.counters.prefix_loads
    assert stats.prefix_loads == loads > 0
    (tier,) = stats.tiers
    assert tier.hit_tokens == loads
    assert tier.loaded_bytes == loads // BLOCK_TOKENS * BLOCK
    assert tier.stored_bytes % BLOCK == 0
    found = served.frontend.inspect()
    assert found.broken == ""
    assert (found.counts["tier_slots"], found.counts["loads_under_way"]) == (64, 0)


def test_whoever_waits_for_a_load_costs_nothing_meanwhile(served):
    served.evict()
    served.open.clear()
    request = served.ask("again", 0)
    assert served.loading.wait(20)
    time.sleep(0.1)
    turns, used = served.beats, time.process_time()
    time.sleep(0.6)
    assert served.beats - turns < 12
    assert time.process_time() - used < 0.3
    began = time.monotonic()
    served.open.set()
    assert served.frontend.tokens_of("again") == expected(request, served.built)
    assert time.monotonic() - began < 0.4, "it did not wake up when the load was over"


@pytest.mark.parametrize("served", [32], indirect=True)  # room for what is loaded and what is computed
def test_a_load_that_takes_too_long_is_not_waited_for(served, monkeypatch):
    monkeypatch.setattr(penstock.engine.loop, "GRACE", 0.05)
    served.evict()
    served.open.clear()
    began = time.monotonic()
    served.answer("again", 0)
    assert time.monotonic() - began < 5
    assert served.frontend.inspect().counts["loads_under_way"] == 1
    served.open.set()
    served.answer("third", 0)
    assert served.frontend.inspect().broken == ""
