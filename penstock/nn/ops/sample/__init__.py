"""Logits to tokens: temperature, min_p, top_k, top_p, then the largest sum of logit and Gumbel noise."""

from collections.abc import Sequence

from torch import Tensor

from penstock.nn.native import missing
from penstock.nn.ops.backends import Backend, Op
from penstock.nn.ops.sample import native, reference
from penstock.nn.ops.sample.draw import Draw

OP = Op(
    "sample",
    Backend("native", native.sample, frozenset({"cpu"}), missing),
    Backend("reference", reference.sample),
)

__all__ = ["Draw", "sample"]


def sample(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """One token per row, [rows] int64, of [rows, vocab] float32. A row's token depends on nothing but that row."""
    return OP.on(logits.device.type)(logits, draws)
