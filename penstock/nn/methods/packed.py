"""Weights as the CPU's kernels read them."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.nn import native, ops
from penstock.nn.bounded_logits import BoundedLogits, Take
from penstock.nn.methods.base import LinearMethod
from penstock.nn.packed import LANES, PackedWeight, layout


class Packed(LinearMethod[PackedWeight, Tensor]):
    """A `PackedWeight`. It is packed while it is loaded, and held in no other form."""

    name = "packed"
    kept = True

    def missing(self, device: torch.device, dtype: torch.dtype) -> str | None:
        if device.type != "cpu" or dtype not in native.DTYPES:
            return f"there are no kernels for {str(dtype).removeprefix('torch.')} on {device.type}"
        return native.missing()

    def create(self, outs: int, ins: int, dtype: torch.dtype, device: torch.device) -> PackedWeight:
        return PackedWeight(outs, ins, dtype, device)

    def prepare(self, weight: PackedWeight) -> None:
        weight.prepare()

    def put(self, weight: PackedWeight, first: int, rows: Tensor) -> None:
        weight.put(first, rows)

    apply = staticmethod(ops.packed_linear)  # the ops themselves: one call less for each product
    rows = staticmethod(ops.packed_rows)

    def dense(self, weight: PackedWeight) -> Tensor:
        return weight.unpacked()

    def cut(self) -> int:
        return native.panel_groups() * LANES

    def part(self, weight: PackedWeight, first: int, outs: int) -> PackedWeight:
        return weight.part(first, outs)

    def layout(self) -> str:
        return f"{self.name} {layout()}"

    def bounded_logits(self, weight: PackedWeight, take: Take | None) -> BoundedLogits | None:
        return BoundedLogits.of(weight, take)
