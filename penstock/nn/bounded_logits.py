"""The last projection in 8 bits, beside its weights: where few tokens matter, it saves reading most of them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from penstock.nn import native
from penstock.nn.packed import LANES, PackedWeight

LEAST = 16 << 20  # bytes of weights; fewer stay in caches
Take = Callable[[Tensor], Tensor]  # one on "meta" -> memory for it


class BoundedLogits:
    """What `native/bounded_logits.h` has of a weight, which must not change afterwards.

    Attributes:
        weight: itself.
        codes: [outs, ins] whole numbers.
        bounds: [3, outs rounded up] float32: scales, what codes leave of a row, and how long it is.
    """

    def __init__(self, weight: PackedWeight, codes: Tensor, bounds: Tensor) -> None:
        outs, ins = weight.shape
        self.weight, self.bounds = weight, bounds
        self.codes = PackedWeight(outs, ins, torch.uint8, torch.device("meta"))
        assert codes.shape == self.codes.memory.shape
        self.codes.memory = nn.Parameter(codes, requires_grad=False)

    @staticmethod
    def like(weight: PackedWeight) -> tuple[Tensor, Tensor]:
        """What its codes and its bounds lie in, on "meta"."""
        outs, ins = weight.shape
        codes = PackedWeight(outs, ins, torch.uint8, torch.device("meta"))
        return codes.memory, torch.empty(3, codes.groups * LANES, device="meta")

    @classmethod
    def of(cls, weight: PackedWeight, take: Take | None = None) -> BoundedLogits | None:
        """None where it cannot be computed with, and of weights that are not finite.

        Args:
            take: one on "meta" -> memory for it.
        """
        outs, ins = weight.shape
        if not can_bound(ins):
            return None
        codes, bounds = map(take or _memory, cls.like(weight))
        bounded = cls(weight, codes, bounds.zero_())
        bounded.codes.prepare()
        build = native.value(f"penstock_bounded_logits_{native.SUFFIX[weight.dtype]}", "pnnpp")
        filled = build(weight.memory.data_ptr(), outs, ins, codes.data_ptr(), bounds.data_ptr())
        return bounded if filled else None


def _memory(like: Tensor) -> Tensor:
    return torch.empty(like.shape, dtype=like.dtype)


def can_bound(ins: int) -> bool:
    """Whether this machine computes with bounds of rows of so many numbers."""
    return native.missing() is None and bool(native.value("penstock_can_bound_logits", "n")(ins))
