"""Ranks of one model in threads of this process, which start at once; real ones are processes."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from penstock.core.clock import SystemClock
from penstock.core.layout import windows_of
from penstock.core.plan import StepPlan, StepResult
from penstock.engine.cache import KVCache, make_layout
from penstock.engine.executor import InlineExecutor
from penstock.engine.loop import Engine
from penstock.engine.runner import Runner
from penstock.kv.groups import WHOLE
from penstock.kv.pool import BlockPool
from penstock.nn.linear import Shard
from penstock.nn.loader import load_model
from penstock.nn.models.decoder import Decoder
from penstock.nn.ranks import SharedMemoryRanks
from penstock.sched.local import Limits, Scheduler
from penstock.sched.local.speculation import Speculation

CPU = torch.device("cpu")


def load_shards(
    folder: Path,
    size: int,
    dtype: torch.dtype | None = None,
    expert_parallel: bool = False,
    draft_head: bool = False,
) -> list[Decoder]:
    memory, of_experts = (mmap.mmap(-1, SharedMemoryRanks.bytes_for(size)) for _ in range(2))

    def load(rank: int) -> Decoder:
        ranks = SharedMemoryRanks(memory, rank, size)
        experts = Shard(rank, size, SharedMemoryRanks(of_experts, rank, size)) if expert_parallel else None
        return load_model(folder, CPU, dtype, shard=Shard(rank, size, ranks, experts), draft_head=draft_head)

    default = torch.get_default_dtype()
    with ThreadPoolExecutor(size) as pool:
        shards = list(pool.map(load, range(size)))
    torch.set_default_dtype(default)  # which threads set beside each other
    return shards


class Together:
    """A worker: all ranks, which must come to the same results.

    Args:
        change: what they run for a plan.
    """

    def __init__(self, runners: list[Runner], change: Callable[[StepPlan], StepPlan] | None = None) -> None:
        self._runners, self._change = runners, change
        self._pool = ThreadPoolExecutor(len(runners))

    def prepare(self, plan: StepPlan) -> None:
        for runner in self._runners:
            runner.prepare(plan)

    def run(self, plan: StepPlan) -> StepResult:
        plan = plan if self._change is None else self._change(plan)
        results = list(self._pool.map(lambda runner: runner.run(plan), self._runners))
        assert all(result == results[0] for result in results[1:])
        return results[0]

    def counts(self) -> dict[str, int]:
        return {}

    def check(self) -> None:
        for runner in self._runners:
            runner.check()


def make_parallel_engine(
    shards: list[Decoder],
    *,
    budget: int = 512,
    sequences: int = 16,
    blocks: int = 64,
    model_len: int = 1024,
    ahead: bool = True,
    graph_mode: str = "auto",
    change: Callable[[StepPlan], StepPlan] | None = None,
    speculation: Speculation | None = None,
) -> Engine:
    runners, windows = [], WHOLE
    for model in shards:
        layout = make_layout(model.config, model.dtype, "block", "test", ranks=len(shards))
        windows = windows_of(layout.groups)
        runners.append(Runner(model, KVCache.on_device(layout, blocks * len(windows), CPU), graph_mode))
    limits = Limits(token_budget=budget, max_sequences=sequences, max_model_len=model_len)
    clock = SystemClock()
    executor = InlineExecutor(Together(runners, change), clock, ahead=ahead, short=0.0)
    pool = BlockPool(range(blocks * len(windows)), windowed=windows[0] is not None)
    return Engine(Scheduler(limits, pool, windows=windows, speculation=speculation), executor, clock)
