"""GPTQ as AutoGPTQ and GPTQModel write it: codes packed along the inputs, which come first.

qweight [ins * bits / 32, outs] int32 holds an output's codes as a stream of bits, the lowest first; qzeros [groups,
outs * bits / 32] those of zeros in the same way, in checkpoint_format "gptq" less one, in "gptq_v2" as they are. g_idx
[ins] says which group an input is in.
"""

from __future__ import annotations

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
from penstock.nn.quantised import BITS, Codes, Pieces, unpack

WORD = 32  # bits


@dataclass(frozen=True)
class GPTQ(Format[Pieces]):
    """
    Attributes:
        less_one: whether zeros are stored so.
    """

    codes: Codes
    less_one: bool
    main: ClassVar[str] = "qweight"
    by_rows: ClassVar[bool] = False

    def tensors(self, outs: int, ins: int) -> dict[str, Expected]:
        bits, group = self.codes.bits, self.codes.group
        check_groups(group, ins)
        for what, width in (("inputs", ins), ("outputs", outs)):
            if width * bits % WORD:
                raise ValueError(f"its {width} {what} of {bits} bits fill no whole words of {WORD}")
        groups = self.codes.groups(ins)
        return {
            "qweight": Expected((ins * bits // WORD, outs), ("I32",)),
            "qzeros": Expected((groups, outs * bits // WORD), ("I32",)),
            "scales": Expected((groups, outs), OF_SCALES),
            "g_idx": Expected((ins,), ("I32",), needed=self.codes.ordered),
        }

    def rows(
        self, main: Tensor, others: Mapping[str, Tensor], first: int, outs: range, ins: range, width: int
    ) -> Pieces:
        bits, own = self.codes.bits, slice(outs.start, outs.stop)
        codes = unpack(_octets(main.T[own]), bits, width)
        scales = others["scales"].T[own]
        zeros = unpack(_octets(others["qzeros"]), bits, others["scales"].shape[1]).T[own].float() + self.less_one
        if not self.codes.zeros:
            _expect_middle(zeros, self.codes)
        order = in_groups(others.get("g_idx"), self.codes, width)
        if order is not None:
            codes = codes[:, order]
        return shard(Pieces(codes, scales, zeros if self.codes.zeros else None, order), self.codes, ins)


def _octets(words: Tensor) -> Tensor:
    """[rows, words] int32 -> [rows, 4 * words] uint8."""
    return words.contiguous().view(torch.uint8)


def _expect_middle(zeros: Tensor, codes: Codes) -> None:
    if not bool((zeros == codes.middle).all()):
        raise ValueError(f"qzeros: with sym, all zeros are expected to be {codes.middle}")


def read(config: Mapping[str, Any], found: Mapping[str, Stored]) -> Callable[[str], Format[Any]]:
    bits = chosen(config, "bits", BITS)
    group = max(0, chosen(config, "group_size", GROUPS, 128))
    version = chosen(config, "checkpoint_format", ("gptq", "gptq_v2"), "gptq")
    symmetric = chosen(config, "sym", (True, False), True)
    ordered = chosen(config, "desc_act", (True, False), False)
    chosen(config, "pack_dtype", ("int32",), "int32")
    if config.get("dynamic"):
        raise ConfigError(
            "config.json: quantization_config.dynamic: layers that are quantised differently are not supported",
            "quantization_config.dynamic",
        )

    def of(name: str) -> Format[Any]:
        if f"{name}.qweight" not in found:
            return DENSE
        scales = scales_of(found, f"{name}.scales")
        codes = Codes(bits, group=group, zeros=not symmetric, ordered=ordered and group > 0, scales=scales)
        return GPTQ(codes, version == "gptq")

    return of
