"""x @ weight.T + bias from weights in few bits, and rows of them.

The reference multiplies with the dense weight in x's dtype: a backend keeps to it up to rounding, and up to what it
says of its inputs.
"""

import torch
from torch import Tensor
from torch.nn import functional

from penstock.nn.ops.backends import Backend, Op
from penstock.nn.quantised import QuantisedWeight


def quantised_linear(
    x: Tensor, weight: QuantisedWeight, bias: Tensor | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """[rows, in] x [out, in] -> [rows, out].

    Args:
        x, bias: of the weight's dtype.
        dtype: of the result, the weight's or float32; None is the weight's.
    """
    return OP[x.device.type](x, weight, bias, dtype or x.dtype)


def quantised_rows(weight: QuantisedWeight, index: Tensor) -> Tensor:
    """weight[index], index [rows] int64 -> [rows, in] of the weight's dtype."""
    return ROWS_OP[index.device.type](weight, index)


def _reference(x: Tensor, weight: QuantisedWeight, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    if weight.order is not None:
        x = x[:, weight.order]
    return functional.linear(x, weight.columns(), bias).to(dtype)


def _rows_reference(weight: QuantisedWeight, index: Tensor) -> Tensor:
    rows = weight.columns(index)
    if weight.order is None:
        return rows
    ordered = torch.empty_like(rows)
    ordered[:, weight.order.long()] = rows
    return ordered


OP = Op("quantised_linear", Backend("reference", _reference))
ROWS_OP = Op("quantised_rows", Backend("reference", _rows_reference))
