"""AWQ as AutoAWQ writes it, version "gemm": codes packed along the outputs, inputs first.

A word of qweight [ins, outs / 8] int32 holds eight outputs of an input, in the order of `ORDER`, the lowest bits first;
qzeros [groups, outs / 8] in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from penstock.nn.checkpoint import Stored
from penstock.nn.formats.base import GROUPS, OF_SCALES, Expected, Format, check_groups, chosen, scales_of, shard
from penstock.nn.formats.dense import DENSE
from penstock.nn.quantised import Codes, Pieces, unpack

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
IN_WORD = len(ORDER)


@dataclass(frozen=True)
class AWQ(Format[Pieces]):
    codes: Codes
    main: ClassVar[str] = "qweight"
    by_rows: ClassVar[bool] = False

    def tensors(self, outs: int, ins: int) -> dict[str, Expected]:
        check_groups(self.codes.group, ins)
        if outs % IN_WORD:
            raise ValueError(f"its {outs} outputs are no multiple of {IN_WORD}")
        groups = self.codes.groups(ins)
        return {
            "qweight": Expected((ins, outs // IN_WORD), ("I32",)),
            "qzeros": Expected((groups, outs // IN_WORD), ("I32",)),
            "scales": Expected((groups, outs), OF_SCALES),
        }

    def rows(
        self, main: Tensor, others: Mapping[str, Tensor], first: int, outs: range, ins: range, width: int
    ) -> Pieces:
        own = slice(outs.start, outs.stop)
        scales = others["scales"].T[own]
        return shard(Pieces(_outputs(main)[own], scales, _outputs(others["qzeros"])[own]), self.codes, ins)


def _outputs(words: Tensor) -> Tensor:
    """[rows, outs / 8] int32 -> [outs, rows] uint8."""
    codes = unpack(words.contiguous().view(torch.uint8), 4, words.shape[1] * IN_WORD).view(len(words), -1, IN_WORD)
    back = torch.tensor(ORDER).argsort()
    return codes[:, :, back].view(len(words), -1).T


def read(config: Mapping[str, Any], found: Mapping[str, Stored]) -> Callable[[str], Format[Any]]:
    bits = chosen({"bits": config.get("bits", config.get("w_bit"))}, "bits", (4,))
    group = chosen({"group_size": config.get("group_size", config.get("q_group_size"))}, "group_size", GROUPS, 128)
    chosen({"version": str(config.get("version", "gemm")).lower()}, "version", ("gemm",))
    chosen(config, "zero_point", (True,), True)

    def of(name: str) -> Format[Any]:
        if f"{name}.qweight" not in found:
            return DENSE
        return AWQ(Codes(bits, group=max(0, group), zeros=True, scales=scales_of(found, f"{name}.scales")))

    return of
