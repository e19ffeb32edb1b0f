"""What the KV memory costs: mapping, decode steps in either address mode and order, and what of it is wasted.

usage: python tools/kv_memory.py map [--block-kib 128 7168]
       python tools/kv_memory.py steps MODEL [--contexts 128 1024 4096] [--batches 1 8 32] [--threads 2]
       python tools/kv_memory.py run MODEL [--requests 200] [--max-model-len 4096]

MODEL is "demo" or a checkpoint folder. Variants take turns, and medians are printed, since machines are shared.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from penstock.core.clock import SystemClock
from penstock.core.plan import BLOCK_TOKENS, SequenceStep, StepPlan
from penstock.core.request import Request
from penstock.core.sampling import SamplingParams
from penstock.engine.arena import Arena
from penstock.engine.build import Built, EngineOptions, build_engine
from penstock.engine.cache import ContiguousCache, KVCache, make_layout
from penstock.engine.runner import Runner
from penstock.nn.loader import load_model
from penstock.nn.models.decoder import Decoder
from penstock.sched.local.sequence import blocks_for
from penstock.service.checkpoint import find_checkpoint
from penstock.transfer.memory import PoolMemory

VARIANTS = [(mode, order) for mode in ("table", "contiguous") for order in ("block", "token")]
GREEDY = SamplingParams(temperature=0.0)


def medians(actions: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Seconds of each, in turns."""
    times: dict[str, list[float]] = {name: [] for name in actions}
    for _ in range(rounds):
        for name, action in actions.items():
            start = time.perf_counter()
            action()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


# --- what one mapping costs


def measure_map(block_bytes: int, blocks: int) -> dict[str, float]:
    """Microseconds a block, by what is done with it."""
    memory = PoolMemory.memfd(blocks, block_bytes)
    arena = Arena(memory, 3 * blocks)
    scattered = random.Random(0).sample(range(blocks), blocks)
    work = {
        "populate, the block's first use": lambda i, b: arena.map(blocks + i, b),
        "populate, a block used before": lambda i, b: arena.map(2 * blocks + i, b),
        "map only": lambda i, b: arena.map(3 * blocks + i, b, populate=False),
        "first write after map only": lambda i, b: arena.clear(3 * blocks + i),
        "write to a populated block": lambda i, b: arena.clear(3 * blocks + i),
        "remap to another block, populate": lambda i, b: arena.map(3 * blocks + i, blocks - 1 - b),
        "unmap": lambda i, b: arena.unmap(3 * blocks + i),
    }
    found = {}
    for name, action in work.items():
        times = []
        for i, block in enumerate(scattered):
            start = time.perf_counter()
            action(i, block)
            times.append(time.perf_counter() - start)
        found[name] = statistics.median(times) * 1e6
    memory.close()
    return found


def print_map(sizes_kib: Sequence[int]) -> None:
    columns = [measure_map(kib << 10, max(16, min(512, (256 << 10) // kib))) for kib in sizes_kib]
    print("| us a block | " + " | ".join(f"{kib} KiB" for kib in sizes_kib) + " |")
    print("|---|" + "---:|" * len(sizes_kib))
    for name in columns[0]:
        print(f"| {name} | " + " | ".join(f"{column[name]:.0f}" for column in columns) + " |")


# --- what a step costs


def open_cache(model: Decoder, mode: str, order: str, blocks: int, sequences: int, length: int) -> KVCache:
    layout = make_layout(model.config, model.dtype, order, "")
    memory = PoolMemory.memfd(blocks, layout.block_bytes)
    if mode == "table":
        cache = KVCache.over_pool(layout, memory)
    else:
        cache = ContiguousCache(layout, memory, max_sequences=sequences, range_blocks=blocks_for(length))
    memory.close()
    for block in cache.blocks:
        block.normal_()
    return cache


def decode_plan(context: int, batch: int, scattered: Sequence[int]) -> StepPlan:
    """Every sequence's last token, its context on scattered blocks."""
    count = blocks_for(context)
    steps = (
        SequenceStep(str(i), context - 1, [5], tuple(scattered[i * count : (i + 1) * count]), True, GREEDY, 0)
        for i in range(batch)
    )
    return StepPlan(tuple(steps))


def print_steps(model: Decoder, contexts: Sequence[int], batches: Sequence[int], rounds: int) -> None:
    print("| context | sequences | " + " | ".join(f"{mode}, {order}" for mode, order in VARIANTS) + " |")
    print("|---:|---:|" + "---:|" * len(VARIANTS))
    for context in contexts:
        for batch in batches:
            blocks = batch * blocks_for(context)
            scattered = random.Random(0).sample(range(blocks), blocks)
            plan = decode_plan(context, batch, scattered)
            actions: dict[str, Callable[[], object]] = {}
            for mode, order in VARIANTS:
                runner = Runner(model, open_cache(model, mode, order, blocks, batch, context))
                actions[f"{mode}, {order}"] = partial(runner.run, plan)
            medians(actions, 1)  # the first steps also pay for one-time work
            found = medians(actions, rounds)
            base = found["table, block"]
            cells = [f"{t * 1e3:.2f} ms ({t / base:.2f})" for t in found.values()]
            print(f"| {context} | {batch} | " + " | ".join(cells) + " |", flush=True)


# --- a whole run


def make_requests(count: int, longest: int, vocab: int) -> list[Request]:
    """Half of them after one of four shared prefixes; lengths are log-normal, as conversations are."""
    rng = random.Random(0)
    prefixes = [[rng.randrange(1, vocab) for _ in range(rng.randrange(100, 400))] for _ in range(4)]
    requests = []
    for i in range(count):
        prompt = list(prefixes[i // 2 % 4]) if i % 2 else []
        prompt += [rng.randrange(1, vocab) for _ in range(min(longest // 3, int(rng.lognormvariate(5, 0.8)) + 1))]
        tokens = min(longest // 3, int(rng.lognormvariate(4.3, 0.8)) + 1)
        requests.append(
            Request(id=str(i), prompt=prompt, params=GREEDY, seed=i, stop_ids=frozenset(), max_tokens=tokens)
        )
    return requests


def run(built: Built, requests: Sequence[Request], max_model_len: int) -> dict[str, float]:
    """Until all are done. Memory is compared with what is computed, step by step; what sequences share counts once."""
    engine, cache = built.engine, built.runner.cache
    scheduler = engine.scheduler
    for request in requests:
        engine.add(request)
    start, steps, seconds = time.perf_counter(), 0, []
    needed = paged = preallocated = 0
    while engine.has_work:
        began = time.perf_counter()
        engine.step()
        seconds.append(time.perf_counter() - began)
        steps += 1
        running = [s for r in requests if (s := scheduler.sequence(r.id)) is not None and s.blocks]
        needed += _tokens_held(running)
        paged += scheduler.pool.used * BLOCK_TOKENS
        preallocated += len(running) * max_model_len
        cache.check()
    found = {
        "seconds": time.perf_counter() - start,
        "steps": steps,
        "step, median ms": statistics.median(seconds) * 1e3,
        "tokens needed, mean": needed / steps,
        "wasted by paging, %": 100 * (1 - needed / paged),
        "wasted by preallocation, %": 100 * (1 - needed / preallocated),
    }
    if isinstance(cache, ContiguousCache):
        c = cache.counters
        found |= {
            "slots mapped": c.mapped,
            "of them ahead, %": 100 * c.ahead / c.mapped,
            "slots unmapped": c.unmapped,
            "system calls": c.calls,
            "exposed, us a step": c.exposed / steps * 1e6,
            "hidden, us a step": c.hidden / steps * 1e6,
        }
    return found


def _tokens_held(running: Sequence) -> int:
    """Computed tokens of all sequences; those in a block that several hold count once."""
    filled: dict[int, int] = {}
    for s in running:
        for i, block in enumerate(s.blocks):
            filled[block] = max(filled.get(block, 0), min(BLOCK_TOKENS, s.computed - i * BLOCK_TOKENS))
    return sum(max(0, tokens) for tokens in filled.values())


def print_run(model: str, count: int, max_model_len: int, rounds: int) -> None:
    found: dict[str, list[dict[str, float]]] = {}
    for _ in range(rounds):
        for mode, order in VARIANTS:
            options = EngineOptions(
                model=str(find_checkpoint(model)),
                max_model_len=max_model_len,
                max_num_seqs=32,
                max_num_batched_tokens=512,
                kv_cache_memory=1 << 30,
                kv_address_mode=mode,
                kv_layout=order,
            )
            built = build_engine(options, SystemClock())
            requests = make_requests(count, max_model_len, built.runner.vocab_size)
            found.setdefault(f"{mode}, {order}", []).append(run(built, requests, max_model_len))
            built.close()
    print("| | " + " | ".join(found) + " |")
    print("|---|" + "---:|" * len(found))
    for name in found["contiguous, block"][0]:
        cells = [
            f"{statistics.median(r[name] for r in runs):.1f}" if name in runs[0] else "" for runs in found.values()
        ]
        print(f"| {name} | " + " | ".join(cells) + " |")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    commands = parser.add_subparsers(dest="command", required=True)
    mapping = commands.add_parser("map")
    mapping.add_argument("--block-kib", type=int, nargs="+", default=[128, 7168])
    steps = commands.add_parser("steps")
    steps.add_argument("model")
    steps.add_argument("--contexts", type=int, nargs="+", default=[128, 1024, 4096])
    steps.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    steps.add_argument("--dtype", default=None)
    whole = commands.add_parser("run")
    whole.add_argument("model")
    whole.add_argument("--requests", type=int, default=200)
    whole.add_argument("--max-model-len", type=int, default=4096)
    for command, rounds in ((steps, 15), (whole, 3)):
        command.add_argument("--threads", type=int, default=2)
        command.add_argument("--rounds", type=int, default=rounds)
    options = parser.parse_args()
    if options.command == "map":
        print_map(options.block_kib)
        return 0
    torch.set_num_threads(options.threads)
    if options.command == "steps":
        dtype = getattr(torch, options.dtype) if options.dtype else None
        model = load_model(Path(find_checkpoint(options.model)), torch.device("cpu"), dtype)
        print_steps(model, options.contexts, options.batches, options.rounds)
    else:
        print_run(options.model, options.requests, options.max_model_len, options.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
