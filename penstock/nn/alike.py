"""Products on a CUDA device whose rows get the same bits however many there are.

cuBLAS chooses a kernel by the shape, and kernels differ in the order in which they sum: most go through the inputs from
the first to the last, and some cut them in parts (split K). Here products have only a few numbers of rows, to which
others are padded, and how each is computed is compared to the bit with the first when it is first needed. What differs
is not used for weights of that shape. Where there are few rows a kernel of our own (triton/linear.py) is a second
candidate: for some shapes cuBLAS has no fast kernel that does not cut. Of those that agree the fastest is taken.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from penstock.nn import triton

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]

BASE = 128  # rows that all others are compared with
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
CHECKED_BYTES = 1 << 30  # of a result, at most: with more, rows are computed in several products
REPEATS = 20  # of a product that is timed
PAUSE = 4_000_000  # cycles in which a device waits while these are launched


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """As the op of nn/ops/linear.py."""
    products = _products(x.dtype, x.device, weight.shape, bias is not None)
    rows = len(x)
    if (product := products.known.get(rows)) is not None:
        return product(x, weight, bias)
    parts: list[Tensor] = []
    done = 0
    while done < rows or not parts:
        size = products.size_for(rows - done, weight, bias)
        part = x[done : done + size]
        missing = size - len(part)
        if missing:
            part = functional.pad(part, (0, 0, 0, missing))
        result = products.known[size](part, weight, bias)
        parts.append(result[: size - missing] if missing else result)
        done += size
    return parts[0] if len(parts) == 1 else torch.cat(parts)


class Products:
    """How products with weights of one shape are computed.

    Attributes:
        known: number of rows -> what computes so many, with the bits that cuBLAS gives BASE of them.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device, ins: int, outs: int) -> None:
        generator = torch.Generator().manual_seed(ins)
        self._rows = torch.randn(BASE, ins, generator=generator).to(device, dtype)
        most = CHECKED_BYTES // (outs * dtype.itemsize)
        self._left = {size for size in SIZES if size <= max(most, BASE)}
        self.known: dict[int, Product] = {}

    def size_for(self, rows: int, weight: Tensor, bias: Tensor | None) -> int:
        """The least that holds so many rows, or the largest."""
        for size in SIZES:
            if size >= rows and self._can(size, weight, bias):
                return size
        return next(size for size in reversed(SIZES) if self._can(size, weight, bias))

    def _can(self, size: int, weight: Tensor, bias: Tensor | None) -> bool:
        if size in self._left:
            self._left.remove(size)
            alike = [one for one in self._candidates(size) if self._is_alike(one, size, weight, bias)]
            if alike:
                x = self._some(size)
                self.known[size] = min(alike, key=lambda one: _seconds(one, x, weight, bias) if len(alike) > 1 else 0)
        return size in self.known

    def _candidates(self, size: int) -> list[Product]:
        if size > BASE or self._rows.dtype.itemsize != 2 or triton.missing() is not None or self._rows.is_cpu:
            return [_cublas]
        from penstock.nn.triton.linear import linear as few_rows

        return [_cublas, few_rows]

    def _some(self, size: int) -> Tensor:
        return self._rows[:size] if size < BASE else self._rows.repeat(size // BASE, 1)

    def _is_alike(self, product: Product, size: int, weight: Tensor, bias: Tensor | None) -> bool:
        expected = _cublas(self._rows, weight, bias)
        if size >= BASE:
            return torch.equal(product(self._some(size), weight, bias), expected.repeat(size // BASE, 1))
        last = BASE - size
        return torch.equal(product(self._rows[:size], weight, bias), expected[:size]) and torch.equal(
            product(self._rows[last:], weight, bias), expected[last:]
        )


def _cublas(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return functional.linear(x, weight, bias)


def _seconds(product: Product, x: Tensor, weight: Tensor, bias: Tensor | None) -> float:
    """That a device computes, however long launching takes."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    product(x, weight, bias)
    torch.cuda._sleep(PAUSE)
    begin.record()
    for _ in range(REPEATS):
        product(x, weight, bias)
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


@functools.cache
def _products(dtype: torch.dtype, device: torch.device, shape: torch.Size, biased: bool) -> Products:
    _fix_order()
    return Products(dtype, device, shape[1], shape[0])


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
