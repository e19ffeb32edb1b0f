"""Without an order of the whole vocabulary (native/sample.cpp): candidates above a threshold, weights in buckets."""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.nn.native import function
from penstock.nn.ops.sample.draw import Draw


class _Draw(ctypes.Structure):
    """`penstock::Draw` (sample.h)."""

    _fields_ = (
        *((name, ctypes.c_double) for name in ("temperature", "top_p", "min_p")),
        *((name, ctypes.c_int64) for name in ("top_k", "key")),
    )


def rows_of(draws: Sequence[Draw]) -> ctypes.Array[_Draw]:
    return (_Draw * len(draws))(*[_Draw(*draw) for draw in draws])


def sample(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    assert logits.dtype == torch.float32
    logits = logits.contiguous()
    tokens = torch.empty(len(logits), dtype=torch.int64)
    rows = rows_of(draws)
    function("penstock_sample", "pnnpp")(logits.data_ptr(), *logits.shape, ctypes.addressof(rows), tokens.data_ptr())
    return tokens
