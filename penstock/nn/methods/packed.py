"""Weights as the CPU's kernels read them."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.nn import native, ops
from penstock.nn.bounded_logits import BoundedLogits
from penstock.nn.methods.base import LinearMethod
from penstock.nn.packed import PackedWeight, Weight


class Packed(LinearMethod):
    """A `PackedWeight`. It is packed while it is loaded, and held in no other form."""

    name = "packed"
    kept = True

    def missing(self, device: torch.device, dtype: torch.dtype) -> str | None:
        if device.type != "cpu" or dtype not in native.DTYPES:
            return f"there are no kernels for {str(dtype).removeprefix('torch.')} on {device.type}"
        return native.missing()

    def create(self, outs: int, ins: int, dtype: torch.dtype, device: torch.device) -> Weight:
        return PackedWeight(outs, ins, dtype, device)

    def prepare(self, weight: Weight) -> None:
        _packed(weight).prepare()

    def load(self, weight: Weight, name: str, tensor: Tensor, first: int, outs: range, ins: range) -> None:
        _packed(weight).put(first, tensor[outs.start : outs.stop, ins.start : ins.stop])

    def apply(self, x: Tensor, weight: Weight, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        return ops.packed_linear(x, _packed(weight), bias, dtype)

    def rows(self, weight: Weight, index: Tensor) -> Tensor:
        return ops.packed_rows(_packed(weight), index)

    def dense(self, weight: Weight) -> Tensor:
        return _packed(weight).unpacked()

    def bounded_logits(self, weight: Weight, least: int) -> BoundedLogits | None:
        packed = _packed(weight)
        return BoundedLogits.of(packed) if packed.memory.nbytes >= least else None


def _packed(weight: Weight) -> PackedWeight:
    assert isinstance(weight, PackedWeight)
    return weight
