"""What is computed of each row by itself: norms, the gate, the largest logit."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.nn.triton import power_of_two

ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}
GATE_BLOCK = 1024
ARGMAX_BLOCK = 4096


@triton.jit
def norm_kernel(
    x,
    residual,
    weight,
    out,
    total,
    x_stride,
    residual_stride,
    width,
    eps,
    ADD: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row a program. WIDE: weights are float32, and what is normed is rounded only after them."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    values = tl.load(x + row * x_stride + column, mask=inside, other=0.0)
    if ADD:
        more = tl.load(residual + row * residual_stride + column, mask=inside, other=0.0)
        values = (values.to(tl.float32) + more.to(tl.float32)).to(values.dtype)
        tl.store(total + row * width + column, values, mask=inside)
    wide = values.to(tl.float32)
    normed = wide * tl.rsqrt(tl.sum(wide * wide, 0) / width + eps)
    factors = tl.load(weight + column, mask=inside, other=0.0)
    if not WIDE:
        normed = normed.to(values.dtype).to(tl.float32)
    tl.store(out + row * width + column, (normed * factors.to(tl.float32)).to(values.dtype), mask=inside)


def _warps(block: int) -> int:
    return max(1, min(16, block // 512))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    width = x.shape[-1]
    rows = x.reshape(-1, width)
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    out = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
    block = power_of_two(width)
    wide = weight.dtype != x.dtype
    norm_kernel[(len(rows),)](
        rows, rows, weight, out, out, rows.stride(0), 0, width, eps, False, wide, block, num_warps=_warps(block)
    )
    return out.view(x.shape)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Of [rows, width] twice, whose rows are dense."""
    width = x.shape[-1]
    out, total = torch.empty(x.shape, dtype=x.dtype, device=x.device), torch.empty_like(x)
    block = power_of_two(width)
    strides = x.stride(0), residual.stride(0)
    wide = weight.dtype != x.dtype
    norm_kernel[(len(x),)](
        x, residual, weight, out, total, *strides, width, eps, True, wide, block, num_warps=_warps(block)
    )
    return out, total


@triton.jit
def gate_kernel(gate_up, out, stride, width, GELU: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(gate_up + row * stride + column, mask=inside, other=0.0)
    up = tl.load(gate_up + row * stride + width + column, mask=inside, other=0.0)
    x = gate.to(tl.float32)
    if GELU:
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        # tanh(y) = 2 sigmoid(2 y) - 1
        active = x / (1.0 + tl.exp(-2.0 * inner))
    else:
        active = x / (1.0 + tl.exp(-x))
    active = active.to(gate.dtype).to(tl.float32)
    tl.store(out + row * width + column, (active * up.to(tl.float32)).to(gate.dtype), mask=inside)


def gate_mul(gate_up: Tensor, activation: str) -> Tensor:
    """Of [rows, 2 * width], whose rows are dense."""
    rows, width = len(gate_up), gate_up.shape[1] // 2
    out = torch.empty(rows, width, dtype=gate_up.dtype, device=gate_up.device)
    grid = (rows, triton.cdiv(width, GATE_BLOCK))
    gate_kernel[grid](gate_up, out, gate_up.stride(0), width, activation == "gelu_tanh", GATE_BLOCK)
    return out


@triton.jit
def argmax_kernel(logits, tokens, finite, stride, vocab, BLOCK: tl.constexpr):
    """One row a program: each of BLOCK lanes has the first largest of every BLOCK-th entry."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    best = tl.full((BLOCK,), -float("inf"), tl.float32)
    where = lane
    wrong = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, vocab, BLOCK):
        column = first + lane
        values = tl.load(logits + row * stride + column, mask=column < vocab, other=-float("inf"))
        whole = (tl.abs(values) < float("inf")) | (column >= vocab)
        wrong = tl.where(whole, wrong, 1)
        where = tl.where(values > best, column, where)
        best = tl.maximum(best, values)
    largest = tl.max(best, 0)
    tl.store(tokens + row, tl.min(tl.where(best == largest, where, vocab - 1), 0).to(tl.int64))
    tl.store(finite + row, tl.max(wrong, 0) == 0)


def argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Of [rows, vocab] float32, whose rows are dense."""
    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    finite = torch.empty(len(logits), dtype=torch.bool, device=logits.device)
    argmax_kernel[(len(logits),)](logits, tokens, finite, logits.stride(0), logits.shape[1], ARGMAX_BLOCK, num_warps=8)
    return tokens, finite
