"""Noise that is a pure function of (seed, position, token), so that a draw can be repeated anywhere."""

from torch import Tensor

from penstock.nn.ops.backends import Backend, Op
from penstock.nn.ops.gumbel import reference
from penstock.nn.ops.gumbel.counter import row_key

OP = Op("gumbel_noise", Backend("reference", reference.gumbel_noise))

__all__ = ["gumbel_noise", "row_key"]


def gumbel_noise(keys: Tensor, tokens: Tensor) -> Tensor:
    """Standard Gumbel noise: argmax(logits + noise) is a draw from softmax(logits).

    Args:
        keys: [rows] int64, `row_key(seed, position)` of each.
        tokens: [rows or 1, candidates] int64 token ids.

    Returns:
        [rows, candidates] float32.
    """
    return OP.on(keys.device.type)(keys, tokens)
