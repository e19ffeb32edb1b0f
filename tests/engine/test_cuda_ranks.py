"""Ranks of CUDA devices, joined by NCCL: whatever their layout, tokens are those of one rank. Where there is one device
they share it, and NCCL takes each for a host of its own."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import cycle

import pytest
import torch

from penstock.core.errors import RankFailed
from penstock.engine import micro_batches
from penstock.engine.executor.exchanges import UNITS
from penstock.sched.parallel.micro_batches import MicroBatches
from tests.engine.test_groups import asked, build, tokens
from tests.helpers.checkpoints import write_checkpoint

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
# kind, tensor, pipeline and data parallel, experts spread, two micro-batches
LAYOUTS = [
    ("qwen3", 2, 1, 1, False, False),
    ("qwen3", 1, 2, 1, False, False),
    ("qwen3", 2, 2, 1, False, False),
    ("qwen3-moe", 2, 1, 1, True, False),
    ("qwen3-moe", 2, 1, 1, True, True),
    ("qwen3-moe", 1, 1, 2, True, False),
    ("qwen3-moe", 1, 1, 2, True, True),
    ("deepseek-v3", 1, 2, 2, True, False),
    ("deepseek-v3", 2, 1, 2, True, False),
]
COUNT, MEMORY = torch.cuda.device_count(), 64 << 20
BUILT = {}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    pytest.importorskip("transformers")

    def write(kind):
        folder, further = tmp_path_factory.mktemp(kind), kind == "deepseek-v3"
        return write_checkpoint(folder, kind, dtype=torch.float32, further=further)

    return {kind: write(kind) for kind in sorted({layout[0] for layout in LAYOUTS})}


@pytest.fixture
def processes():
    """Makes so many, each of a group."""
    pools = []

    def make(count):
        context = multiprocessing.get_context("spawn")
        pools.extend(ProcessPoolExecutor(1, context) for _ in range(count))
        return pools

    yield make
    for pool in pools:
        for process in list(pool._processes.values()):
            process.kill()
        pool.shutdown()


def begin(folder, two, options):
    """In a group's process."""
    if two:
        MicroBatches.choose = _often
        apart = cycle((0, *UNITS))
        micro_batches.units_apart = lambda units, computing, exchanging, sizes: next(apart)
    BUILT["own"] = build(folder, device="cuda", kv_cache_memory=MEMORY, graph_mode="eager", **options)


def _often(self, parts):
    rows = sum(part.rows for part in parts)
    return rows // 2 if rows % 5 else 0


def compute(requests):
    return tokens(BUILT["own"], requests)


def close():
    BUILT.pop("own").close()


def splits():
    return BUILT["own"].engine.executor.expert_load.splits


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: "{}-{}tp{}pp{}dp{}{}".format(*layout))
def test_every_layout_computes_the_tokens_of_one_rank(folders, tmp_path, processes, layout):
    kind, tensor, pipeline, data, experts, two = layout
    alone = build(folders[kind], device="cuda", kv_cache_memory=MEMORY)
    expected = [tokens(alone, asked(group)) for group in range(data)]
    alone.close()
    sizes = {"tensor_parallel_size": tensor, "pipeline_parallel_size": pipeline, "data_parallel_size": data}
    sizes |= {"enable_expert_parallel": experts, "enable_dbo": two, "max_num_batched_tokens": 70}
    sizes["one_device"] = tensor * pipeline * data > COUNT
    pools = processes(data)
    door = str(tmp_path / "door") if data > 1 else None
    begun = [
        pool.submit(begin, folders[kind], two, sizes | {"data_parallel_rank": rank, "data_parallel_address": door})
        for rank, pool in enumerate(pools)
    ]
    [each.result(120) for each in begun]
    run = partial(_on_each, pools)
    assert run([asked(group) for group in range(data)]) == expected
    some = [asked(group) if group == data - 1 else [] for group in range(data)]
    assert run(some)[-1] == expected[-1]
    if two:
        assert sum(pool.submit(splits).result(10) for pool in pools) > 2


def _on_each(pools, requests):
    found = [pool.submit(compute, own) for pool, own in zip(pools, requests, strict=True)]
    return [each.result(120) for each in found]


def test_an_engine_that_was_closed_or_has_lost_a_rank_can_be_started_anew(folders, processes):
    (pool,) = processes(1)
    sizes = {"tensor_parallel_size": 2, "one_device": COUNT < 2}
    found = []
    for lost in (False, True, False):
        pool.submit(begin, folders["qwen3"], False, sizes).result(120)
        found.append(pool.submit(lose if lost else compute, asked(0)).result(120))
        pool.submit(close).result(60)
    assert found[0] == found[2]
    assert "was killed by SIGKILL" in found[1]


def lose(requests):
    """The other rank, in the middle of requests. Returns what is said of it."""
    built = BUILT["own"]
    (other,) = built.engine.executor._others.others
    for request in requests:
        built.engine.add(request)
    for _ in range(3):
        built.engine.step()
    other.process.kill()
    try:
        while True:
            built.engine.step()
    except RankFailed as error:
        return str(error)
