"""compressed-tensors, as llm-compressor writes it: int-quantized, float-quantized, naive-quantized and pack-quantized.

weight_packed [outs, ins * bits / 32] int32 holds an output's codes as a stream of bits, the lowest first, 2**(bits - 1)
more than the signed numbers are; weight_zero_point [outs * bits / 32, groups] in the same way along the outputs.
Activations are computed in the model's dtype, whatever `input_activations` says.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from penstock.core.errors import ConfigError
from penstock.nn.checkpoint import Stored
from penstock.nn.formats.base import (
    GROUPS,
    OF_SCALES,
    Expected,
    Format,
    check_groups,
    chosen,
    in_groups,
    scales_of,
    shard,
)
from penstock.nn.formats.dense import DENSE
from penstock.nn.formats.eight_bits import EightBits, scaled
from penstock.nn.quantised import Codes, Pieces, unpack

FORMATS = ("int-quantized", "float-quantized", "naive-quantized", "pack-quantized")
WORD = 32  # bits
CLASSES = ("Linear",)  # targets that name all


@dataclass(frozen=True)
class Packed(Format[Pieces]):
    codes: Codes
    main: ClassVar[str] = "weight_packed"

    def tensors(self, outs: int, ins: int) -> dict[str, Expected]:
        bits, groups = self.codes.bits, self.codes.groups(ins)
        check_groups(self.codes.group, ins)
        zeros = Expected((-(-outs * bits // WORD), groups), ("I32",))
        return {
            "weight_packed": Expected((outs, -(-ins * bits // WORD)), ("I32",)),
            "weight_scale": Expected((outs, groups), OF_SCALES),
            **({"weight_zero_point": zeros} if self.codes.zeros else {}),
            "weight_g_idx": Expected((ins,), ("I32",), needed=self.codes.ordered),
            "weight_shape": Expected((2,), ("I64", "I32")),
            "input_scale": Expected(None, needed=False),
        }

    def rows(
        self, main: Tensor, others: Mapping[str, Tensor], first: int, outs: range, ins: range, width: int
    ) -> Pieces:
        bits, own = self.codes.bits, slice(outs.start, outs.stop)
        height, stored = others["weight_shape"].tolist()
        if stored != width:
            raise ValueError(f"weight_shape is {[height, stored]}, config.json makes it {width} inputs")
        octets = main[outs.start - first : outs.stop - first].contiguous().view(torch.uint8)
        codes = _unpacked(octets, bits, width)
        zeros = None
        if self.codes.zeros:
            packed = others["weight_zero_point"].T.contiguous().view(torch.uint8)
            zeros = _unpacked(packed, bits, height).T[own].float()
        order = in_groups(others.get("weight_g_idx"), self.codes, width)
        if order is not None:
            codes = codes[:, order]
        return shard(Pieces(codes, others["weight_scale"][own], zeros, order), self.codes, ins)


def _unpacked(octets: Tensor, bits: int, width: int) -> Tensor:
    """Of rows that end with whole words, which are not always whole groups of codes."""
    return unpack(torch.nn.functional.pad(octets, (0, -octets.shape[1] % bits)), bits, width)


def read(config: Mapping[str, Any], found: Mapping[str, Stored]) -> Callable[[str], Format[Any]]:
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise _refused("config_groups", groups, "an object of schemes")
    schemes = [_scheme(config, name, group) for name, group in groups.items()]

    def of(name: str) -> Format[Any]:
        if f"{name}.weight_packed" not in found and f"{name}.weight_scale" not in found:
            return DENSE
        scheme = next((make for targets, make in schemes if any(_matches(target, name) for target in targets)), None)
        return DENSE if scheme is None else scheme(found, name)

    return of


Make = Callable[[Mapping[str, Stored], str], Format[Any]]


def _scheme(config: Mapping[str, Any], name: str, group: Any) -> tuple[list[str], Make]:
    """Which projections it is for, and what makes their format."""
    where = f"config_groups.{name}"
    if not isinstance(group, Mapping) or not isinstance(group.get("weights"), Mapping):
        raise _refused(where, group, "an object with weights")
    targets, weights, of = group.get("targets"), group["weights"], f"{where}.weights"
    if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        raise _refused(f"{where}.targets", targets, "a list of names")
    form = chosen({"format": group.get("format") or config.get("format")}, "format", FORMATS)
    kind = chosen(weights, "type", ("int", "float"), "int", of)
    packed = form == "pack-quantized"
    bits = chosen(weights, "num_bits", (2, 3, 4, 8) if packed and kind == "int" else (8,), None, of)
    symmetric = chosen(weights, "symmetric", (True, False) if kind == "int" else (True,), True, of)
    strategies = ("channel", "group") if packed else ("tensor", "channel", "group", "block")
    default = "tensor" if weights.get("group_size") is None else "group"
    strategy = chosen(weights, "strategy", strategies, default, of)
    size = max(0, chosen(weights, "group_size", GROUPS, None, of)) if strategy == "group" else 0
    chosen(weights, "dynamic", (False,), False, of)
    ordered = chosen(weights, "actorder", ("group", "weight", "static", "dynamic", False), False, of)
    ordered = ordered in ("group", "dynamic") and size > 0
    rows = 1
    if strategy == "block":
        block = weights.get("block_structure")
        if not (isinstance(block, list) and len(block) == 2 and all(side in (64, 128) for side in block)):
            raise _refused(f"{of}.block_structure", block, "[128, 128]")
        rows, size = block
    if ordered and not packed:
        raise _refused(f"{of}.actorder", weights.get("actorder"), "none, with this format")

    def make(found: Mapping[str, Stored], name: str) -> Format[Any]:
        scales = scales_of(found, f"{name}.weight_scale")
        if packed:
            return Packed(Codes(bits, "integer", size, not symmetric, ordered, scales))
        codes = Codes(8, "integer" if kind == "int" else "e4m3", size, not symmetric, scales=scales)
        if strategy in ("group", "block"):
            return EightBits(codes, strategy, rows_of=rows)
        told, flat = scaled(found, name, "weight_scale")
        return EightBits(codes, told, flat=flat)

    return targets, make


def _matches(target: str, name: str) -> bool:
    """As the library has it: a class, a name, or after "re:" a regular expression for a name's beginning."""
    if target.startswith("re:"):
        try:
            return re.match(target[3:], name) is not None
        except re.error:
            raise _refused("config_groups.targets", target, "regular expressions") from None
    return target in CLASSES or target == name


def _refused(field: str, value: Any, allowed: str) -> ConfigError:
    field = f"quantization_config.{field}"
    return ConfigError(f"config.json: {field} is {ascii(value)[:60]}, allowed is {allowed}", field)
