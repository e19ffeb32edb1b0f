"""Rotary position embedding, in the half-split layout of the Hugging Face checkpoints."""

import torch
from torch import Tensor

from penstock.nn.native import computable, function, is_bf16, missing
from penstock.nn.ops.backends import Backend, Op


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs (i, i + turned / 2) of every head's first `turned` dimensions; the others stay as they are.

    Args:
        x: [rows, heads, dim].
        cos, sin: [rows, turned / 2], in x's dtype.
    """
    return OP[x.device.type](x, cos, sin)


def reference(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[1]
    first, second, rest = x.split((half, half, x.shape[2] - 2 * half), dim=-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


def _native(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    if not computable(x, cos, sin):
        return reference(x, cos, sin)
    if x.stride(2) != 1:
        x = x.contiguous()
    cos, sin = cos.contiguous(), sin.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype)
    function("penstock_rotary", "npnnppnpnnn")(
        is_bf16(x),
        x.data_ptr(),
        x.stride(0),
        x.stride(1),
        cos.data_ptr(),
        sin.data_ptr(),
        2 * sin.shape[1],
        out.data_ptr(),
        *x.shape,
    )
    return out


OP = Op("rotary", Backend("native", _native, frozenset({"cpu"}), missing), Backend("reference", reference))
