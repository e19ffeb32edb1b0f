"""`native/sketch.cpp`: the sketch has bounds of all logits, and those that can matter are computed. To the bit."""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.nn.native import SUFFIX, function
from penstock.nn.ops.sample.draw import Draw
from penstock.nn.ops.sample.native import rows_of
from penstock.nn.packed import PackedWeight
from penstock.nn.sketch import Sketch


def choose(x: Tensor, weight: PackedWeight, sketch: Sketch, draws: Sequence[Draw]) -> Tensor:
    assert x.dtype == weight.dtype
    assert all(draw.temperature == 0 or draw.top_k > 0 for draw in draws)
    if x.stride(-1) != 1:
        x = x.contiguous()
    tokens = torch.empty(len(x), dtype=torch.int64)
    rows = rows_of(draws)
    function(f"penstock_choose_{SUFFIX[x.dtype]}", "pnnpppnnpp")(
        weight.memory.data_ptr(),
        *weight.shape,
        sketch.codes.memory.data_ptr(),
        sketch.bounds.data_ptr(),
        x.data_ptr(),
        x.stride(0),
        len(x),
        ctypes.addressof(rows),
        tokens.data_ptr(),
    )
    return tokens
