"""x @ weight.T of each head by itself."""

import torch
from torch import Tensor

from penstock.nn import triton
from penstock.nn.head_weight import HeadWeight
from penstock.nn.native import SUFFIX, function, missing
from penstock.nn.ops.backends import Backend, Op


def head_linear(x: Tensor, weight: HeadWeight, out: Tensor) -> None:
    """[rows, heads, ins] x [heads, outs, ins] -> `out`, [rows, heads, outs] in x's dtype, dimensions together.

    The kernels (native/gemm.cpp, triton/latent.py) compute the same bits for a row however many there are.
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


def _triton(x: Tensor, weight: HeadWeight, out: Tensor) -> None:
    if weight.packed or (x.is_cpu and x.dtype == torch.bfloat16):  # of which the interpreter makes no products
        _reference(x, weight, out)
        return
    from penstock.nn.triton.latent import head_linear as kernel

    kernel(x, weight.memory, out)


OP = Op(
    "head_linear",
    Backend("native", _native, frozenset({"cpu"}), missing),
    Backend("triton", _triton, triton.DEVICES, triton.missing),
    Backend("reference", _reference),
)
