"""Engines that compute one model together, each with its own requests: whatever the layout of their ranks, tokens are
those of one rank alone."""

import os
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import pytest
import torch

from penstock.core.clock import SystemClock
from penstock.core.errors import ConfigError, RankFailed
from penstock.engine.build import EngineOptions, build_engine
from penstock.engine.executor import processes
from penstock.nn import native
from penstock.sched.parallel.micro_batches import MicroBatches
from tests.helpers.checkpoints import write_checkpoint
from tests.helpers.engines import Collector, make_request
from tests.helpers.waiting import eventually

pytestmark = pytest.mark.skipif(native.missing() is not None, reason="ranks of one machine meet in native code")
KINDS = ("qwen3-moe", "deepseek-v3")
QUICK = {("qwen3-moe", 1, 1, 2, True), ("deepseek-v3", 2, 1, 2, True)}
LAYOUTS = [
    pytest.param(
        *case, marks=() if case in QUICK else pytest.mark.slow, id="{}-{}tp{}pp{}dp{}".format(*case[:4], "ep" * case[4])
    )
    for kind, *sizes, experts in product(KINDS, (1, 2, 4), (1, 2), (1, 2, 4), (False, True))
    if sizes[0] * sizes[1] * sizes[2] in (2, 4)
    for case in [(kind, *sizes, experts)]
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    pytest.importorskip("transformers")

    def write(kind):
        further = kind == "deepseek-v3"
        return write_checkpoint(tmp_path_factory.mktemp(kind), kind, dtype=torch.float32, further=further)

    return {kind: write(kind) for kind in KINDS}


def build(folder, **options):
    options = {"kv_cache_memory": 16 << 20, "max_num_seqs": 8, "device": "cpu"} | options
    threads = native.threads()
    try:
        return build_engine(EngineOptions(model=str(folder), **options), SystemClock())
    finally:
        native.set_threads(threads)


def tokens(built, requests):
    collector = Collector(built.engine)
    collector.run(*requests)
    built.engine.check()
    return collector.tokens


class Groups:
    """All groups, each built and used in a thread of its own."""

    def __init__(self, folder, door, data, **options):
        self.pool = ThreadPoolExecutor(data)
        ways = [{"data_parallel_rank": group, "data_parallel_address": str(door)} for group in range(data)]
        self.built = list(self.pool.map(lambda way: build(folder, data_parallel_size=data, **options, **way), ways))

    def run(self, requests):
        """Of each group -> its tokens."""
        return list(self.pool.map(tokens, self.built, requests))

    def close(self):
        list(self.pool.map(lambda built: built.close(), self.built))


def asked(group):
    prompts = [[(7 * i + k + 13 * group) % 300 + 1 for k in range(20 + 90 * i)] for i in range(3)]
    return [make_request(f"{group}-{i}", p, seed=i, max_tokens=8 + 6 * group) for i, p in enumerate(prompts)]


@pytest.mark.parametrize(("kind", "tensor", "pipeline", "data", "experts"), LAYOUTS)
def test_every_layout_computes_the_tokens_of_one_rank(folders, tmp_path, kind, tensor, pipeline, data, experts):
    """Also where only some groups have anything to compute, and where they end at different times; DeepSeek's drafts
    by its own head."""
    alone = build(folders[kind])
    expected = [tokens(alone, asked(group)) for group in range(data)]
    alone.close()
    sizes = {"tensor_parallel_size": tensor, "pipeline_parallel_size": pipeline, "enable_expert_parallel": experts}
    if kind == "deepseek-v3":
        sizes["speculative_config"] = '{"method": "mtp", "num_speculative_tokens": 2, "adaptive": false}'
    groups = Groups(folders[kind], tmp_path / "door", data, max_num_batched_tokens=70, **sizes)
    try:
        assert groups.run([asked(group) for group in range(data)]) == expected
        if kind == "deepseek-v3":
            assert all(built.engine.scheduler.speculation.counters.drafts for built in groups.built)
        some = [asked(group) if group == data - 1 else [] for group in range(data)]
        assert groups.run(some)[-1] == expected[-1]
        if experts and data > 1:
            begun = {built.engine.executor._begun for built in groups.built}
            assert len(begun) == 1, "all compute the same steps"
    finally:
        groups.close()


@pytest.mark.parametrize(
    ("kind", "tensor", "pipeline", "data", "experts"),
    [case for case in LAYOUTS if case.values[4] and case.values[1] * case.values[3] > 1],
)
def test_micro_batches_are_of_the_same_tokens(folders, tmp_path, monkeypatch, kind, tensor, pipeline, data, experts):
    """Whichever groups have two in a step, and whether that pays or not."""

    def choose(self, parts):
        rows = sum(part.rows for part in parts)
        return rows // 2 if rows % 5 else 0

    monkeypatch.setattr(MicroBatches, "choose", choose)
    alone = build(folders[kind])
    expected = [tokens(alone, asked(group)) for group in range(data)]
    alone.close()
    sizes = {"tensor_parallel_size": tensor, "pipeline_parallel_size": pipeline, "enable_expert_parallel": experts}
    if kind == "deepseek-v3":
        sizes["speculative_config"] = '{"method": "mtp", "num_speculative_tokens": 2, "adaptive": false}'
    groups = Groups(folders[kind], tmp_path / "door", data, max_num_batched_tokens=70, enable_dbo=True, **sizes)
    try:
        assert groups.run([asked(group) for group in range(data)]) == expected
        some = [asked(group) if group == data - 1 else [] for group in range(data)]
        assert groups.run(some)[-1] == expected[-1]
        assert sum(built.engine.executor.expert_load.splits for built in groups.built) > 2
    finally:
        groups.close()


def test_groups_of_different_models_do_not_meet(folders, tmp_path):
    door = str(tmp_path / "door")
    way = {"data_parallel_size": 2, "enable_expert_parallel": True, "data_parallel_address": door}
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(build, folders["qwen3-moe"], **way)
        for said in (b"", b"?"):  # who ends before it has said anything, or is no engine, is nobody
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
                eventually(lambda stranger=stranger: stranger.connect_ex(door) == 0)
                if said:
                    stranger.send(said)
        with pytest.raises(ConfigError, match=r"data-parallel-address: group 1 is 1TP2DPEP .*deepseek"):
            build(folders["deepseek-v3"], data_parallel_rank=1, **way)
        second = build(folders["qwen3-moe"], data_parallel_rank=1, **way)  # and the first still waits for its like
        closing = threading.Thread(target=second.close)
        closing.start()
        first.result(60).close()
        closing.join(60)


@pytest.mark.parametrize("idle", [False, True])
def test_a_rank_that_is_killed_ends_all_groups(folders, tmp_path, idle):
    """Also one that has nothing to compute, and would not notice."""
    groups = Groups(folders["qwen3-moe"], tmp_path / "door", 2, enable_expert_parallel=True, tensor_parallel_size=2)
    first, second = groups.built
    try:
        groups.run([asked(0), asked(1)])
        os.kill(second.engine.executor._others.others[0].process.pid, signal.SIGKILL)
        if not idle:
            with pytest.raises(RankFailed, match=r"data-parallel group 1 .* has ended|has failed"):
                tokens(first, [make_request("a", [1, 2, 3], max_tokens=400)])
        with pytest.raises(RankFailed, match="was killed by SIGKILL"):
            tokens(second, [make_request("b", [1, 2, 3], max_tokens=400)])
        second.engine.close()
        eventually(lambda: first.engine.executor._others.failure is not None)
    finally:
        groups.close()


def test_a_rank_that_stands_still_is_named_by_its_own_group(folders, tmp_path, monkeypatch):
    groups = Groups(folders["qwen3-moe"], tmp_path / "door", 2, enable_expert_parallel=True, tensor_parallel_size=2)
    first, second = groups.built
    try:
        monkeypatch.setattr(processes, "LOOK", 0.05)
        (rank,) = second.engine.executor._others.others
        os.kill(rank.process.pid, signal.SIGSTOP)
        with pytest.raises(RankFailed):
            tokens(first, [make_request("a", [1, 2, 3], max_tokens=4)])
        assert str(second.engine.executor._others.failure) == f"{rank.name} stands still"
    finally:
        groups.close()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"data_parallel_rank": 2}, "data-parallel-rank: 2, allowed is 0 to 1"),
        ({"data_parallel_address": None}, "a data-parallel-address is needed"),
    ],
)
def test_what_cannot_be_is_refused_by_name(folders, tmp_path, options, says):
    way = {"data_parallel_size": 2, "enable_expert_parallel": True, "data_parallel_address": str(tmp_path / "door")}
    with pytest.raises(ConfigError, match=says):
        build(folders["qwen3-moe"], **way | options)
