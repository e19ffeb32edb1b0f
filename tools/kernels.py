"""Packed products of one geometry beside what the machine can do: PYTHONPATH=. python tools/kernels.py

Ceilings and kernels take turns, call by call, so that whatever else the machine does falls on both; of each the fastest
tenth counts, because others can only make a call slower.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch

from penstock.nn import native, ops
from penstock.nn.packed import PackedWeight

# of Qwen3-0.6B: (outs, ins); a step reads all in every one of 28 layers, and the head
SHAPES = {"qkv": (4096, 1024), "o": (1024, 2048), "gate_up": (6144, 1024), "down": (1024, 3072), "head": (151936, 1024)}
LAYERS = 28  # so that a weight is out of the caches before its turn comes again
READ = 32 << 20  # bytes at a time


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def fastest(times: list[float]) -> float:
    return statistics.mean(sorted(times)[: max(1, len(times) // 10)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 2, 4, 8, 16, 32, 128, 512])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    args = parser.parse_args()
    if args.threads:
        native.set_threads(args.threads)
    dtype = getattr(torch, args.dtype)
    count = {name: 1 if name == "head" else LAYERS for name in SHAPES}
    packed = {
        name: [PackedWeight.of(torch.randn(*SHAPES[name]).to(dtype)) for _ in range(count[name])] for name in SHAPES
    }
    memory = packed["head"][0].memory.view(torch.uint8)
    pieces = memory[: len(memory) // READ * READ].view(-1, READ)
    times: dict[object, list[float]] = {}

    def time_it(what: object, call: Callable[[], object]) -> None:
        times.setdefault(what, []).append(seconds(call))

    operations = native.multiply(100_000, dtype)
    for rows in args.rows:
        xs = {ins: torch.randn(rows, ins).to(dtype) for _, ins in SHAPES.values()}
        for turn in range(args.rounds * LAYERS):
            time_it("read", partial(native.read, pieces[turn % len(pieces)]))
            time_it("peak", partial(native.multiply, 100_000, dtype))
            for name, weights in packed.items():
                if name == "head" and (rows > 16 or turn % 8):
                    continue
                weight = weights[turn % len(weights)]
                x = xs[weight.shape[1]]
                time_it((rows, name), partial(ops.packed_linear, x, weight))
    read, peak = READ / fastest(times["read"]) / 1e9, operations / fastest(times["peak"]) / 1e9
    print(f"{native.threads()} threads, {args.dtype}: memory reads {read:.1f} GB/s, peak {peak:.0f} GFLOP/s")
    print("rows          " + "".join(f"{name:>22}" for name in SHAPES) + "  GB/s (of reads), GFLOP/s (of peak)")
    for rows in args.rows:
        line = f"{rows:5}         "
        for name, weights in packed.items():
            if (rows, name) in times:
                took, size = fastest(times[rows, name]), weights[0].memory.nbytes
                bandwidth, flops = size / took / 1e9, 2 * rows * size / dtype.itemsize / took / 1e9
                line += f"{bandwidth:6.1f} {bandwidth / read:4.0%} {flops:5.0f} {flops / peak:4.0%}"
            else:
                line += " " * 22
        print(line)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
