"""Tokens from the last projection's input, for rows of which few tokens matter."""

from collections.abc import Sequence

from torch import Tensor

from penstock.nn.ops.backends import Backend, Op
from penstock.nn.ops.choose import native, reference
from penstock.nn.ops.sample.draw import Draw
from penstock.nn.packed import PackedWeight
from penstock.nn.sketch import Sketch, missing

OP = Op(
    "choose",
    Backend("native", native.choose, frozenset({"cpu"}), missing),
    Backend("reference", reference.choose),
)


def choose(x: Tensor, weight: PackedWeight, sketch: Sketch, draws: Sequence[Draw]) -> Tensor:
    """[rows, in] -> [rows] int64, what `argmax` or `sample` take from the logits x @ weight.T in float32.

    Args:
        x: of the weight's dtype.
        sketch: of the weight.
        draws: greedy, or with a top_k.

    Returns: the tokens; -1 where a row or its logits are not finite, and where its numbers are too large for a sketch.
    """
    return OP.on(x.device.type)(x, weight, sketch, draws)
