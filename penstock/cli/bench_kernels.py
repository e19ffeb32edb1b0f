"""`penstock bench kernels`: where a step's time goes, op by op, beside what the machine can do."""

from __future__ import annotations

import argparse
import os
from statistics import median
from typing import TYPE_CHECKING, Any

from penstock.cli.options import add_flag, integer
from penstock.core.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from penstock.engine.breakdown import Breakdown

MULTIPLIED = 2_000_000  # so many times in a row: tens of ms, in which a core comes down from what it can for a moment
MOST = 65536


def add_parser(kinds: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = kinds.add_parser(
        "kernels", allow_abbrev=False, help="time every op of a step beside the ceilings of this machine"
    )
    parser.add_argument("--model", default="demo", help="a Hugging Face folder, a hub name, or demo")
    parser.add_argument("--dtype")
    parser.add_argument("--quantization", default="auto", help="how weights are held: int8, int4, ..., or as they come")
    parser.add_argument("--kv-cache-dtype", default="auto", help="data type of KV: int8, fp8 or auto")
    parser.add_argument(
        "--isa",
        default=os.environ.get("PENSTOCK_ISA"),
        help="instruction set whose kernels are used, such as avx2 (default: PENSTOCK_ISA, or the best one)",
    )
    add_flag(parser, "decode", integer(1, MOST), nargs="*", default=[1, 16, 64], help="sequences of a decode step")
    add_flag(parser, "context", integer(1, MOST), default=128, help="tokens that each of them has")
    add_flag(parser, "prefill", integer(2, MOST), nargs="*", default=[512], help="tokens of a prompt")
    add_flag(parser, "steps", integer(1, MOST), default=12, help="of each kind, of which medians are taken")
    add_flag(parser, "threads", integer(1, MOST), help="default: as many as torch takes")
    return parser


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measures, shows, and returns what is written with --json."""
    import torch
    from rich.console import Console

    from penstock.core.clock import SystemClock
    from penstock.engine.breakdown import StepShape, break_down
    from penstock.engine.build import EngineOptions, build_engine
    from penstock.nn import native
    from penstock.service.checkpoint import find_checkpoint

    if args.isa is not None:
        native.use(args.isa)
    if args.threads is not None:
        torch.set_num_threads(args.threads)
        native.set_threads(args.threads)
    shapes = [StepShape(f"decode {count}", count, args.context) for count in args.decode]
    shapes += [StepShape(f"prefill {tokens}", 1, 0, tokens) for tokens in args.prefill]
    if not shapes:
        raise ConfigError("--decode, --prefill: nothing to measure, at least one is needed", "decode")
    longest = max(shape.context + shape.tokens for shape in shapes) + 4 * args.steps + 8
    clock, console = SystemClock(), Console()
    built = build_engine(
        EngineOptions(
            model=str(find_checkpoint(args.model)),
            dtype=args.dtype,
            quantization=args.quantization,
            kv_cache_dtype=args.kv_cache_dtype,
            max_model_len=longest,
            max_num_seqs=max(shape.sequences for shape in shapes),
            max_num_batched_tokens=max(512, *(shape.sequences * shape.tokens for shape in shapes)),
            prefix_cache=False,
            scheduling_policy="fcfs",
            async_scheduling=False,
        ),
        clock,
    )
    try:
        if (reserve := built.runner.cache.prefaulter) is not None:
            reserve.settle()  # it would take a core from what is measured
        ceilings = _ceilings(built.runner.model.dtype)
        found = []
        for shape in shapes:
            with console.status(f"{shape.name}: {2 * args.steps} steps"):
                found.append(break_down(built, shape, clock, steps=args.steps))
            _show(console, found[-1], ceilings)
    finally:
        built.close()
    return {"ceilings": ceilings, "kernels": {b.shape.name: _document(b) for b in found}}


def _document(found: Breakdown) -> dict[str, Any]:
    import msgspec

    times = {"step_ms": 1e3 * found.step, "op_by_op_ms": 1e3 * found.apart}
    groups = {name: 1e3 * seconds for name, seconds in found.groups().items()}
    return {**times, "groups_ms": groups, "ops": msgspec.to_builtins(found.ops)}


def _ceilings(dtype: torch.dtype) -> dict[str, float]:
    """GB/s of memory reads, and GFLOP/s of multiplications without memory; empty where there are no kernels."""
    import time

    import torch

    from penstock.nn import native
    from penstock.nn.ceilings import MEMORY_READ

    if native.missing() is not None or dtype not in native.DTYPES:
        return {}
    memory = torch.ones(MEMORY_READ, dtype=torch.uint8)
    reads, multiplications = [], []
    for _ in range(12):
        began = time.perf_counter()
        native.read(memory)
        middle = time.perf_counter()
        operations = native.multiply(MULTIPLIED, dtype)
        reads.append(MEMORY_READ / (middle - began) / 1e9)
        multiplications.append(operations / (time.perf_counter() - middle) / 1e9)
    return {"read_gb_per_s": median(reads), "gflop_per_s": median(multiplications)}


def _show(console: Console, found: Breakdown, ceilings: dict[str, float]) -> None:
    from rich.table import Table

    read, peak = ceilings.get("read_gb_per_s"), ceilings.get("gflop_per_s")
    table = Table(
        title=f"{found.shape.name}: {1e3 * found.step:.2f} ms, op by op {1e3 * found.apart:.2f} ms",
        caption=f"memory reads {read:.1f} GB/s, peak {peak:.0f} GFLOP/s" if read and peak else None,
    )
    table.add_column("op", no_wrap=True)
    for name in ("calls", "ms", "share", "GB/s", "of reads", "GFLOP/s", "of peak"):
        table.add_column(name, justify="right")
    for name, time in sorted(found.ops.items(), key=lambda item: -item[1].seconds):
        moved, computed = time.bytes / time.seconds / 1e9, time.flops / time.seconds / 1e9
        table.add_row(
            name,
            str(time.calls),
            f"{1e3 * time.seconds:.3f}",
            f"{time.seconds / found.apart:.1%}",
            f"{moved:.1f}",
            f"{moved / read:.0%}" if read else "",
            f"{computed:.0f}" if time.flops else "",
            f"{computed / peak:.0%}" if time.flops and peak else "",
        )
    groups = found.groups()
    for name in ("scheduling", "around them"):
        if seconds := groups.get(name):
            table.add_row(name, "", f"{1e3 * seconds:.3f}", f"{seconds / found.apart:.1%}", *[""] * 4, style="dim")
    console.print(table)
