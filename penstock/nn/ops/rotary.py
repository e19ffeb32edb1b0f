"""Rotary position embedding, in the half-split layout of the Hugging Face checkpoints, and in DeepSeek's."""

import torch
from torch import Tensor

from penstock.nn.native import computable, function, is_bf16, missing
from penstock.nn.ops.backends import Backend, Op


def rotary(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, out: Tensor | None = None) -> Tensor:
    """Rotate pairs (i, i + turned / 2) of every head's first `turned` dimensions; the others stay as they are.

    Args:
        x: [rows, heads, dim].
        cos, sin: [rows, turned / 2], in x's dtype.
        interleaved: whether pairs come as (2 i, 2 i + 1); they are left as the others are.
        out: where the result is put, as x, dimensions together; None is new memory.
    """
    return OP[x.device.type](x, cos, sin, interleaved, out)


def reference(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, out: Tensor | None = None) -> Tensor:
    half = cos.shape[1]
    turned, rest = x[..., : 2 * half], x[..., 2 * half :]
    first, second = (turned[..., ::2], turned[..., 1::2]) if interleaved else turned.split(half, dim=-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    result = torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)
    return result if out is None else out.copy_(result)


def _native(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, out: Tensor | None = None) -> Tensor:
    if not computable(x, cos, sin):
        return reference(x, cos, sin, interleaved, out)
    if x.stride(2) != 1:
        x = x.contiguous()
    cos, sin = cos.contiguous(), sin.contiguous()
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype)
    assert out.stride(2) == 1
    assert out.dtype == x.dtype
    function("penstock_rotary", "npnnppnnpnnnnn")(
        is_bf16(x),
        x.data_ptr(),
        x.stride(0),
        x.stride(1),
        cos.data_ptr(),
        sin.data_ptr(),
        2 * sin.shape[1],
        interleaved,
        out.data_ptr(),
        out.stride(0),
        out.stride(1),
        *x.shape,
    )
    return out


OP = Op("rotary", Backend("native", _native, frozenset({"cpu"}), missing), Backend("reference", reference))
