"""Weights that are not quantised."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from penstock.nn.formats.base import Expected, Format


@dataclass(frozen=True)
class Dense(Format[Tensor]):
    codes = None

    def tensors(self, outs: int, ins: int) -> dict[str, Expected]:
        return {"weight": Expected((outs, ins))}

    def rows(
        self, main: Tensor, others: Mapping[str, Tensor], first: int, outs: range, ins: range, width: int
    ) -> Tensor:
        return main[outs.start - first : outs.stop - first, ins.start : ins.stop]


DENSE = Dense()
