"""The gate of a gated MLP."""

from torch import Tensor

from penstock.nn.native import missing
from penstock.nn.ops.backends import Backend, Op
from penstock.nn.ops.silu_mul import native, reference

OP = Op(
    "silu_mul",
    Backend("native", native.silu_mul, frozenset({"cpu"}), missing),
    Backend("reference", reference.silu_mul),
)


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of [rows, 2 * width], gate in the first half -> [rows, width]."""
    return OP.on(gate_up.device.type)(gate_up)
