"""Root-mean-square norm, alone and after adding a residual."""

from torch import Tensor

from penstock.nn.native import missing
from penstock.nn.ops.backends import Backend, Op
from penstock.nn.ops.rms_norm import native, reference

OP = Op(
    "rms_norm",
    Backend("native", native.rms_norm, frozenset({"cpu"}), missing),
    Backend("reference", reference.rms_norm),
)
ADD_OP = Op(
    "add_rms_norm",
    Backend("native", native.add_rms_norm, frozenset({"cpu"}), missing),
    Backend("reference", reference.add_rms_norm),
)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, the mean in float32; x's shape and dtype."""
    return OP.on(x.device.type)(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual), the sum rounded to x's dtype before it is normed."""
    return ADD_OP.on(x.device.type)(x, residual, weight, eps)
