"""Products on a CUDA device whose rows get the same bits however many there are.

cuBLAS chooses a kernel by the shape, and kernels differ in the order in which they sum: most go through the inputs from
the first to the last, and some cut them in parts (split K). Here products have only a few numbers of rows, to which
others are padded, and each number is compared to the bit with the first when it is first needed. One that differs is
not used for that weight's shape.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn import functional

BASE = 128  # rows that all others are compared with
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
CHECKED_BYTES = 1 << 30  # of a result, at most: with more, rows are computed in several products


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """As the op of nn/ops/linear.py."""
    usable = _sizes(x.dtype, x.device, weight.shape, bias is not None)
    rows = len(x)
    if rows in usable.known:
        return functional.linear(x, weight, bias)
    parts = []
    done = 0
    while done < rows or not parts:
        size = usable.size_for(rows - done, weight, bias)
        part = x[done : done + size]
        missing = size - len(part)
        if missing:
            part = functional.pad(part, (0, 0, 0, missing))
        result = functional.linear(part, weight, bias)
        parts.append(result[: size - missing] if missing else result)
        done += size
    return parts[0] if len(parts) == 1 else torch.cat(parts)


class Sizes:
    """Numbers of rows for one shape of weights.

    Attributes:
        known: those that give the bits of BASE.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device, ins: int, outs: int) -> None:
        generator = torch.Generator().manual_seed(ins)
        self._rows = torch.randn(BASE, ins, generator=generator).to(device, dtype)
        most = CHECKED_BYTES // (outs * dtype.itemsize)
        self._left = [size for size in SIZES if size != BASE and size <= max(most, BASE)]
        self.known = {BASE}

    def size_for(self, rows: int, weight: Tensor, bias: Tensor | None) -> int:
        """The least that holds so many rows, or the largest."""
        for size in SIZES:
            if size >= rows and self._is_alike(size, weight, bias):
                return size
        return next(size for size in reversed(SIZES) if self._is_alike(size, weight, bias))

    def _is_alike(self, size: int, weight: Tensor, bias: Tensor | None) -> bool:
        if size in self._left:
            self._left.remove(size)
            rows = self._rows
            expected = functional.linear(rows, weight, bias)
            if size < BASE:
                # at the first place and at the last
                pairs = [(rows[:size], expected[:size]), (rows[BASE - size :], expected[BASE - size :])]
            else:
                pairs = [(rows.repeat(size // BASE, 1), expected.repeat(size // BASE, 1))]
            if all(torch.equal(functional.linear(x, weight, bias), y) for x, y in pairs):
                self.known.add(size)
        return size in self.known


@functools.cache
def _sizes(dtype: torch.dtype, device: torch.device, shape: torch.Size, biased: bool) -> Sizes:
    _fix_order()
    return Sizes(dtype, device, shape[1], shape[0])


@functools.cache
def _fix_order() -> None:
    """Have inputs not cut in parts where that can be asked for: then kernels for all numbers of rows agree."""
    matmul = torch.backends.cuda.matmul
    try:
        torch.backends.cuda.preferred_blas_library("cublaslt")
        matmul.allow_bf16_reduced_precision_reduction = (False, False)
        matmul.allow_fp16_reduced_precision_reduction = (False, False)
    except (RuntimeError, TypeError):  # an older PyTorch
        matmul.allow_bf16_reduced_precision_reduction = False
        matmul.allow_fp16_reduced_precision_reduction = False
