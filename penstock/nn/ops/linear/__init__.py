"""x @ weight.T + bias."""

from torch import Tensor

from penstock.nn.ops.backends import Backend, Op
from penstock.nn.ops.linear import reference

OP = Op("linear", Backend("reference", reference.linear))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """[rows, in] x [out, in] -> [rows, out], in x's dtype."""
    return OP.on(x.device.type)(x, weight, bias)
