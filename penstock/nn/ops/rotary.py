"""Rotary position embedding, in the half-split layout of the Hugging Face checkpoints."""

import torch
from torch import Tensor

from penstock.nn.native import computable, function, is_bf16, missing
from penstock.nn.ops.backends import Backend, Op


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs (i, i + dim/2) of every head.

    Args:
        x: [rows, heads, dim].
        cos, sin: [rows, dim / 2], in x's dtype.
    """
    return OP[x.device.type](x, cos, sin)


def reference(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def _native(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    if not computable(x, cos, sin):
        return reference(x, cos, sin)
    if x.stride(2) != 1:
        x = x.contiguous()
    cos, sin = cos.contiguous(), sin.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype)
    function("penstock_rotary", "npnnpppnnn")(
        is_bf16(x),
        x.data_ptr(),
        x.stride(0),
        x.stride(1),
        cos.data_ptr(),
        sin.data_ptr(),
        out.data_ptr(),
        *x.shape,
    )
    return out


OP = Op("rotary", Backend("native", _native, frozenset({"cpu"}), missing), Backend("reference", reference))
