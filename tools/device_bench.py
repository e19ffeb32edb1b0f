"""Benchmark the engine on a device, in this process, on random weights of real geometry; prints a short table.

usage: python tools/device_bench.py [--device cuda] [--geometry qwen3-0.6b] [--quantization int8] [--seconds 240]
Needs only what the engine needs, and transformers to write the weights.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from penstock import LLM, SamplingParams
from penstock.bench.offline import measure_throughput
from penstock.core.clock import SystemClock
from tools.make_checkpoint import GEOMETRIES, write

Row = tuple[str, float, str]


def prompts(count: int, length: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(10, 4000) for _ in range(length)] for _ in range(count)]


def measure(llm: LLM, deadline: float) -> list[Row]:
    """Rows of (what, value, unit); stops early when the deadline, in `time.monotonic` seconds, has passed."""
    clock = SystemClock()

    def run(count: int, length: int, new: int, seed: int) -> float:
        params = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True)
        return measure_throughput(llm, prompts(count, length, seed), params, clock).duration_s

    run(4, 64, 4, seed=0)
    rows: list[Row] = []
    long = min(4096, llm.max_model_len // 2)
    rows.append((f"prefill, 1 prompt of {long}", long / run(1, long, 1, seed=1), "tokens/s"))
    rows.append((f"prefill, 8 prompts of {long // 4}", 2 * long / run(8, long // 4, 1, seed=2), "tokens/s"))
    for batch in (1, 16, 64):
        if time.monotonic() > deadline:
            break
        # two lengths of the same prompts, so that the prefill falls out
        new = 64
        seconds = run(batch, 128, new + 1, seed=3 + batch) - run(batch, 128, 1, seed=200 + batch)
        rows.append((f"decode, {batch} at once, context 128 to {128 + new}", batch * new / seconds, "tokens/s"))
    rows.append(("requests whose tokens change in company", float(changed_by_company(llm)), "of 8"))
    return rows


def changed_by_company(llm: LLM) -> int:
    """How many of eight greedy requests get other tokens beside 24 others than alone."""
    params = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)
    mine, others = prompts(8, 100, seed=9), prompts(24, 150, seed=10)
    alone = [llm.generate([p], params)[0].outputs[0].token_ids for p in mine]
    together = [o.outputs[0].token_ids for o in llm.generate(mine + others, params)[:8]]
    return sum(a != b for a, b in zip(alone, together, strict=True))


def main() -> int:
    parser = argparse.ArgumentParser(description="benchmark the engine on a device")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--geometry", choices=GEOMETRIES, default="qwen3-0.6b")
    parser.add_argument("--quantization", help="as `penstock serve` has it")
    parser.add_argument("--seconds", type=float, default=240.0, help="about how long it may take")
    options = parser.parse_args()
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        write(options.geometry, Path(folder), options.device)
        written = time.monotonic()
        # without prefix cache, so that alone and together compute the same rows
        more = {} if options.quantization is None else {"quantization": options.quantization}
        llm = LLM(folder, device=options.device, max_model_len=8192, prefix_cache=False, **more)
        rows: list[Row] = [
            ("start: load, measure, size", time.monotonic() - written, "s"),
            ("token budget per step", float(llm.engine.scheduler.limits.token_budget), "tokens"),
            ("KV blocks", float(llm.engine.scheduler.pool.num_blocks), "of 64 tokens"),
        ]
        rows += measure(llm, begin + options.seconds)
    print(f"\n{options.geometry}, {options.quantization or 'bfloat16'}, {options.device}")
    for what, value, unit in rows:
        print(f"  {what:<48} {value:>12,.1f} {unit}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
