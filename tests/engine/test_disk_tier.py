"""A tier on disk: what outlives an engine, and that nothing but what was stored ever comes back."""

import errno
import fcntl
import os
import shutil
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from safetensors import safe_open
from safetensors.torch import save_file

from penstock.core.clock import SystemClock
from penstock.core.errors import ConfigError
from penstock.core.layout import KVLayout, attention_groups
from penstock.core.plan import BLOCK_TOKENS
from penstock.engine.build import EngineOptions, build_engine
from penstock.engine.cache import KVCache
from penstock.engine.disk_folders import Folder, Leftovers
from penstock.engine.disk_tier import RECORD_BYTES, UNMEASURED, DiskSlots, check_disk_tier, open_disk_tier
from penstock.engine.mover import SlotMover
from penstock.engine.server import stats_of
from penstock.kv.connector import Move
from penstock.kv.groups import BESIDE
from penstock.kv.tier import Tier
from penstock.nn import native
from penstock.transfer.memory import PoolMemory
from tests.engine.test_host_tier import BLOCK_BYTES, Evicted, close, flip, prompt_of
from tests.helpers.engines import CHECKSUM, Collector, make_engine, make_request

pytest.importorskip("xxhash")
PAGE = 4096
LAYOUT = KVLayout(
    model="m", order="block", dtype="float32", groups=attention_groups((None,), 1, 4, "float32"), block_bytes=PAGE
)


def make_cache(layout=LAYOUT, blocks=8):
    memory = PoolMemory.memfd(blocks, layout.block_bytes)
    cache = KVCache.over_pool(layout, memory)
    memory.close()
    return cache


# --- as files, whatever happens to them


class Disks(RuleBasedStateMachine):
    """Blocks of random prompts go to a tier and come back, the engine is started again with more or fewer slots, files
    lose bits, ends, or themselves. Whatever comes back is what was meant, and of what nobody has damaged all does."""

    @initialize(slots=st.integers(1, 6))
    def begin(self, slots):
        self.folder = Path(tempfile.mkdtemp(prefix="penstock-disk-"))
        self.cache = make_cache()
        self.sound = True
        self.start(slots)

    def start(self, slots):
        disk = DiskSlots(self.cache, self.folder, slots)
        self.tier = Tier(slots, "disk")
        self.tier.restore(disk.kept)
        self.mover = SlotMover(disk, CHECKSUM, disk, piece=2)
        self.files = disk.folder

    def stop(self):
        self.mover.close()

    def content(self, key):
        return (key * PAGE)[:PAGE]

    def put(self, block, content):
        self.cache.blocks[block] = torch.frombuffer(bytearray(content), dtype=torch.uint8)

    def get(self, block):
        return self.cache.blocks[block].numpy().tobytes()

    @rule(name=st.text("ab", min_size=1, max_size=4), beside=st.booleans())
    def store(self, name, beside):
        keys = [name[: i + 1].encode().rjust(16, b"-" if beside else b".") for i in range(len(name))]
        self.tier.use(keys)
        moves = []
        for i, key in enumerate(keys):
            if self.tier.has(key):
                continue
            parent = None if beside or not i else keys[i - 1]
            slot = self.tier.claim(key, parent, told=not beside)
            if slot is None:
                break
            block = len(moves)
            self.put(block, self.content(key))
            moves.append(Move(block, slot, key, parent=BESIDE if beside else parent or b""))
        if moves:
            self.mover.push(moves)
            self.mover.settle()
            (over,) = self.mover.poll()
            assert len(over.blocks) == len(moves)
            for move in moves:
                self.tier.written(move.key, whole=True)

    @rule(pick=st.integers(0))
    def load(self, pick):
        keys = [key for key in sorted(self.tier._copies) if self.tier.slot(key) is not None]
        if not keys:
            return
        key = keys[pick % len(keys)]
        self.put(7, bytes(PAGE))
        self.tier.begin_reading([key])
        self.mover.pull([Move(7, self.tier.slot(key), key)])
        self.mover.settle()
        (over,) = self.mover.poll()
        self.tier.end_reading([key])
        if over.blocks:
            assert self.get(7) == self.content(key)
        else:
            assert not self.sound
            self.tier.spoil(key)

    @rule(slots=st.integers(1, 6))
    def restart(self, slots):
        before = {key: copy.slot for key, copy in self.tier._copies.items() if copy.state == "whole"}
        self.stop()
        more = slots >= self.tier.num_slots
        self.start(slots)
        if more and self.sound:
            assert {key: self.tier.slot(key) for key in before} == before, "all of it is there again"

    @rule(what=st.sampled_from(["blocks", "index"]), place=st.integers(0), cut=st.booleans())
    def damage(self, what, place, cut):
        path = self.files / what
        if not path.exists() or not (size := path.stat().st_size):
            return
        self.sound = False
        if cut:
            os.truncate(path, place % size)
        else:
            flip(path, place % size)

    @rule()
    @precondition(lambda self: not self.sound)
    def remove(self):
        shutil.rmtree(self.folder, ignore_errors=True)

    @invariant()
    def accounted(self):
        if hasattr(self, "tier"):
            self.tier.check()

    def teardown(self):
        if hasattr(self, "mover"):
            self.stop()
            self.cache.close()
            shutil.rmtree(self.folder, ignore_errors=True)


Disks.TestCase.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)
TestDisks = Disks.TestCase


def test_each_engine_has_a_folder_and_each_layout(tmp_path):
    cache = make_cache()
    with closing(DiskSlots(cache, tmp_path, 4)) as first:
        with closing(DiskSlots(cache, tmp_path, 4)) as second:
            assert (first.folder.name, second.folder.name) == ("0", "1")
            assert first.folder.parent == second.folder.parent
        with closing(DiskSlots(cache, tmp_path, 4)) as again:
            assert again.folder == second.folder, "whose engine has ended"
        for changes in ({"model": "n"}, {"order": "token"}, {"groups": attention_groups((None,), 1, 4, "int8")}):
            fields = {name: getattr(LAYOUT, name) for name in KVLayout.__dataclass_fields__} | changes
            with closing(DiskSlots(make_cache(KVLayout(**fields)), tmp_path, 4)) as other:
                assert other.folder.parent != first.folder.parent
                assert other.kept == []
        with closing(DiskSlots(cache, tmp_path, 4, rounding="2")) as other:
            assert other.folder.parent != first.folder.parent, "ranks sum up in another order"
        with closing(DiskSlots(cache, tmp_path, 4, weights="of another time")) as other:
            assert other.folder.parent != first.folder.parent


@pytest.mark.parametrize("name", ["VERSION", "torch.__version__", "processor_of"])
def test_what_another_version_or_processor_has_written_is_not_read(tmp_path, monkeypatch, name):
    cache = make_cache()
    with closing(DiskSlots(cache, tmp_path, 4)) as mine:
        changed = (lambda *_: "another") if name == "processor_of" else "another"
        monkeypatch.setattr(f"penstock.engine.disk_tier.{name}", changed)
        with closing(DiskSlots(cache, tmp_path, 4)) as other:
            assert other.folder.parent != mine.folder.parent


# --- what is left


def left_by(directory, **hours):
    """Folders with four blocks each, of engines with other models that have ended so long ago."""
    folders = []
    for model in hours:
        cache = make_cache(replace(LAYOUT, model=model))
        with closing(DiskSlots(cache, directory, 4)) as disk:
            disk.store([Move(i, i, bytes([i] * 16)) for i in range(4)])
            folders.append(disk.folder)
        cache.close()
    for folder, since in zip(folders, hours.values(), strict=True):
        age(folder, since)
    return folders


def age(folder, hours):
    at = time.time() - 3600 * hours
    for path in (*folder.iterdir(), folder):
        os.utime(path, (at, at))


def test_what_nobody_has_used_for_an_hour_goes_when_it_is_too_much_from_the_oldest_on(tmp_path, caplog):
    caplog.set_level("INFO")
    *old, young = left_by(tmp_path, a=4, b=5, c=3, d=0.5)
    stranger = tmp_path / "notes" / "0"
    stranger.mkdir(parents=True)
    (stranger / "lock").touch()
    os.utime(stranger / "lock", (1, 1))
    used_cache = make_cache(replace(LAYOUT, model="a"))
    with closing(DiskSlots(used_cache, tmp_path, 4)) as used, closing(DiskSlots(make_cache(), tmp_path, 8)) as own:
        assert used.folder == old[0]
        age(used.folder, 10)  # it does nothing
        own.store([Move(0, 0, b"k" * 16)])
        assert not old[1].parent.exists(), "of b and c together there was too much"
        assert old[2].exists()
        assert own.folder.exists()
        own.store([Move(i, i, b"k" * 16) for i in range(8)])
        assert old[2].exists(), "it does not look all the time"
        own._leftovers._look_at = 0.0
        own.store([Move(0, 0, b"k" * 16)])
        assert not old[2].parent.exists()
        assert used.folder.exists()
        assert young.exists()
        assert stranger.exists()
    said = [record.message for record in caplog.records if "deleted" in record.message]
    assert [str(old[1]) in said[0], str(old[2]) in said[1], len(said)] == [True, True, 2]
    assert "nobody has used for 5.0 hours" in said[0]


def test_on_a_full_disk_what_is_left_gives_way(tmp_path, monkeypatch):
    """Whatever its age; and when nothing is left it is full."""
    folders = left_by(tmp_path, a=0, b=0.1, c=0.2)
    written, needed = os.pwrite, [folders[2], folders[1]]

    def full(fd, data, place):
        if len(data) >= PAGE and any(folder.exists() for folder in needed):
            raise OSError(errno.ENOSPC, "no")
        return written(fd, data, place)

    cache = make_cache()
    monkeypatch.setattr(os, "pwrite", full)
    with closing(DiskSlots(cache, tmp_path, 4)) as own:
        assert [folder.exists() for folder in folders] == [True, False, False], "it is tried how quick the disk is"
        assert own.block_seconds != PAGE / UNMEASURED
        needed.append(folders[0])
        cache.blocks[0] = 7
        own.store([Move(0, 0, b"k" * 16)])
        assert not any(folder.exists() for folder in folders)
        assert set(own.content(0)) == {7}
        needed.append(own.folder)
        with pytest.raises(OSError, match="no"):
            own.store([Move(0, 0, b"k" * 16)])
        assert own.folder.exists()


def test_whoever_locks_a_folder_that_is_just_being_deleted_makes_it_anew(tmp_path, monkeypatch):
    layout, flock = tmp_path / "0123456789abcdef", fcntl.flock
    with closing(Folder(layout)) as left:
        (left.path / "blocks").write_bytes(b"x" * PAGE)

    def late(fd, how):
        monkeypatch.setattr(fcntl, "flock", flock)
        assert Leftovers(tmp_path, tmp_path, 0).give_way()
        flock(fd, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with closing(Folder(layout)) as folder:
        assert folder.path == left.path
        assert os.path.samestat(os.fstat(folder._lock), (folder.path / "lock").stat())
        with closing(Folder(layout)) as other:
            assert other.path != folder.path


def test_a_folder_is_never_of_two_engines_whoever_deletes_it_meanwhile(tmp_path):
    owners, wrong, over = Counter(), [], threading.Event()

    def run():
        for _ in range(60):
            with closing(Folder(tmp_path / "0123456789abcdef")) as folder:
                owners[folder.path] += 1
                (folder.path / "blocks").write_bytes(b"x" * PAGE)
                if owners[folder.path] != 1 or not (folder.path / "lock").exists():
                    wrong.append(folder.path)
                owners[folder.path] -= 1

    def delete():
        leftovers = Leftovers(tmp_path, tmp_path, 0)
        while not over.is_set():
            leftovers.give_way()

    with ThreadPoolExecutor(5) as pool:
        deleting = pool.submit(delete)
        try:
            for running in [pool.submit(run) for _ in range(4)]:
                running.result(60)
        finally:
            over.set()
        deleting.result(60)
    assert not wrong


def test_where_the_page_cache_cannot_be_passed_by_it_is_used(tmp_path, monkeypatch):
    opened, flags = os.open, []

    def refusing(path, flag, *more, **named):
        if flag & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no")
        flags.append(flag)
        return opened(path, flag, *more, **named)

    monkeypatch.setattr(os, "open", refusing)
    cache = make_cache()
    opens = open_disk_tier(cache, str(tmp_path), 4)
    with closing(opens.mover) as mover:
        cache.blocks[0] = 7
        mover.push([Move(0, 3, b"k" * 16)])
        mover.pull([Move(1, 3, b"k" * 16)])
        mover.settle()
        mover.pull([Move(1, 3, b"k" * 16)])
        mover.settle()
        assert cache.blocks[1].unique().tolist() == [7]
    assert opens.block_seconds > 0
    assert flags


# --- with a model


def restarted(evicted):
    """Another engine on the same folder, when the first one has ended."""
    close(evicted.engine)
    model, limits = evicted.engine.executor.worker.model, {"blocks": 8, "model_len": 440, "budget": 256}
    evicted.engine = make_engine(model, address_mode="table", sequences=4, slots=32, disk=evicted.disk, **limits)
    return Collector(evicted.engine)


@pytest.fixture
def evicted(model, tmp_path):
    evicted = Evicted(model, address_mode="table", disk=tmp_path)
    yield evicted
    close(evicted.engine)


def blocks_of(evicted):
    return next(evicted.disk.glob("*/0/blocks"))


def test_what_an_engine_left_is_found_by_the_next(evicted):
    again = restarted(evicted)
    assert again.engine.scheduler.offload.lanes[0].tier.used == 4 + 3 * 3
    assert again.run(make_request("first", prompt_of(0, 250)))["first"] == evicted.tokens
    assert again.cached["first"] == 3 * BLOCK_TOKENS
    said = stats_of(again.engine)
    assert said.prefix_loads == 3 * BLOCK_TOKENS
    (tier,) = said.tiers
    assert (tier.name, tier.hit_tokens, tier.loads, tier.failed_loads) == ("disk", 3 * BLOCK_TOKENS, 1, 0)
    assert (tier.loaded_bytes, tier.used_bytes) == (3 * BLOCK_BYTES, 13 * BLOCK_BYTES)


@pytest.mark.parametrize(
    ("fault", "ended", "expected"),
    [
        ("cut", False, 1),
        ("cut", True, 1),
        ("index cut", True, 2),
        ("gone", False, 3),  # the files are there as long as they are open
        ("gone", True, 0),
    ],
)
def test_what_is_lost_is_computed(evicted, fault, ended, expected):
    collector, blocks = evicted.collector, blocks_of(evicted)
    if fault == "cut":
        os.truncate(blocks, BLOCK_BYTES + 5)
    elif fault == "index cut":
        os.truncate(blocks.with_name("index"), 2 * RECORD_BYTES + 10)
    else:
        shutil.rmtree(evicted.disk)
    if ended:
        collector = restarted(evicted)
    assert collector.run(make_request("again", prompt_of(0, 250)))["again"] == evicted.tokens
    assert collector.cached["again"] == expected * BLOCK_TOKENS
    assert stats_of(collector.engine).tiers[0].failed_loads == (fault == "cut" and not ended)


def test_a_full_disk_costs_nothing_but_time(evicted):
    slots = evicted.way.way
    kept = os.dup(slots._fd)
    full = os.open("/dev/full", os.O_RDWR)
    os.dup2(full, slots._fd)
    os.close(full)
    stored = evicted.lane.stored_blocks
    for name in ("new", "new again"):
        evicted.collector.run(make_request(name, prompt_of(5, 250)))
        evicted.collector.run(make_request(f"other than {name}", prompt_of(6, 400), max_tokens=1))
    evicted.settle()
    assert evicted.collector.tokens["new again"] == evicted.collector.tokens["new"]
    (said,) = stats_of(evicted.engine).tiers
    assert said.failed_stores > 0
    assert evicted.lane.stored_blocks == stored
    os.dup2(kept, slots._fd)  # there is room again
    os.close(kept)
    assert evicted.ask_again() == evicted.tokens
    evicted.collector.run(make_request("newest", prompt_of(7, 250), max_tokens=1))
    evicted.settle()
    assert evicted.lane.stored_blocks > stored


def test_a_disk_that_dies_in_the_middle_costs_nothing_but_time(evicted, monkeypatch):
    """What it has is not lost: when it is there again, it is found."""

    def dead(*_):
        raise OSError(errno.EIO, "dead")

    stored, lane = evicted.lane.stored_blocks, evicted.lane
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", dead)
        patch.setattr(os, "pwrite", dead)
        for name in ("a", "b"):
            assert evicted.ask_again(name) == evicted.tokens
            evicted.collector.run(make_request(f"other than {name}", prompt_of(6, 400), max_tokens=1))
        evicted.settle()
    assert (lane.failed_loads > 0, lane.failed_stores > 0, lane.stored_blocks) == (True, True, stored)
    again = restarted(evicted)
    assert again.run(make_request("again", prompt_of(0, 250)))["again"] == evicted.tokens
    assert again.cached["again"] == 3 * BLOCK_TOKENS


def test_of_another_salt_nothing_is_found(evicted):
    again = restarted(evicted)
    tokens = again.run(replace(make_request("salted", prompt_of(0, 250)), cache_salt="of another tenant"))["salted"]
    assert (tokens, again.cached["salted"]) == (evicted.tokens, 0)
    assert again.engine.scheduler.counters.prefix_loads == 0


# --- as it is built


def options_of(checkpoint, **changes):
    return EngineOptions(
        model=str(checkpoint), device="cpu", max_num_seqs=4, max_model_len=440, kv_cache_memory=8 * BLOCK_BYTES,
        max_num_batched_tokens=256, **changes,
    )  # fmt: skip


def test_built_from_options(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    tokens = []
    for folder in (tmp_path / "a" / "b", "~/a/b"):
        options = options_of(checkpoint, disk_cache=str(folder), disk_cache_size=20 * BLOCK_BYTES + 5)
        built = build_engine(options, SystemClock())
        collector = Collector(built.engine)
        tokens.append(collector.run(make_request("first", prompt_of(0, 250)))["first"])
        assert built.engine.scheduler.offload.counts()["tier_slots"] == 20
        built.engine.settle()
        found = collector.cached["first"]
        built.close()
    assert tokens[0] == tokens[1]
    assert found == 3 * BLOCK_TOKENS


@pytest.mark.skipif(native.missing() is not None, reason="ranks of one machine meet in native code")
def test_ranks_have_one_copy_of_a_block(checkpoint, tmp_path):
    """What becomes of them when one dies, and at the next start: tests/e2e/test_up.py."""
    threads = native.threads()
    options = replace(
        options_of(checkpoint, disk_cache=str(tmp_path), tensor_parallel_size=2), max_num_batched_tokens=128
    )
    try:
        with closing(build_engine(options, SystemClock())) as built:
            assert built.engine.movers["disk"].block_bytes == BLOCK_BYTES
            collector, (lane,) = Collector(built.engine), built.engine.scheduler.offload.lanes
            tokens = collector.run(make_request("first", prompt_of(0, 400)))["first"]
            for i in (1, 2):
                collector.run(make_request(f"other{i}", prompt_of(i, 400), max_tokens=1))
            assert collector.run(make_request("again", prompt_of(0, 400)))["again"] == tokens
            assert (collector.cached["again"], lane.loaded_blocks) == (6 * BLOCK_TOKENS, 6)
    finally:
        native.set_threads(threads)


def test_of_weights_that_have_changed_anywhere_nothing_is_found(checkpoint, tmp_path):
    """Also where that is behind the first bytes of each tensor, by which checkpoints are told apart else."""
    model = tmp_path / "model"
    shutil.copytree(checkpoint, model)
    found = []
    for _ in range(2):
        built = build_engine(options_of(model, disk_cache=str(tmp_path / "disk")), SystemClock())
        collector = Collector(built.engine)
        collector.run(make_request("first", prompt_of(0, 250)))
        built.engine.settle()
        found.append((built.layout.model, collector.cached["first"]))
        built.close()
        (weights,) = model.glob("*.safetensors")
        with safe_open(weights, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        tensors["model.embed_tokens.weight"][-1] += 1
        save_file(tensors, weights, {"format": "pt"})
    assert found == [(built.layout.model, 0)] * 2


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"disk_cache_size": 1 << 30}, "disk-cache-size: 1.0 GiB, allowed only with disk-cache"),
        ({"disk_cache": "/proc/none"}, "disk-cache: '/proc/none' cannot be used .*, allowed is a folder"),
        ({"disk_cache": "~nobody-here"}, "disk-cache: '~nobody-here' cannot be used .*, allowed is a folder"),
        ({"disk_cache": "/tmp", "disk_cache_size": 5000}, "disk-cache-size: 0.0 MiB, at least one block"),
        ({"disk_cache": "/tmp", "disk_cache_size": 0}, "disk-cache-size: 0.0 MiB, at least one block"),
        ({"disk_cache": "/tmp", "prefix_cache": False}, "disk-cache-size: 16.0 GiB without prefix caching"),
    ],
)
def test_what_cannot_be_had_is_refused(checkpoint, changes, says):
    with pytest.raises(ConfigError, match=says) as refused:
        build_engine(options_of(checkpoint, **changes), SystemClock())
    assert refused.value.field in ("disk-cache", "disk-cache-size")
    with pytest.raises(ConfigError, match="not supported yet on cuda with 2 ranks"):
        check_disk_tier("/tmp", None, torch.device("cuda"), 2)


@pytest.mark.parametrize("fails", [errno.EROFS, errno.EIO])
def test_a_disk_that_fails_at_the_start_is_no_reason_not_to_serve(checkpoint, tmp_path, monkeypatch, caplog, fails):
    def mkdir(*_, **__):
        raise OSError(fails, os.strerror(fails))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "mkdir", mkdir)
        built = build_engine(options_of(checkpoint, disk_cache=str(tmp_path / "disk")), SystemClock())
    assert os.strerror(fails) in caplog.text
    assert Collector(built.engine).run(make_request("first", prompt_of(0, 250)))["first"]
    built.engine.check()
    built.close()
