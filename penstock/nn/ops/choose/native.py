"""`native/bounded_logits.cpp`: bounds of all logits, and those that can matter are computed. To the bit."""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.nn.bounded_logits import BoundedLogits
from penstock.nn.native import SUFFIX, function
from penstock.nn.ops.sample.draw import Draw
from penstock.nn.ops.sample.native import rows_of
from penstock.nn.packed import PackedWeight


def choose(x: Tensor, weight: PackedWeight, bounded: BoundedLogits, draws: Sequence[Draw]) -> Tensor:
    assert x.dtype == weight.dtype
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
