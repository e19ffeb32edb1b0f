"""What choosing tokens by a sketch of the last projection takes, beside computing all of its logits.

    python tools/choose_bench.py [--vocab 151936] [--hidden 1024] [--rows 1 4 8 16 32] [--outliers 30]

Both take turns. Weights are noise; with outliers a few numbers of every row are so many times larger than the others.
"""

from __future__ import annotations

import argparse
import time
from statistics import median

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from penstock.nn import ops
from penstock.nn.packed import PackedWeight
from penstock.nn.sketch import Sketch, missing

GREEDY = ops.Draw(0.0, 1.0, 0.0, 0, 0)
KINDS = {"greedy": GREEDY, "top_k 20": ops.Draw(0.6, 0.95, 0.0, 20, 1234)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 8, 16, 32])
    parser.add_argument("--outliers", type=float, default=1.0)
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    if (reason := missing()) is not None:
        parser.exit(1, f"there are no sketches here: {reason}\n")
    torch.manual_seed(0)
    weight = PackedWeight.of((torch.randn(args.vocab, args.hidden) * 0.02).bfloat16())
    began = time.perf_counter()
    sketch = Sketch.of(weight)
    assert sketch is not None
    table = Table(title=f"ms; the sketch itself took {1e3 * (time.perf_counter() - began):.0f}")
    for column in ("rows", "drawn", "by the sketch", "all logits", "ratio"):
        table.add_column(column, justify="right")
    for rows in args.rows:
        x = torch.randn(rows, args.hidden).bfloat16()
        x[:, :: args.hidden // 8] *= args.outliers
        for kind, draw in KINDS.items():
            ours, theirs = measured(x, weight, sketch, [draw] * rows, args.repeats)
            table.add_row(str(rows), kind, f"{1e3 * ours:.2f}", f"{1e3 * theirs:.2f}", f"{theirs / ours:.2f}")
    Console().print(table)


def measured(
    x: Tensor, weight: PackedWeight, sketch: Sketch, draws: list[ops.Draw], repeats: int
) -> tuple[float, float]:
    """Median seconds by the sketch, and with all logits."""
    ours, theirs = [], []
    for _ in range(repeats):
        began = time.perf_counter()
        chosen = ops.choose(x, weight, sketch, draws)
        middle = time.perf_counter()
        logits = ops.packed_linear(x, weight, dtype=torch.float32)
        tokens, _ = ops.argmax(logits)
        if draws[0] is not GREEDY:
            tokens = ops.sample(logits, draws)
        ours.append(middle - began)
        theirs.append(time.perf_counter() - middle)
        assert torch.equal(chosen, tokens)
    return median(ours), median(theirs)


if __name__ == "__main__":
    main()
