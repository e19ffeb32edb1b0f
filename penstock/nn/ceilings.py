"""What a CPU can do at most with an instruction set, and how near kernels come to it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.core.mappings import prefer_large
from penstock.core.plan import BLOCK_TOKENS, SequenceStep
from penstock.core.sampling import SamplingParams
from penstock.nn import native, ops
from penstock.nn.batch import Batch
from penstock.nn.kv import LayerKV
from penstock.nn.packed import PackedWeight

MEMORY_READ = 256 << 20  # bytes, more than any cache
MULTIPLIED = 400_000  # times in a row: a few ms, as long as kernels take here
ROWS = (1, 16, 256)  # of the product with a weight
OUTS, MANY_OUTS, INS = 3072, 65536, 1024  # what one row is multiplied with is larger than caches
PROMPT = 512
DECODES, CONTEXT = 16, 2048
HEADS, KV_HEADS, DIM = 16, 8, 128


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Of all threads that kernels run on.

    Attributes:
        bandwidth: bytes that are read in a second.
        flops: multiplications and additions in a second, of bfloat16 as kernels compute with it, without memory.
        float32: the same of float32.
    """

    bandwidth: float
    flops: float
    float32: float


@dataclass(frozen=True, slots=True)
class Speed:
    """Of a kernel, of bfloat16; what it moves and computes in a second."""

    name: str
    bytes: float
    flops: float


def measure_ceilings(seconds: float) -> Ceilings:
    """The best of what is found in so many seconds for each value."""
    memory = _ones((MEMORY_READ,), torch.uint8)
    bandwidth = MEMORY_READ / _best(lambda: native.read(memory), seconds)

    def flops(dtype: torch.dtype) -> float:
        return native.multiply(MULTIPLIED, dtype) / _best(lambda: native.multiply(MULTIPLIED, dtype), seconds)

    return Ceilings(bandwidth, flops(torch.bfloat16), flops(torch.float32))


def measure_kernels(seconds: float) -> list[Speed]:
    """On a model of 0.6B parameters' shapes, the best of what is found in so many seconds for each kernel."""
    found = []
    for rows in ROWS:
        outs = MANY_OUTS if rows == 1 else OUTS
        weight, x = PackedWeight.of(torch.ones(outs, INS, dtype=torch.bfloat16)), torch.ones(rows, INS).bfloat16()
        best = _best(lambda weight=weight, x=x: ops.packed_linear(x, weight), seconds)  # type: ignore[misc]
        moved = weight.memory.nbytes + 2 * rows * (outs + INS)
        found.append(Speed(f"product of {rows} row{'s' * (rows > 1)}", moved / best, 2 * rows * outs * INS / best))
    for name, spans in (
        (f"attention of a prompt of {PROMPT}", [(0, PROMPT)]),
        (f"attention of {DECODES} decodes over {CONTEXT}", [(CONTEXT - 1, 1)] * DECODES),
    ):
        best, moved, computed = _attention(spans, seconds)
        found.append(Speed(name, moved / best, computed / best))
    return found


def _attention(spans: list[tuple[int, int]], seconds: float) -> tuple[float, int, float]:
    """(seconds, bytes of K and V, operations) of sequences of (start, rows)."""
    steps, blocks = [], 0
    for i, (start, rows) in enumerate(spans):
        count = -(-(start + rows) // BLOCK_TOKENS)
        where = range(blocks, blocks + count)
        steps.append(SequenceStep(str(i), start, [0] * rows, where, 1, SamplingParams(), 0))
        blocks += count
    batch, rows = Batch(steps, torch.device("cpu")), sum(rows for _, rows in spans)
    cache = LayerKV(_ones((blocks, 2, KV_HEADS, BLOCK_TOKENS, DIM), torch.bfloat16))
    q = torch.ones(rows, HEADS, DIM, dtype=torch.bfloat16)
    best = _best(lambda: ops.attention(q, cache, batch, DIM**-0.5, None), seconds)
    pairs = sum(rows * start + rows * (rows + 1) / 2 for start, rows in spans)  # of a row and what it sees
    return best, cache.values.nbytes, 4 * HEADS * DIM * pairs


def _ones(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """In large pages, as weights and KV are."""
    memory = torch.empty(shape, dtype=dtype)
    prefer_large(memory.data_ptr(), memory.nbytes)
    return memory.fill_(1)


def _best(run: Callable[[], object], seconds: float) -> float:
    """Seconds of the fastest run; the first one warms up."""
    run()
    best, end = float("inf"), time.perf_counter() + seconds
    while True:
        began = time.perf_counter()
        run()
        now = time.perf_counter()
        best = min(best, now - began)
        if now > end:
            return best
