"""The kernels as operators of torch's own, for code that torch traces or compiles.

    import penstock.nn.ops.library
    torch.ops.penstock.silu_mul(gate_up)

Each computes what the op of its name in this package does. The engine does not come this way: torch's dispatch costs
more time than the smaller of them take.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.nn import ops
from penstock.nn.packed import PackedWeight


@torch.library.custom_op("penstock::packed_linear", mutates_args=(), device_types="cpu")
def packed_linear(x: Tensor, lines: Tensor, outs: int, bias: Tensor | None = None, wide: bool = False) -> Tensor:
    """
    Args:
        lines: a `PackedWeight`'s memory.
        outs: its rows.
        wide: the result is float32.
    """
    weight = PackedWeight.over(lines, outs, x.shape[1])
    return ops.packed_linear(x, weight, bias, torch.float32 if wide else x.dtype)


@packed_linear.register_fake
def _(x: Tensor, lines: Tensor, outs: int, bias: Tensor | None = None, wide: bool = False) -> Tensor:
    return x.new_empty(len(x), outs, dtype=torch.float32 if wide else x.dtype)


@torch.library.custom_op("penstock::rms_norm", mutates_args=(), device_types="cpu")
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return ops.rms_norm(x, weight, eps)


@rms_norm.register_fake
def _(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("penstock::add_rms_norm", mutates_args=(), device_types="cpu")
def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return ops.add_rms_norm(x, residual, weight, eps)


@add_rms_norm.register_fake
def _(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape)


@torch.library.custom_op("penstock::rotary", mutates_args=(), device_types="cpu")
def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return ops.rotary(x, cos, sin)


@rotary.register_fake
def _(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("penstock::silu_mul", mutates_args=(), device_types="cpu")
def silu_mul(gate_up: Tensor) -> Tensor:
    return ops.silu_mul(gate_up)


@silu_mul.register_fake
def _(gate_up: Tensor) -> Tensor:
    return gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)


@torch.library.custom_op("penstock::argmax", mutates_args=(), device_types="cpu")
def argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    return ops.argmax(logits)


@argmax.register_fake
def _(logits: Tensor) -> tuple[Tensor, Tensor]:
    rows = len(logits)
    return logits.new_empty(rows, dtype=torch.int64), logits.new_empty(rows, dtype=torch.bool)
