"""How checkpoints have linears: the `quant_method` of config.json -> what reads it. One file each, one line here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from penstock.core.errors import ConfigError
from penstock.nn.checkpoint import Stored
from penstock.nn.formats import awq, compressed_tensors, eight_bits, gptq, hqq
from penstock.nn.formats.at_load import AT_LOAD, HEAD, INT8
from penstock.nn.formats.base import Format
from penstock.nn.formats.dense import DENSE

FormatOf = Callable[[str], Format[Any]]  # a projection's name in the checkpoint -> how it is there
Read = Callable[[Mapping[str, Any], Mapping[str, Stored]], FormatOf]
FORMATS: Mapping[str, Read] = {
    "gptq": gptq.read,
    "awq": awq.read,
    "compressed-tensors": compressed_tensors.read,
    "fp8": eight_bits.read,
    "fbgemm_fp8": eight_bits.read,
    "hqq": hqq.read,
}


@dataclass(frozen=True, slots=True)
class Quantisation:
    """How a model's linears are quantised.

    Attributes:
        name: the checkpoint's quant_method, or what was asked for of a plain one; "" is not at all.
        at_load: whether the checkpoint is a plain one.
        of: says so of a projection.
    """

    name: str
    at_load: bool
    of: FormatOf


def read_quantisation(hf: Mapping[str, Any], found: Mapping[str, Stored], asked: str | None) -> Quantisation:
    """
    Args:
        hf: config.json.
        found: the checkpoint's tensors by name.
        asked: --quantization.

    Raises:
        ConfigError: naming the field that is not supported, its value, and what is.
    """
    config = hf.get("quantization_config") or hf.get("compression_config")
    if not config:
        return _at_load(asked)
    if not isinstance(config, Mapping):
        raise ConfigError("config.json: quantization_config: must be an object", "quantization_config")
    method = str(config.get("quant_method"))
    if method not in FORMATS:
        field = "quantization_config.quant_method"
        raise ConfigError(f"config.json: {field} is {method[:60]!r}, supported are {', '.join(FORMATS)}", field)
    if asked not in (None, "auto", method):
        raise ConfigError(
            f"quantization: {asked!r}, but the checkpoint is quantised already, allowed are auto, {method}",
            "quantization",
        )
    return Quantisation(method, False, FORMATS[method](config, found))


def _at_load(asked: str | None) -> Quantisation:
    if asked in (None, "auto"):
        return Quantisation("", False, lambda _: DENSE)
    if asked not in AT_LOAD:
        raise ConfigError(
            f"quantization: {asked!r}, but the checkpoint is not quantised, allowed are auto, {', '.join(AT_LOAD)}",
            "quantization",
        )
    body, head = AT_LOAD[asked], HEAD.get(asked, INT8)
    return Quantisation(asked, True, lambda name: head if name == "lm_head" else body)
