"""What it brings that data-parallel groups attend for each other, or give each other sequences, on this machine's
processors.

usage: python -m tools.helping_bench FOLDER [--contexts 16384 16384] [--short 512]

Two groups of one process and one thread each decode with a model with experts (`tools/make_checkpoint.py`): the first
one long contexts, the second as many short ones. Steps in which each attends alone, steps in which the second may
help, and steps with sequences where they would be after a move take turns. Which parts of contexts the second may help
with is decided, and copied, as in an engine. Of each kind the median is printed: how long a step takes, and how long
each group has a processor in it: the longest of these is how long a step takes where there is a processor for each.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from penstock.core.plan import SequenceStep, StepPlan
from penstock.core.sampling import SamplingParams
from penstock.engine.cache import KVCache, make_layout
from penstock.engine.executor.groups import GroupMemory
from penstock.engine.helping import HelpWanted, open_helpers
from penstock.engine.options import EngineOptions
from penstock.engine.runner import Runner
from penstock.nn import native
from penstock.nn.experts import MixtureOfExperts
from penstock.nn.linear import Shard
from penstock.nn.loader import load_model
from penstock.nn.streams import Stream
from penstock.sched.local.sequence import blocks_for
from penstock.sched.parallel.groups import BATCH, SEQUENCE, GroupLoad, even_out
from tools.apart import run

GROUPS, TOGETHER = 2, 40  # steps after which all that is to be copied is there
ALONE, HELPED, MOVED = MODES = "each alone", "helped", "moved"
CPU = torch.device("cpu")


def options(args: argparse.Namespace, group: int) -> EngineOptions:
    return EngineOptions(
        model=str(args.folder),
        data_parallel_size=GROUPS,
        data_parallel_rank=group,
        enable_expert_parallel=True,
        helper_kv_memory=args.copies << 20,
    )


def moved(contexts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Contexts of each group, after all moves of whole sequences that make the longest shorter."""
    there = [tuple(enumerate(own)) for own in contexts]
    found = [list(own) for own in contexts]
    for move in even_out([GroupLoad(own, sum(map(sum, contexts))) for own in there], 1.0, kinds=(BATCH, SEQUENCE)):
        for sequence in move.sequences:
            found[move.source].remove(contexts[move.source][sequence])
            found[move.target].append(contexts[move.source][sequence])
    return found


def plan_of(contexts: Sequence[int]) -> StepPlan:
    params, steps, block = SamplingParams(temperature=0.0), list[SequenceStep](), 0
    for i, tokens in enumerate(contexts):
        blocks = tuple(range(block, block := block + blocks_for(tokens + 1)))
        steps.append(SequenceStep(f"{i}", tokens, [i + 1], blocks, 1, params, 0))
    return StepPlan(tuple(steps))


def group(args: argparse.Namespace) -> None:
    """One of the processes."""
    torch.set_num_threads(1)
    native.set_threads(1)
    own = args.group
    memory = GroupMemory(args.memory, options(args, own))
    stream = Stream()
    shard = Shard(experts=memory.experts(0, 0, memory.ranks(0, 0, os.getppid()), stream))
    model = load_model(args.folder, CPU, shard=shard)
    contexts = [args.contexts, [args.short] * len(args.contexts)]
    plan, after = plan_of(contexts[own]), plan_of(moved(contexts)[own])
    layout = make_layout(model.config, model.dtype, "block", "bench", args.kv_cache_dtype)
    blocks = 1 + max(max(step.blocks) for step in (*plan.sequences, *after.sequences))
    cache = KVCache.on_device(layout, blocks, CPU)
    cache.slots.zero_()
    runner = Runner(model, cache)
    helpers = runner.helpers = open_helpers(memory.helpers(0, 0, os.getppid()), memory.copies(own), model, cache)
    layers = sum(isinstance(part, MixtureOfExperts) for part in model.model.layers.modules())
    wanted = HelpWanted(memory, cache, helpers, layers, memory.ahead + 2)
    found: dict[str, list[tuple[float, float, int]]] = {mode: [] for mode in MODES}
    for turn in range(len(MODES) * (TOGETHER + args.steps)):
        mode = MODES[turn % len(MODES)]
        helped = after if mode == MOVED else wanted.next(plan)
        pieces, worked = helpers.helped, time.thread_time()
        runner.run(replace(helped, helped=()) if mode == ALONE else helped)
        if turn >= len(MODES) * TOGETHER:
            found[mode].append((stream.last().took, time.thread_time() - worked, helpers.helped - pieces))
    for mode in MODES:
        step, worked, others = (statistics.median(column) for column in zip(*found[mode], strict=True))
        by = f", {others:.0f} pieces by group 1" if own == 0 else ""
        print(
            f"{mode}, group {own}: step {1e3 * step:.1f} ms, processor {1e3 * worked:.1f} ms{by}\n", end="", flush=True
        )
    if own == 0:
        tokens = sum([part.tokens for part in wanted.helping.parts.values()])
        print(f"{tokens} of {sum(args.contexts)} tokens may be attended to by group 1")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--contexts", type=int, nargs="+", default=[16384, 16384], help="tokens that the first group has"
    )
    parser.add_argument("--short", type=int, default=512, help="tokens of each sequence of the second")
    parser.add_argument("--copies", type=int, default=1024, help="MiB for copies")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--steps", type=int, default=30, help="of each mode")
    parser.add_argument("--group", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--memory", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.group is not None:
        group(args)
        return 0
    return run("tools.helping_bench", argv, GROUPS, GroupMemory.bytes_for(options(args, 0)), "--group")


if __name__ == "__main__":
    sys.exit(main())
