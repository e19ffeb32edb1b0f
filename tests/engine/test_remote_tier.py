"""A tier that engines share: what one puts there others find, and whatever becomes of it costs nothing but time."""

import logging
import threading
from dataclasses import replace

import pytest

import penstock.engine.loop
from penstock.core.clock import SystemClock
from penstock.core.errors import ConfigError, Unavailable
from penstock.core.plan import BLOCK_TOKENS
from penstock.engine import remote_tier
from penstock.engine.build import EngineOptions, build_engine
from penstock.engine.remote_tier import check_remote_tier
from penstock.engine.server import stats_of
from penstock.kv.shared_tier import ABSENT
from penstock.transfer import stores
from tests.engine.test_host_tier import BLOCK_BYTES, close, flip, prompt_of
from tests.helpers.engines import Collector, make_engine, make_request

pytest.importorskip("xxhash")
PROMPT = prompt_of(0, 250)  # three full blocks and a rest
LIMITS = {"blocks": 8, "model_len": 440, "budget": 256, "sequences": 4, "address_mode": "table"}


class Memory:
    """A store in memory, whose contents engines share, and that may stand still, fail, or be full."""

    def __init__(self):
        self.blocks, self.calls = {}, []
        self.open = threading.Event()
        self.open.set()
        self.fails = self.full = False

    def _pass(self, what, count):
        self.calls.append((what, count))
        assert self.open.wait(60)
        if self.fails:
            raise Unavailable("no store")

    def put(self, blocks):
        self._pass("put", len(blocks))
        if self.full:
            return [False] * len(blocks)
        self.blocks.update((key, bytes(data)) for key, data in blocks)
        return [True] * len(blocks)

    def get(self, blocks):
        self._pass("get", len(blocks))
        count = 0
        for key, buffer in blocks:
            if key not in self.blocks:
                break
            buffer[:] = self.blocks[key]
            count += 1
        return count

    def contains(self, keys):
        self._pass("contains", len(keys))
        return next((i for i, key in enumerate(keys) if key not in self.blocks), len(keys))

    def close(self):
        pass


class Engine:
    """One with a store and no other tier."""

    def __init__(self, model, url, **options):
        self.engine = make_engine(model, store=url, **{**LIMITS, **options})
        self.collector = Collector(self.engine)
        self.lane = self.engine.scheduler.offload.lane("remote")

    def ask(self, name, prompt=PROMPT, **params):
        tokens = self.collector.run(make_request(name, prompt, max_tokens=8, **params))[name]
        self.settle()
        return tokens, self.collector.cached[name]

    def settle(self):
        self.engine.settle()
        self.engine.move()
        self.engine.check()


@pytest.fixture
def engines(model):
    """Makes them."""
    made = []

    def make(url, **options):
        made.append(Engine(model, url, **options))
        return made[-1]

    yield make
    for each in made:
        close(each.engine)


@pytest.fixture
def memory(monkeypatch):
    store = Memory()
    monkeypatch.setattr(stores, "open_store", lambda *_: store)
    yield store
    store.open.set()


@pytest.fixture
def patient(monkeypatch):
    """Whoever waits does so until there is an answer."""
    monkeypatch.setattr(penstock.engine.loop, "ANSWERS_IN", 60.0)
    monkeypatch.setattr(penstock.engine.loop, "GRACE", 60.0)


def test_what_one_engine_puts_there_another_one_finds(engines, tmp_path, patient):
    url = f"file://{tmp_path}?timeout=20"
    first, second = engines(url), engines(url)
    tokens, cached = first.ask("a")
    assert cached == 0
    assert second.ask("a") == (tokens, 3 * BLOCK_TOKENS)
    (said,) = stats_of(second.engine).tiers
    assert (said.name, said.hit_tokens, said.loads, said.failed_loads) == ("remote", 3 * BLOCK_TOKENS, 1, 0)
    assert (said.loaded_bytes, said.questions, said.failed_questions) == (3 * BLOCK_BYTES, 1, 0)
    assert said.took > 0
    assert said.used_bytes == said.stored_bytes == BLOCK_BYTES, "of all else it knows that it was there"
    (said,) = stats_of(first.engine).tiers
    assert said.used_bytes == said.stored_bytes == 4 * BLOCK_BYTES
    tier = first.lane.tier
    assert set(tier.take_changes()[0]) == set(tier.keys())
    assert len(tier.keys()) == 4


def test_what_is_there_is_not_put_again_and_what_is_not_there_is_not_asked_for_again(engines, memory, patient):
    first, second = engines("file:///x"), engines("file:///x")
    memory.calls.clear()
    first.ask("a")
    assert [call for call in memory.calls if call[0] != "contains"] == [("put", 3), ("put", 1)]
    assert memory.calls[0] == ("contains", 3), "it was asked for first"
    second.ask("a")
    calls = memory.calls[:]
    for number in (1, 2, 3):  # evicts it
        second.ask(f"o{number}", prompt_of(number, 250))
    memory.calls.clear()
    second.ask("again")
    assert memory.calls == [("get", 3)], "that it is there is known"
    assert ("put", 3) not in calls[4:]
    lane, keys = second.lane, [b"k" * 16]
    assert lane.tier.unknown(keys) == keys
    lane.tier.answered(keys, 0)
    assert not lane.tier.unknown(keys)
    second.engine.scheduler.offload.look_at(lane.tier.now + ABSENT)
    assert lane.tier.unknown(keys) == keys


def test_a_store_that_forgets_or_spoils_costs_nothing_but_time(engines, tmp_path, patient):
    url = f"file://{tmp_path}?timeout=20"
    first = engines(url)
    tokens, _ = first.ask("a")
    files = sorted(path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size > BLOCK_BYTES)
    assert len(files) >= 4
    for path in files[::2]:
        flip(path, 4096 + 100)
    for path in files[1::2]:
        with path.open("r+b") as file:
            file.truncate(5000)
    second = engines(url)
    assert second.ask("a") == (tokens, 0)
    for _ in range(2):  # what is found to be bad is put anew
        assert engines(url).ask("a")[0] == tokens
    assert engines(url).ask("a") == (tokens, 3 * BLOCK_TOKENS)


def test_a_store_that_stands_still_is_waited_for_a_moment_only_and_is_back_when_it_answers(
    engines, memory, patient, monkeypatch
):
    first, second = engines("file:///x"), engines("file:///x")
    tokens, _ = first.ask("a")
    monkeypatch.setattr(penstock.engine.loop, "ANSWERS_IN", 0.05)
    memory.open.clear()
    run = second.collector.run
    assert run(make_request("a", PROMPT, max_tokens=8))["a"] == tokens
    assert second.collector.cached["a"] == 0
    assert second.lane.late_questions == 1
    calls = len(memory.calls)
    run(make_request("b", prompt_of(1, 250), max_tokens=1))
    assert len(memory.calls) == calls, "nothing else is asked of it meanwhile"
    memory.open.set()
    second.settle()
    monkeypatch.setattr(penstock.engine.loop, "ANSWERS_IN", 60.0)
    for number in (2, 3, 4):
        second.ask(f"o{number}", prompt_of(number, 250))
    assert second.ask("again") == (tokens, 3 * BLOCK_TOKENS)


def test_a_store_that_fails_is_left_alone_for_a_while(engines, memory, patient, monkeypatch, caplog):
    first = engines("file:///x")
    tokens, _ = first.ask("a")
    second = engines("file:///x")
    memory.fails = True
    monkeypatch.setattr(remote_tier, "FIRST_PAUSE", 1e6)
    second.engine.movers["remote"]._copier._away.end()
    with caplog.at_level(logging.WARNING):
        assert second.ask("a") == (tokens, 0)
    assert "the remote cache fails" in caplog.text
    assert second.lane.failed_questions == 1
    assert second.lane.away
    calls = len(memory.calls)
    second.ask("b", prompt_of(1, 250))
    assert len(memory.calls) == calls
    memory.fails = False
    second.engine.movers["remote"]._copier._away.end()  # as after a while
    for number in (2, 3, 4):
        second.ask(f"o{number}", prompt_of(number, 250))
    assert second.ask("again") == (tokens, 3 * BLOCK_TOKENS)
    assert not second.lane.away


def test_a_store_that_is_full_is_still_read(engines, memory, patient):
    first = engines("file:///x")
    tokens, _ = first.ask("a")
    second = engines("file:///x")
    memory.full = True
    second.ask("b", prompt_of(1, 250))
    assert second.lane.failed_stores > 0
    assert second.lane.full
    calls = len([call for call in memory.calls if call[0] == "put"])
    assert second.ask("a") == (tokens, 3 * BLOCK_TOKENS)
    assert len([call for call in memory.calls if call[0] == "put"]) == calls
    assert set(first.lane.tier.keys()) == set(memory.blocks) - {remote_tier.TRIAL}


def test_an_engine_starts_without_its_store_and_uses_it_when_it_is_there(engines, memory, patient, monkeypatch, caplog):
    tokens, _ = engines("file:///x").ask("a")

    def away(*_):
        raise Unavailable("nobody there")

    monkeypatch.setattr(stores, "open_store", away)
    with caplog.at_level(logging.WARNING):
        second = engines("file:///x")
    assert "nobody there" in caplog.text
    assert second.ask("a") == (tokens, 0)
    monkeypatch.setattr(stores, "open_store", lambda *_: memory)
    second.engine.movers["remote"]._copier._away.end()  # as after a while
    for number in (2, 3, 4):
        second.ask(f"o{number}", prompt_of(number, 250))
    assert second.ask("again") == (tokens, 3 * BLOCK_TOKENS)


def test_tenants_and_data_types_have_blocks_of_their_own(engines, tmp_path, patient):
    url = f"file://{tmp_path}?timeout=20"
    first = engines(url)
    first.ask("a")
    second, other = engines(url), engines(url, kv_cache_dtype="int8")
    second.collector.run(replace(make_request("salted", PROMPT, max_tokens=8), cache_salt="tenant"))
    assert second.collector.cached["salted"] == 0
    assert other.ask("a")[1] == 0
    assert second.ask("a")[1] == 3 * BLOCK_TOKENS


# --- as it is built


def options_of(checkpoint, **changes):
    return EngineOptions(
        model=str(checkpoint), device="cpu", max_num_seqs=4, max_model_len=440, kv_cache_memory=8 * BLOCK_BYTES,
        max_num_batched_tokens=256, **changes,
    )  # fmt: skip


def test_built_from_options(checkpoint, tmp_path, patient):
    store, disk = f"file://{tmp_path}/store?timeout=20", tmp_path / "disk"
    (tmp_path / "store").mkdir()
    found = []
    for changes in ({}, {"disk_cache": str(disk), "disk_cache_size": 20 * BLOCK_BYTES}):
        built = build_engine(options_of(checkpoint, remote_cache=store, **changes), SystemClock())
        collector = Collector(built.engine)
        tokens = collector.run(make_request("first", prompt_of(0, 250)))["first"]
        built.engine.settle()
        assert built.store.startswith(f"file://{tmp_path}/store ")
        found.append((tokens, collector.cached["first"], [*built.engine.movers]))
        built.close()
    (tokens, none, tiers), (again, cached, more) = found
    assert again == tokens
    assert (none, cached) == (0, 3 * BLOCK_TOKENS)
    assert (tiers, more) == (["remote"], ["disk", "remote"])


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"remote_cache": "ftp://x"}, "remote-cache: 'ftp://x', allowed: file://"),
        ({"remote_cache": "file:///tmp", "prefix_cache": False}, "remote-cache: .* without prefix caching"),
    ],
)
def test_what_cannot_be_had_is_refused(checkpoint, changes, says):
    with pytest.raises(ConfigError, match=says) as refused:
        build_engine(options_of(checkpoint, **changes), SystemClock())
    assert refused.value.field == "remote-cache"


def test_ranks_of_gpus_have_no_remote_tier_yet():
    why = "not supported yet on cuda with 2 ranks, allowed with 1, or on a CPU"
    with pytest.raises(ConfigError, match=why) as refused:
        check_remote_tier("file:///tmp", "cuda", 2, prefix_cache=True)
    assert refused.value.field == "remote-cache"
    check_remote_tier("file:///tmp", "cpu", 2, prefix_cache=True)
