"""Weights of which each number is a byte of its own, int8 or float8 e4m3, beside scales; and the configurations of fp8
checkpoints (quant_method fp8, fbgemm_fp8).

Activations are computed in the model's dtype: scales of theirs (input_scale) are not needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from penstock.core.errors import ConfigError
from penstock.nn.checkpoint import Stored
from penstock.nn.formats.base import OF_SCALES, Expected, Format, check_groups, chosen, scales_of, shard
from penstock.nn.formats.dense import DENSE
from penstock.nn.quantised import Codes, Pieces

Strategy = Literal["tensor", "channel", "group", "block"]
STORED = {"integer": "I8", "e4m3": "F8_E4M3"}


@dataclass(frozen=True)
class EightBits(Format[Pieces]):
    """
    Attributes:
        strategy: what shares a scale: everything, an output, a group of an output's inputs, or a block of `rows_of`
            outputs and a group of inputs.
        scale: the name of the tensor with scales.
        flat: whether scales of outputs are [outs] instead of [outs, 1].
    """

    codes: Codes
    strategy: Strategy
    scale: str = "weight_scale"
    rows_of: int = 1
    flat: bool = False

    def tensors(self, outs: int, ins: int) -> dict[str, Expected]:
        if self.strategy == "group":
            check_groups(self.codes.group, ins)
        shape: tuple[int, ...] = (-(-outs // self.rows_of), self.codes.groups(ins))
        if self.strategy == "tensor":
            shape = ()
        elif self.flat:
            shape = shape[:1]
        return {
            "weight": Expected((outs, ins), (STORED[self.codes.kind],)),
            self.scale: Expected(shape, OF_SCALES),
            **({"weight_zero_point": Expected(shape, ("I8",))} if self.codes.zeros else {}),
            "input_scale": Expected(None, needed=False),
        }

    def rows(
        self, main: Tensor, others: Mapping[str, Tensor], first: int, outs: range, ins: range, width: int
    ) -> Pieces:
        codes = main[outs.start - first : outs.stop - first].view(torch.uint8)
        zeros = None
        if self.codes.kind == "integer":
            codes = codes ^ 0x80  # of two's complement, 128 more
        if self.codes.zeros:
            zeros = self._of_rows(others["weight_zero_point"].float() + self.codes.middle, outs)
        return shard(Pieces(codes, self._of_rows(others[self.scale], outs), zeros), self.codes, ins)

    def _of_rows(self, x: Tensor, outs: range) -> Tensor:
        """[outs, groups] of some outputs."""
        if self.strategy == "tensor":
            return x.reshape(1, 1).expand(len(outs), 1)
        return x.view(len(x), -1)[torch.arange(outs.start, outs.stop) // self.rows_of]


def scaled(found: Mapping[str, Stored], name: str, scale: str) -> tuple[Strategy, bool]:
    """How scales are shared where there are no groups, by their shape in the checkpoint, and whether they are flat."""
    shape = found[f"{name}.{scale}"].shape if f"{name}.{scale}" in found else ()
    return ("tensor" if all(size == 1 for size in shape) else "channel"), len(shape) == 1


def read(config: Mapping[str, Any], found: Mapping[str, Stored]) -> Callable[[str], Format[Any]]:
    chosen(config, "activation_scheme", ("dynamic", "static"), "dynamic")
    block = config.get("weight_block_size")
    if block is not None and not (isinstance(block, list) and len(block) == 2 and all(b in (64, 128) for b in block)):
        field = "quantization_config.weight_block_size"
        raise ConfigError(f"config.json: {field} is {ascii(block)[:60]}, allowed is [128, 128] or none", field)

    def of(name: str) -> Format[Any]:
        weight = found.get(f"{name}.weight")
        if weight is None or weight.dtype != STORED["e4m3"]:
            return DENSE
        if block is not None:
            scales = scales_of(found, f"{name}.weight_scale_inv")
            return EightBits(Codes(8, "e4m3", block[1], scales=scales), "block", "weight_scale_inv", block[0])
        strategy, flat = scaled(found, name, "weight_scale")
        codes = Codes(8, "e4m3", scales=scales_of(found, f"{name}.weight_scale"))
        return EightBits(codes, strategy, flat=flat)

    return of
