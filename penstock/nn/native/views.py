"""Tensors as kernels are told of them: pointers and strides."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

DTYPES = (torch.bfloat16, torch.float32)  # that the kernels compute with


class Cache(ctypes.Structure):
    """`penstock::Cache` (attention.h)."""

    _fields_ = (
        ("base", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("block", "layer", "kind", "head", "token", "kv_heads", "dim", "is_bf16")),
    )


def of_layer(cache: Tensor) -> Cache:
    """One layer, [blocks, 2, kv_heads, BLOCK_TOKENS, dim]."""
    block, kind, head, token, element = cache.stride()
    assert element == 1, cache.stride()
    return Cache(cache.data_ptr(), block, 0, kind, head, token, cache.shape[2], cache.shape[4], is_bf16(cache))


def is_bf16(x: Tensor) -> bool:
    return x.dtype == torch.bfloat16


def computable(*tensors: Tensor) -> bool:
    """Whether kernels compute with what these tensors hold; otherwise it is for plain torch."""
    return all(x.dtype == tensors[0].dtype for x in tensors) and tensors[0].dtype in DTYPES


def dense_rows(x: Tensor) -> Tensor:
    """[rows, ...] with everything of a row together, a copy only where it is not."""
    together = 1
    for size, stride in zip(reversed(x.shape[1:]), reversed(x.stride()[1:]), strict=True):
        if size > 1 and stride != together:
            return x.contiguous()
        together *= size
    return x
