"""The last projection in 8 bits, beside its weights: where few tokens matter, it saves reading most of them."""

from __future__ import annotations

import torch

from penstock.nn import native
from penstock.nn.packed import LANES, PackedWeight

LEAST = 16 << 20  # bytes of weights; fewer stay in caches


class BoundedLogits:
    """What `native/bounded_logits.h` has of a weight, which must not change afterwards.

    Attributes:
        weight: itself.
        codes: [outs, ins] whole numbers.
        bounds: [3, outs rounded up] float32: scales, what codes leave of a row, and how long it is.
    """

    def __init__(self, weight: PackedWeight) -> None:
        outs, ins = weight.shape
        self.weight = weight
        self.codes = PackedWeight(outs, ins, torch.uint8, weight.device)
        self.codes.prepare()
        self.bounds = torch.zeros(3, self.codes.groups * LANES)

    @classmethod
    def of(cls, weight: PackedWeight) -> BoundedLogits | None:
        """None where it cannot be computed with, and of weights that are not finite."""
        outs, ins = weight.shape
        if missing() is not None or not native.value("penstock_can_bound_logits", "n")(ins):
            return None
        bounded = cls(weight)
        build = native.value(f"penstock_bounded_logits_{native.SUFFIX[weight.dtype]}", "pnnpp")
        codes, bounds = bounded.codes.memory.data_ptr(), bounded.bounds.data_ptr()
        return bounded if build(weight.memory.data_ptr(), outs, ins, codes, bounds) else None


def missing() -> str | None:
    """Why logits cannot be bounded on this machine, or None."""
    if (reason := native.missing()) is not None:
        return reason
    return None if native.value("penstock_can_bound_logits", "n")(1) else "no AVX-512 VNNI instructions"
