"""Weights in few bits, multiplied with by plain torch ops on any device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from penstock.nn import ops
from penstock.nn.methods.base import LinearMethod
from penstock.nn.quantised import Codes, Pieces, QuantisedWeight, layout


@dataclass(frozen=True)
class Quantised(LinearMethod[QuantisedWeight, Pieces]):
    """A `QuantisedWeight` of some codes. It takes `Pieces`."""

    codes: Codes
    name: ClassVar[str] = "quantised"
    kept: ClassVar[bool] = True

    def missing(self, device: torch.device, dtype: torch.dtype) -> str | None:
        return None

    def create(self, outs: int, ins: int, dtype: torch.dtype, device: torch.device) -> QuantisedWeight:
        return QuantisedWeight(outs, ins, self.codes, dtype, device)

    def prepare(self, weight: QuantisedWeight) -> None:
        weight.prepare()

    def put(self, weight: QuantisedWeight, first: int, rows: Pieces) -> None:
        weight.put(first, rows)

    apply = staticmethod(ops.quantised_linear)
    rows = staticmethod(ops.quantised_rows)

    def dense(self, weight: QuantisedWeight) -> Tensor:
        return weight.dense()

    def part(self, weight: QuantisedWeight, first: int, outs: int) -> QuantisedWeight:
        return weight.part(first, outs)

    def layout(self) -> str:
        return f"{self.name} {self.codes} {layout()}"
