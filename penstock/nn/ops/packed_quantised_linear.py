"""x @ weight.T + bias from packed weights in few bits, and rows of them.

Whole codes are multiplied with whole numbers: what is in a row is rounded to 8 bits, with a scale for each run of
inputs.
Results are the same bits for a row however many there are, and on any number of threads.
"""

import torch
from torch import Tensor
from torch.nn import functional

from penstock.nn.native import SUFFIX, function, missing
from penstock.nn.ops.backends import Backend, Op
from penstock.nn.packed_quantised import PackedQuantisedWeight


def packed_quantised_linear(
    x: Tensor, weight: PackedQuantisedWeight, bias: Tensor | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """[rows, in] x [out, in] -> [rows, out].

    Args:
        x, bias: of the weight's dtype.
        dtype: of the result, the weight's or float32; None is the weight's.
    """
    return OP[x.device.type](x, weight, bias, dtype or x.dtype)


def packed_quantised_rows(weight: PackedQuantisedWeight, index: Tensor) -> Tensor:
    """weight[index], index [rows] int64 -> [rows, in] of the weight's dtype."""
    return ROWS_OP[index.device.type](weight, index)


def _reference(x: Tensor, weight: PackedQuantisedWeight, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    bias = None if bias is None else bias.float()
    return functional.linear(weight.rounded(x), weight.unpacked(torch.float32), bias).to(dtype)


def _rows_reference(weight: PackedQuantisedWeight, index: Tensor) -> Tensor:
    return weight.unpacked()[index]


def _native(x: Tensor, weight: PackedQuantisedWeight, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    assert x.dtype == weight.dtype
    assert dtype in (x.dtype, torch.float32)
    if x.stride(-1) != 1:
        x = x.contiguous()
    rows, outs = x.shape[0], weight.shape[0]
    out = torch.empty(rows, outs, dtype=dtype)
    name = f"penstock_quantised_linear_{SUFFIX[x.dtype]}" + ("_wide" if dtype != x.dtype else "")
    function(name, "ppnnppn")(
        weight.view(),
        x.data_ptr(),
        x.stride(0),
        rows,
        None if bias is None else bias.data_ptr(),
        out.data_ptr(),
        outs,
    )
    return out


def _rows_native(weight: PackedQuantisedWeight, index: Tensor) -> Tensor:
    return weight.rows(index)


CPU = frozenset({"cpu"})
OP = Op("packed_quantised_linear", Backend("native", _native, CPU, missing), Backend("reference", _reference))
ROWS_OP = Op(
    "packed_quantised_rows", Backend("native", _rows_native, CPU, missing), Backend("reference", _rows_reference)
)
