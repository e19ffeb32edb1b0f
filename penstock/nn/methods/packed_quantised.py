"""Weights in few bits as the CPU's kernels read them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from penstock.nn import native, ops
from penstock.nn.methods.base import LinearMethod
from penstock.nn.packed_quantised import PackedQuantisedWeight, layout, panel_outs
from penstock.nn.quantised import Codes, Pieces


@dataclass(frozen=True)
class PackedQuantised(LinearMethod[PackedQuantisedWeight, Pieces]):
    """A `PackedQuantisedWeight` of some codes. It takes `Pieces`, which are packed while they are loaded."""

    codes: Codes
    name: ClassVar[str] = "packed_quantised"
    kept: ClassVar[bool] = True

    def missing(self, device: torch.device, dtype: torch.dtype) -> str | None:
        if device.type != "cpu" or dtype not in native.DTYPES:
            return f"there are no kernels for {str(dtype).removeprefix('torch.')} on {device.type}"
        return native.missing()

    def create(self, outs: int, ins: int, dtype: torch.dtype, device: torch.device) -> PackedQuantisedWeight:
        return PackedQuantisedWeight(outs, ins, self.codes, dtype, device)

    def prepare(self, weight: PackedQuantisedWeight) -> None:
        weight.prepare()

    def put(self, weight: PackedQuantisedWeight, first: int, rows: Pieces) -> None:
        weight.put(first, rows)

    apply = staticmethod(ops.packed_quantised_linear)
    rows = staticmethod(ops.packed_quantised_rows)

    def dense(self, weight: PackedQuantisedWeight) -> Tensor:
        return weight.unpacked()

    def cut(self) -> int:
        return panel_outs()

    def part(self, weight: PackedQuantisedWeight, first: int, outs: int) -> PackedQuantisedWeight:
        return weight.part(first, outs)

    def layout(self) -> str:
        return f"{self.name} {self.codes} {layout()}"
