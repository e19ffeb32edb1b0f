"""x @ weight.T + bias of few rows: as many programs as it takes to read weights at the speed of memory."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 64  # of a program: the least that a Hopper device multiplies at once
INS = 128  # at a time
OPTIONS = {"num_warps": 4, "num_stages": 4}


@triton.jit
def linear_kernel(
    x,
    weight,
    bias,
    out,
    x_stride,
    rows,
    outs,
    ins,
    BIASED: tl.constexpr,
    ROWS: tl.constexpr,
    OUTS: tl.constexpr,
    INS: tl.constexpr,
):
    """Some outputs of some rows a program, which goes through the inputs from the first to the last."""
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) * OUTS + tl.arange(0, OUTS)
    i = tl.arange(0, INS)
    row_there, column_there = row < rows, column < outs
    x_place = x + row.to(tl.int64)[:, None] * x_stride + i[None, :]
    weight_place = weight + column.to(tl.int64)[None, :] * ins + i[:, None]
    sums = tl.zeros((ROWS, OUTS), tl.float32)
    for first in range(0, ins, INS):
        there = first + i < ins
        left = tl.load(x_place + first, mask=row_there[:, None] & there[None, :], other=0.0)
        right = tl.load(weight_place + first, mask=column_there[None, :] & there[:, None], other=0.0)
        sums = tl.dot(left, right, sums)
    if BIASED:
        sums += tl.load(bias + column, mask=column_there, other=0.0).to(tl.float32)[None, :]
    place = out + row.to(tl.int64)[:, None] * outs + column[None, :]
    tl.store(place, sums.to(out.dtype.element_ty), mask=row_there[:, None] & column_there[None, :])


def outs_of(outs: int) -> int:
    """Outputs of a program."""
    return 16 if outs <= 4096 else 64


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Of [rows, ins] with dense rows, and a dense weight."""
    rows, (outs, ins) = len(x), weight.shape
    out = torch.empty(rows, outs, dtype=x.dtype, device=x.device)
    x = x if x.stride(1) == 1 else x.contiguous()
    width = outs_of(outs)
    grid = (triton.cdiv(outs, width), triton.cdiv(rows, ROWS))
    linear_kernel[grid](
        x,
        weight,
        weight if bias is None else bias,
        out,
        x.stride(0),
        rows,
        outs,
        ins,
        bias is not None,
        ROWS,
        width,
        INS,
        **OPTIONS,
    )
    return out
