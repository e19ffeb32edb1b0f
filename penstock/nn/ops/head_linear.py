"""x @ weight.T of each head by itself."""

import torch
from torch import Tensor

from penstock.nn.head_weight import HeadWeight
from penstock.nn.native import SUFFIX, function, missing
from penstock.nn.ops.backends import Backend, Op


def head_linear(x: Tensor, weight: HeadWeight, out: Tensor) -> None:
    """[rows, heads, ins] x [heads, outs, ins] -> `out`, [rows, heads, outs] in x's dtype, dimensions together.

    The kernel (native/gemm.cpp) computes the same bits for a row however many there are.
    """
    OP[x.device.type](x, weight, out)


def _reference(x: Tensor, weight: HeadWeight, out: Tensor) -> None:
    out.copy_(torch.einsum("rhi,hoi->rho", x, weight.dense()))


def _native(x: Tensor, weight: HeadWeight, out: Tensor) -> None:
    if not weight.packed:
        _reference(x, weight, out)
        return
    assert x.dtype == out.dtype == weight.memory.dtype
    assert x.shape[2] == weight.shape[2]
    assert out.shape == (x.shape[0], *weight.shape[:2])
    assert x.stride(2) == out.stride(2) == 1
    function(f"penstock_head_linear_{SUFFIX[x.dtype]}", "pnnnpnnnpnn")(
        weight.memory.data_ptr(),
        *weight.shape,
        x.data_ptr(),
        x.stride(0),
        x.stride(1),
        len(x),
        out.data_ptr(),
        out.stride(0),
        out.stride(1),
    )


OP = Op("head_linear", Backend("native", _native, frozenset({"cpu"}), missing), Backend("reference", _reference))
