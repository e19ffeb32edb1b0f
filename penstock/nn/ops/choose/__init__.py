"""Tokens from the last projection's input, for rows of which few tokens matter."""

from collections.abc import Sequence

from torch import Tensor

from penstock.nn.bounded_logits import BoundedLogits, missing
from penstock.nn.ops.backends import Backend, Op
from penstock.nn.ops.choose import native, reference
from penstock.nn.ops.sample.draw import Draw
from penstock.nn.packed import PackedWeight

OP = Op(
    "choose",
    Backend("native", native.choose, frozenset({"cpu"}), missing),
    Backend("reference", reference.choose),
)

MOST_TOP_K = 64
MOST_ROWS = 32  # with more of them, multiplying takes as long as it does for all logits
ROWS_OF_TOP_K = 5  # that one with a top_k counts for: many more of its logits are computed


def choose_pays(draws: Sequence[Draw]) -> bool:
    """Whether choosing is faster than all logits: few tokens matter for each row, and there are not many rows."""
    if not all(draw.temperature == 0 or 0 < draw.top_k <= MOST_TOP_K for draw in draws):
        return False
    return sum(1 if draw.temperature == 0 else ROWS_OF_TOP_K for draw in draws) <= MOST_ROWS


def choose(x: Tensor, weight: PackedWeight, bounded: BoundedLogits, draws: Sequence[Draw]) -> Tensor:
    """[rows, in] -> [rows] int64, what `argmax` or `sample` take from the logits x @ weight.T in float32.

    Args:
        x: of the weight's dtype.
        bounded: bounds for the weight's outputs.
        draws: greedy, or with a top_k.

    Returns: the tokens; -1 where a row or its logits are not finite, and where its numbers are too large to bound.
    """
    return OP.on(x.device.type)(x, weight, bounded, draws)
