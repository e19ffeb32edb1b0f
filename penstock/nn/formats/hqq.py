"""HQQ as transformers writes it with safetensors (HqqConfig, axis 1).

The weight is cut into groups of inputs, one after the other: [groups, group]. W_q holds them from the first to the last
in as many parts as codes have room in a word, the first part in the highest bits: bytes of 8, 4 or 2 bits, and for 3
bits words of 30. `scale` and `zero` are [groups, 1], zeros fractional.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from penstock.core.errors import ConfigError
from penstock.nn.checkpoint import Stored
from penstock.nn.formats.base import GROUPS, OF_SCALES, Expected, Format, check_groups, chosen, scales_of, shard
from penstock.nn.formats.dense import DENSE
from penstock.nn.quantised import BITS, Codes, Pieces

IN_WORD = {8: 1, 4: 2, 3: 10, 2: 4}
TOLD: tuple[str, ...] = (
    "nbits",
    "group_size",
    "shape",
    "axis",
    "packing",
    "unpack_view_dtype",
    "view_as_float",
    "quant_scale",
)
TOLD += ("quant_zero", "compute_dtype", "offload_meta", "encoded_state_dict", "stores_quant_config", "channel_wise")
TOLD += ("optimize", "round_zero")  # what files have of each projection that config.json has for all


@dataclass(frozen=True)
class HQQ(Format[Pieces]):
    codes: Codes
    main: ClassVar[str] = "W_q"
    by_rows: ClassVar[bool] = False

    def tensors(self, outs: int, ins: int) -> dict[str, Expected]:
        bits, group = self.codes.bits, self.codes.group or ins
        check_groups(group, ins)
        groups, parts = outs * ins // group, IN_WORD[bits]
        if bits != 3 and groups % parts:
            raise ValueError(f"its {groups} groups are no {parts} equal parts")
        return {
            "W_q": Expected((-(-groups // parts), group), ("I32",) if bits == 3 else ("U8",)),
            "scale": Expected((groups, 1), OF_SCALES),
            "zero": Expected((groups, 1), OF_SCALES),
            **{name: Expected(None, needed=False) for name in TOLD},
        }

    def rows(
        self, main: Tensor, others: Mapping[str, Tensor], first: int, outs: range, ins: range, width: int
    ) -> Pieces:
        bits, groups = self.codes.bits, len(others["scale"])
        parts = [(main >> bits * at) & ((1 << bits) - 1) for at in reversed(range(IN_WORD[bits]))]
        codes = torch.cat(parts)[:groups].to(torch.uint8)
        in_row = self.codes.groups(width)
        own = slice(outs.start, outs.stop)
        scales, zeros = (others[name].view(-1, in_row)[own] for name in ("scale", "zero"))
        return shard(Pieces(codes.view(groups // in_row, -1)[own], scales, zeros), self.codes, ins)


def read(config: Mapping[str, Any], found: Mapping[str, Stored]) -> Callable[[str], Format[Any]]:
    whole = config.get("quant_config")
    if not isinstance(whole, Mapping) or not isinstance(whole.get("weight_quant_params"), Mapping):
        field = "quantization_config.quant_config"
        raise ConfigError(f"config.json: {field} is {ascii(whole)[:60]}, allowed is one for all layers", field)
    for name in ("scale_quant_params", "zero_quant_params"):
        chosen({name: whole.get(name) or "none"}, name, ("none",), within="quant_config")
    given, within = whole["weight_quant_params"], "quant_config.weight_quant_params"
    bits = chosen(given, "nbits", BITS, within=within)
    group = chosen({"group_size": given.get("group_size") or -1}, "group_size", GROUPS, within=within)
    chosen(given, "axis", (1,), 1, within)
    chosen(given, "view_as_float", (False,), False, within)

    def of(name: str) -> Format[Any]:
        if f"{name}.W_q" not in found:
            return DENSE
        return HQQ(Codes(bits, group=max(0, group), zeros=True, scales=scales_of(found, f"{name}.scale")))

    return of
