"""How much of what ranks exchange for experts is hidden by two micro-batches, on this machine's processors.

usage: python -m tools.overlap_bench FOLDER [--groups] [--rows 512] [--decodes 0] [--ratio 0.72]

Two processes of one thread compute the same steps with a model with experts (`tools/make_checkpoint.py`): as two ranks
of one engine, or as two data-parallel groups, each of which has so many rows of its own. Exchanges
take as long as if they had a network to themselves: by default 0.72 of computation, which is xLLM's (table 7: 9.3 ms
beside 13.0 ms). Steps are one batch, two micro-batches, or what is chosen by what was measured; the modes take turns,
and of each the median is printed.
"""

from __future__ import annotations

import argparse
import mmap
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from penstock.core.plan import SequenceStep, Split, StepPlan
from penstock.core.sampling import SamplingParams
from penstock.engine.cache import KVCache, make_layout
from penstock.engine.micro_batches import SplitSteps
from penstock.engine.runner import Runner
from penstock.nn import native
from penstock.nn.linear import Shard
from penstock.nn.loader import load_model
from penstock.nn.ranks import PAGE, SharedMemoryRanks
from penstock.nn.streams import Stream, Turns
from penstock.sched.local.sequence import blocks_for
from tools.apart import run

RANKS = 2
CONTEXT = 512  # tokens of a sequence that decodes
MODES = "one batch", "two micro-batches", "chosen"
CPU = torch.device("cpu")


def plan_of(rows: int, decodes: int) -> StepPlan:
    params, steps, block = SamplingParams(temperature=0.0), list[SequenceStep](), 0
    for i in range(decodes):
        blocks = tuple(range(block, block := block + blocks_for(CONTEXT + 1)))
        steps.append(SequenceStep(f"decode {i}", CONTEXT, [i + 1], blocks, 1, params, 0))
    if rows:
        blocks = tuple(range(block, block + blocks_for(rows)))
        steps.append(SequenceStep("prompt", 0, [i % 1000 + 1 for i in range(rows)], blocks, 1, params, 0))
    return StepPlan(tuple(steps))


def rank(args: argparse.Namespace) -> None:
    """One of the processes; the first one decides and prints."""
    torch.set_num_threads(1)
    native.set_threads(1)
    size, own = SharedMemoryRanks.bytes_for(RANKS), args.rank
    memory = mmap.mmap(args.memory, 2 * size + PAGE)
    ranks, of_experts = (SharedMemoryRanks(memory, own, RANKS, os.getppid(), start) for start in (0, size))
    sent, slowness = 0, 0.0  # bytes; seconds of each

    def throttle(count: int) -> float:
        nonlocal sent
        sent += count
        return slowness * count

    stream = Stream(throttle)
    if args.groups:
        turns = Turns(memoryview(memory)[2 * size :].cast("q"), own)
        shard = Shard(experts=Shard(own, RANKS, of_experts, stream=stream, apart=True, turns=turns))
    else:
        shard = Shard(own, RANKS, ranks, Shard(own, RANKS, of_experts, stream=stream))
    model = load_model(args.folder, CPU, shard=shard)
    plan = plan_of(args.rows, args.decodes)
    layout = make_layout(model.config, model.dtype, "block", "bench", ranks=shard.size)
    cache = KVCache.on_device(layout, 1 + max(max(step.blocks) for step in plan.sequences), CPU)
    runner = Runner(model, cache)
    chooser = SplitSteps(runner)

    def agreed(value: float) -> float:
        return ranks.gather(torch.tensor([value], dtype=torch.float64))[0].item()

    took = []
    for _ in range(5):
        sent = 0
        runner.run(plan)
        took.append(stream.last().took - stream.last().waited)
    slowness = agreed(args.ratio * min(took) / sent)
    found: dict[str, list[tuple[float, float, float]]] = {mode: [] for mode in MODES}
    splits = 0
    for turn in range(len(MODES) * args.steps):
        mode = MODES[turn % len(MODES)]
        rows = plan.num_tokens // 2 if mode == MODES[1] else 0
        if mode == MODES[2]:
            chosen = chooser.next(plan).split
            rows = 0 if chosen is None else chosen.rows
        rows = int(agreed(rows))
        splits += mode == MODES[2] and rows > 0
        chooser.run(plan if rows == 0 else replace(plan, split=Split(rows, 1)))
        found[mode].append(stream.last()[:3])
    if own == 0:
        for mode, steps in found.items():
            step, exposed, exchanging = (1e3 * statistics.median(column) for column in zip(*steps, strict=True))
            print(
                f"{mode}: step {step:.1f} ms, exchanging {exchanging:.1f} ms, of which {exposed:.1f} ms are waited for"
            )
        print(f"of {args.steps} chosen steps {splits} were two micro-batches")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--groups", action="store_true", help="two data-parallel groups instead of two ranks of one")
    parser.add_argument("--rows", type=int, default=512, help="of a prompt")
    parser.add_argument("--decodes", type=int, default=0, help="sequences that decode, with 512 tokens of context each")
    parser.add_argument("--ratio", type=float, default=0.72, help="time of exchanges over that of computation")
    parser.add_argument("--steps", type=int, default=30, help="of each mode")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--memory", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.rank is not None:
        rank(args)
        return 0
    return run("tools.overlap_bench", argv, RANKS, 2 * SharedMemoryRanks.bytes_for(RANKS) + PAGE, "--rank")


if __name__ == "__main__":
    sys.exit(main())
