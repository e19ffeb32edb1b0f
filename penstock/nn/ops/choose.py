"""Tokens from the last projection's input, for rows of which few tokens matter (nn/bounded_logits.py)."""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.nn.bounded_logits import BoundedLogits, missing
from penstock.nn.native import SUFFIX, function
from penstock.nn.ops.backends import Backend, Op
from penstock.nn.ops.linear import packed_linear
from penstock.nn.ops.sample import Draw, argmax, rows_of, sample
from penstock.nn.packed import PackedWeight

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
    return OP[x.device.type](x, weight, bounded, draws)


def _reference(x: Tensor, weight: PackedWeight, bounded: BoundedLogits, draws: Sequence[Draw]) -> Tensor:
    logits = packed_linear(x, weight, dtype=torch.float32)
    return torch.where(argmax(logits)[1], sample(logits, draws), -1)


def _native(x: Tensor, weight: PackedWeight, bounded: BoundedLogits, draws: Sequence[Draw]) -> Tensor:
    assert x.dtype == weight.memory.dtype
    assert all(draw.temperature == 0 or draw.top_k > 0 for draw in draws)
    if x.stride(-1) != 1:
        x = x.contiguous()
    tokens = torch.empty(len(x), dtype=torch.int64)
    rows = rows_of(draws)
    function(f"penstock_choose_{SUFFIX[x.dtype]}", "pnnpppnnpp")(
        weight.memory.data_ptr(),
        *weight.shape,
        bounded.codes.memory.data_ptr(),
        bounded.bounds.data_ptr(),
        x.data_ptr(),
        x.stride(0),
        len(x),
        ctypes.addressof(rows),
        tokens.data_ptr(),
    )
    return tokens


OP = Op("choose", Backend("native", _native, frozenset({"cpu"}), missing), Backend("reference", _reference))
