"""x @ weight.T + bias from dense and from packed weights, and rows of packed ones.

The kernel (native/gemm.cpp) computes the same bits for a row however many there are, and on any number of threads.
"""

import torch
from torch import Tensor
from torch.nn import functional

from penstock.nn import alike
from penstock.nn.native import SUFFIX, function, missing
from penstock.nn.ops.backends import Backend, Op
from penstock.nn.packed import PackedWeight


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """[rows, in] x [out, in] -> [rows, out], in x's dtype."""
    return OP[x.device.type](x, weight, bias)


def packed_linear(
    x: Tensor, weight: PackedWeight, bias: Tensor | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """[rows, in] x [out, in] -> [rows, out].

    Args:
        x, bias: of the weight's dtype.
        dtype: of the result, the weight's or float32; None is the weight's.
    """
    return PACKED_OP[x.device.type](x, weight, bias, dtype or x.dtype)


def packed_rows(weight: PackedWeight, index: Tensor) -> Tensor:
    """weight[index], index [rows] int64 -> [rows, in]."""
    return ROWS_OP[index.device.type](weight, index)


def _reference(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return functional.linear(x, weight, bias)


def _packed_reference(x: Tensor, weight: PackedWeight, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    return functional.linear(x, weight.unpacked(), bias).to(dtype)


def _rows_reference(weight: PackedWeight, index: Tensor) -> Tensor:
    return weight.unpacked()[index]


def _packed_native(x: Tensor, weight: PackedWeight, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    assert x.dtype == weight.memory.dtype
    assert dtype in (x.dtype, torch.float32)
    if x.stride(-1) != 1:
        x = x.contiguous()
    outs, ins = weight.shape
    out = x.new_empty(len(x), outs, dtype=dtype)
    name = f"penstock_linear_{SUFFIX[x.dtype]}" + ("_wide" if dtype != x.dtype else "")
    function(name, "pnnpnnppn")(
        weight.memory.data_ptr(),
        outs,
        ins,
        x.data_ptr(),
        x.stride(0),
        len(x),
        None if bias is None else bias.data_ptr(),
        out.data_ptr(),
        outs,
    )
    return out


def _rows_native(weight: PackedWeight, index: Tensor) -> Tensor:
    outs, ins = weight.shape
    index = index.contiguous()
    out = index.new_empty(len(index), ins, dtype=weight.dtype)
    gather = function(f"penstock_gather_{SUFFIX[weight.dtype]}", "pnnpnp")
    gather(weight.memory.data_ptr(), outs, ins, index.data_ptr(), len(index), out.data_ptr())
    return out


CPU = frozenset({"cpu"})
OP = Op("linear", Backend("alike", alike.linear, frozenset({"cuda"})), Backend("reference", _reference))
PACKED_OP = Op(
    "packed_linear", Backend("native", _packed_native, CPU, missing), Backend("reference", _packed_reference)
)
ROWS_OP = Op("packed_rows", Backend("native", _rows_native, CPU, missing), Backend("reference", _rows_reference))
