"""x @ weight.T + bias from weights in few bits, and rows of them.

The reference multiplies with the dense weight in x's dtype: a backend keeps to it up to rounding, and up to what it
says of its inputs.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from penstock.nn.native import DTYPES, missing
from penstock.nn.ops.backends import Backend, Op
from penstock.nn.ops.linear import CPU, packed_linear
from penstock.nn.packed import LANES, PackedWeight
from penstock.nn.quantised import QuantisedWeight

AT_ONCE = 1 << 22  # numbers of a dense weight


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
    return _by_parts(functional.linear, x, weight, bias, dtype)


def _packed(x: Tensor, weight: QuantisedWeight, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The dense weight multiplied by a kernel that computes the same bits for a row however many there are."""
    if x.dtype not in DTYPES:
        return _reference(x, weight, bias, dtype)
    return _by_parts(lambda x, part, bias: packed_linear(x, PackedWeight.of(part), bias, dtype), x, weight, bias, dtype)


def _by_parts(
    multiply: Callable[[Tensor, Tensor, Tensor | None], Tensor],
    x: Tensor,
    weight: QuantisedWeight,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Of some outputs after the other, so that not all of the dense weight takes memory."""
    if weight.order is not None:
        x = x[:, weight.order]
    outs, ins = weight.shape
    out = x.new_empty(len(x), outs, dtype=dtype)
    step = max(LANES, AT_ONCE // ins // LANES * LANES)
    for first in range(0, outs, step):
        own = slice(first, first + step)
        out[:, own] = multiply(x, weight.columns(own), None if bias is None else bias[own])
    return out


def _rows_reference(weight: QuantisedWeight, index: Tensor) -> Tensor:
    rows = weight.columns(index)
    if weight.order is None:
        return rows
    ordered = torch.empty_like(rows)
    ordered[:, weight.order.long()] = rows
    return ordered


OP = Op("quantised_linear", Backend("packed", _packed, CPU, missing), Backend("reference", _reference))
ROWS_OP = Op("quantised_rows", Backend("reference", _rows_reference))
