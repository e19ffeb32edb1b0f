"""Data-parallel groups attend for each other over long contexts: tokens are those of one rank alone, whoever does."""

import os
import signal
import threading

import pytest
import torch

from penstock.core.errors import ConfigError, RankFailed
from penstock.engine.build import EngineOptions, check_engine
from penstock.nn import native
from penstock.sched.parallel import groups as balance
from tests.engine.test_groups import Groups, build, tokens
from tests.helpers.checkpoints import write_checkpoint
from tests.helpers.engines import make_request
from tests.helpers.waiting import eventually

pytestmark = pytest.mark.skipif(native.missing() is not None, reason="ranks of one machine meet in native code")
OPTIONS = {"kv_cache_memory": 24 << 20, "max_model_len": 8192, "max_num_batched_tokens": 1024}
DRAFTS = '{"method": "mtp", "num_speculative_tokens": 2, "adaptive": false}'
KINDS = {"deepseek-v3": {"further": True, "first_k_dense_replace": 1}, "qwen3-moe": {}}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    pytest.importorskip("transformers")
    return {
        kind: write_checkpoint(tmp_path_factory.mktemp(kind), kind, max_position_embeddings=8192, **changes)
        for kind, changes in KINDS.items()
    }


@pytest.fixture
def any_pays(monkeypatch):
    """Contexts of a model this small take no time worth a thought."""
    monkeypatch.setattr(balance, "LEAST_MS", 0.0)


def prompt(length, seed):
    return [(i * i * (seed + 7) + i) % 300 + 1 for i in range(length)]


def asked(group):
    """The first group's contexts are long, and end one after the other."""
    lengths = (5000, 3000) if group == 0 else (100,)
    return [make_request(f"{group}-{i}", prompt(n, i), seed=i, max_tokens=60 + 40 * i) for i, n in enumerate(lengths)]


@pytest.mark.parametrize(
    ("kind", "sizes", "options"),
    [
        ("deepseek-v3", {}, {"speculative_config": DRAFTS}),
        ("deepseek-v3", {}, {"kv_cache_dtype": "int8"}),
        pytest.param("deepseek-v3", {"tensor_parallel_size": 2}, {}, marks=pytest.mark.slow),
        pytest.param("qwen3-moe", {"pipeline_parallel_size": 2}, {}, marks=pytest.mark.slow),
        pytest.param("qwen3-moe", {}, {"dtype": "bfloat16"}, marks=pytest.mark.slow),
    ],
)
def test_tokens_are_those_of_one_rank_whoever_attends(folders, tmp_path, any_pays, kind, sizes, options):
    """Copies come while steps go on, and places are used again."""
    alone = build(folders[kind], **OPTIONS, **options)
    expected = [tokens(alone, asked(group)) for group in range(2)]
    alone.close()
    memory = {"helper_kv_memory": 2 << 20, "enable_expert_parallel": True}
    groups = Groups(folders[kind], tmp_path / "door", 2, **OPTIONS, **options, **sizes, **memory)
    try:
        for way in ((0, 1), (None, 0)):
            wanted = [{} if which is None else expected[which] for which in way]
            for _ in range(20):
                assert groups.run([[] if which is None else asked(which) for which in way]) == wanted
                if groups.built[way.index(0)].worker.runner.helpers.posted:
                    break
        for built in groups.built:
            helping = built.engine.executor._others.helping.helping
            helping.check()
            assert built.worker.runner.helpers.posted
    finally:
        groups.close()


@pytest.mark.slow
def test_a_helper_that_is_killed_ends_all_groups(folders, tmp_path, any_pays):
    """Then all start again, as without help; nobody waits for pieces that it had taken."""
    sizes = {"helper_kv_memory": 2 << 20, "enable_expert_parallel": True, "tensor_parallel_size": 2}
    groups = Groups(folders["deepseek-v3"], tmp_path / "door", 2, **OPTIONS, **sizes)
    first, second = groups.built
    (rank,) = second.engine.executor._others.others

    def kill():
        eventually(lambda: first.worker.runner.helpers.helped, 120)
        os.kill(rank.process.pid, signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        with pytest.raises(RankFailed, match=r"data-parallel group 1 .* has ended|has failed"):
            tokens(first, [make_request(f"{i}", prompt(7000, i), max_tokens=1000) for i in range(4)])
        thread.join()
        with pytest.raises(RankFailed, match="was killed by SIGKILL"):
            tokens(second, [make_request("b", [1, 2, 3], max_tokens=400)])
    finally:
        groups.close()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "helper-kv-memory: 1048576, allowed is none where data-parallel-size and enable-expert-parallel"),
        ({"data_parallel_size": 2}, "helper-kv-memory: 1048576, allowed is none where"),
    ],
)
def test_what_cannot_be_is_refused_by_name(options, says):
    with pytest.raises(ConfigError, match=says):
        check_engine(EngineOptions(model="", helper_kv_memory=1 << 20, **options), torch.device("cpu"))


def test_memory_that_holds_nothing_is_refused(folders, tmp_path):
    with pytest.raises(ConfigError, match="helper-kv-memory: at least 1179648 bytes are needed, for copies"):
        Groups(folders["qwen3-moe"], tmp_path / "door", 2, enable_expert_parallel=True, helper_kv_memory=4096)
