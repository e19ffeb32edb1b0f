"""K's and V's projections out of latent vectors, apart for each head, as absorbed attention multiplies with them."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.nn.head_weight import LatentWeight
from penstock.nn.methods.base import LinearMethod
from penstock.nn.packed import layout
from penstock.nn.quantised import Codes, Pieces, QuantisedWeight


@dataclass(frozen=True)
class PerHead(LinearMethod[LatentWeight, Tensor | Pieces]):
    """In the model's dtype, whatever a checkpoint has: the product with queries is over other inputs than the
    checkpoint's groups are of.

    Attributes:
        widths: of a head's K, without what is rotated, and of its V.
        packed: for the CPU's kernels.
        codes: of a checkpoint that has it quantised.
    """

    widths: tuple[int, int]
    packed: bool
    codes: Codes | None = None

    name = "per_head"

    @property
    def kept(self) -> bool:  # type: ignore[override]
        return self.packed

    def missing(self, device: torch.device, dtype: torch.dtype) -> str | None:
        return "it is for latent vectors"

    def create(self, outs: int, ins: int, dtype: torch.dtype, device: torch.device) -> LatentWeight:
        return LatentWeight(outs // sum(self.widths), self.widths, ins, dtype, device, self.packed)

    def prepare(self, weight: LatentWeight) -> None:
        weight.keys.prepare()
        weight.values.prepare()

    def put(self, weight: LatentWeight, first: int, rows: Tensor | Pieces) -> None:
        if isinstance(rows, Pieces):
            assert self.codes is not None
            outs, rank = weight.shape
            whole = QuantisedWeight(outs, rank, self.codes, weight.dtype, torch.device("cpu"))
            whole.prepare()
            whole.put(0, rows)
            rows = whole.dense()
        assert first == 0
        assert rows.shape == weight.shape, "all of it is put at once"
        keys, values = rows.unflatten(0, (-1, sum(self.widths))).split(self.widths, dim=1)
        weight.keys.put(keys.transpose(1, 2))
        weight.values.put(values)

    def apply(self, x: Tensor, weight: LatentWeight, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        raise AssertionError("heads are multiplied by ops.head_linear")

    def rows(self, weight: LatentWeight, index: Tensor) -> Tensor:
        return self.dense(weight)[index]

    def dense(self, weight: LatentWeight) -> Tensor:
        return torch.cat((weight.keys.dense().transpose(1, 2), weight.values.dense()), dim=1).flatten(0, 1)

    def part(self, weight: LatentWeight, first: int, outs: int) -> LatentWeight:
        raise AssertionError("it is one of all heads")

    def layout(self) -> str:
        return f"{self.name} {layout() if self.packed else sys.byteorder}"
