"""Rotary position embedding, in the half-split layout of the Hugging Face checkpoints."""

from torch import Tensor

from penstock.nn.native import missing
from penstock.nn.ops.backends import Backend, Op
from penstock.nn.ops.rotary import native, reference

OP = Op(
    "rotary",
    Backend("native", native.rotary, frozenset({"cpu"}), missing),
    Backend("reference", reference.rotary),
)


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs (i, i + dim/2) of every head.

    Args:
        x: [rows, heads, dim].
        cos, sin: [rows, dim / 2], in x's dtype.
    """
    return OP.on(x.device.type)(x, cos, sin)
