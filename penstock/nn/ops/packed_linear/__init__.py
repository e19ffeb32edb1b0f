"""x @ weight.T + bias, and rows of a weight, from weights that are packed."""

import torch
from torch import Tensor

from penstock.nn.native import missing
from penstock.nn.ops.backends import Backend, Op
from penstock.nn.ops.packed_linear import native, reference
from penstock.nn.packed import PackedWeight

CPU = frozenset({"cpu"})
OP = Op(
    "packed_linear",
    Backend("native", native.packed_linear, CPU, missing),
    Backend("reference", reference.packed_linear),
)
ROWS_OP = Op(
    "packed_rows",
    Backend("native", native.packed_rows, CPU, missing),
    Backend("reference", reference.packed_rows),
)


def packed_linear(
    x: Tensor, weight: PackedWeight, bias: Tensor | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """[rows, in] x [out, in] -> [rows, out].

    Args:
        x, bias: of the weight's dtype.
        dtype: of the result, the weight's or float32; None is the weight's.
    """
    return OP.on(x.device.type)(x, weight, bias, dtype or x.dtype)


def packed_rows(weight: PackedWeight, index: Tensor) -> Tensor:
    """weight[index], index [rows] int64 -> [rows, in]."""
    return ROWS_OP.on(index.device.type)(weight, index)
