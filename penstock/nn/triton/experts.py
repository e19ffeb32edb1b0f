"""Products of experts with the rows that chose them, and the sums of what they make.

Rows lie sorted by experts. A program finds its expert by where each one's rows begin, on the device: how many rows each
has, the host need not know. A row's sums go through the inputs from the first to the last, whatever is in its tile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.nn.triton import power_of_two

ROWS = 64  # of a tile, of one expert's rows
OUTS, INS = 128, 64
OPTIONS = {"num_warps": 4, "num_stages": 4}
COMBINED = 1024  # values of a row that a program sums up


@triton.jit(do_not_specialize=("top_k",))
def expert_kernel(
    x,
    weight,
    offsets,
    pairs,
    bounds,
    out,
    x_stride,
    experts,
    outs,
    ins,
    top_k,
    GATHER: tl.constexpr,
    ALIGNED: tl.constexpr,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTS: tl.constexpr,
    INS: tl.constexpr,
):
    """Some outputs of a tile of one expert's rows a program.

    Args:
        weight, offsets: an expert's weight [outs, ins] is so many values behind the first one's.
        GATHER: a pair's row is that of x which it names, else it is its own.
    """
    tile = tl.program_id(1)
    e = tl.arange(0, EXPERTS)
    begins = tl.load(bounds + e, mask=e < experts, other=0).to(tl.int32)
    ends = tl.load(bounds + e + 1, mask=e < experts, other=0).to(tl.int32)
    tiles = (ends - begins + ROWS - 1) // ROWS
    expert = tl.sum((tl.cumsum(tiles, 0) <= tile).to(tl.int32), 0)
    if expert >= experts:
        return
    before = tl.sum(tl.where(e < expert, tiles, 0), 0)
    first_row = tl.load(bounds + expert).to(tl.int32) + (tile - before) * ROWS
    row = first_row + tl.arange(0, ROWS)
    column = tl.program_id(0) * OUTS + tl.arange(0, OUTS)
    i = tl.arange(0, INS)
    row_there, column_there = row < tl.load(bounds + expert + 1).to(tl.int32), column < outs
    source = row.to(tl.int64)
    if GATHER:
        source = tl.load(pairs + row, mask=row_there, other=0) // top_k
    offset = tl.load(offsets + expert)
    if ALIGNED:
        offset = tl.multiple_of(offset, 16)
    x_place = x + source[:, None] * x_stride + i[None, :]
    weight_place = weight + offset + column.to(tl.int64)[None, :] * ins + i[:, None]
    sums = tl.zeros((ROWS, OUTS), tl.float32)
    for first in range(0, ins, INS):
        there = first + i < ins
        left = tl.load(x_place + first, mask=row_there[:, None] & there[None, :], other=0.0)
        right = tl.load(weight_place + first, mask=column_there[None, :] & there[:, None], other=0.0)
        sums = tl.dot(left, right, sums, input_precision="ieee")
    place = out + row.to(tl.int64)[:, None] * outs + column[None, :]
    tl.store(place, sums.to(out.dtype.element_ty), mask=row_there[:, None] & column_there[None, :])


def product(
    x: Tensor, pairs: Tensor | None, bounds: Tensor, top_k: int, weight: Tensor, offsets: Tensor, outs: int, count: int
) -> Tensor:
    """[rows, ins] -> [count, outs] of the pairs that `bounds` divides among experts.

    Args:
        pairs: as of `ops.group_experts`; None where x has the pairs' rows.
        weight: the first expert's [outs, ins], more outputs than are wanted perhaps; the others by `offsets`, [experts]
            int64, in values.
    """
    out = torch.empty(count, outs, dtype=x.dtype, device=x.device)
    experts, ins = len(offsets), weight.shape[1]
    if count == 0:
        return out
    x = x if x.stride(1) == 1 else x.contiguous()
    tiles = count // ROWS + min(count, experts)
    expert_kernel[(triton.cdiv(outs, OUTS), tiles)](
        x,
        weight,
        offsets,
        bounds if pairs is None else pairs,
        bounds,
        out,
        x.stride(0),
        experts,
        outs,
        ins,
        top_k,
        pairs is not None,
        weight.numel() % 16 == 0,
        max(2, power_of_two(experts)),
        ROWS,
        OUTS,
        INS,
        **OPTIONS,
    )
    return out


@triton.jit(do_not_specialize=("top_k",))
def combine_kernel(made, places, weights, out, stride, width, top_k, BLOCK: tl.constexpr):
    """Some of a row's values a program: one expert after the other."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    total = tl.zeros((BLOCK,), tl.float32)
    for i in range(top_k):
        place = tl.load(places + row * top_k + i)
        weight = tl.load(weights + row * top_k + i)
        total += weight * tl.load(made + place * stride + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + column, total.to(out.dtype.element_ty), mask=inside)


def combine(made: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    """As the op, of pairs whose values lie together."""
    rows, width = len(places), made.shape[1]
    out = torch.empty(rows, width, dtype=made.dtype, device=made.device)
    if rows:
        combine_kernel[(rows, triton.cdiv(width, COMBINED))](
            made, places, weights, out, made.stride(0), width, places.shape[1], COMBINED
        )
    return out
