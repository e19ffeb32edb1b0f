"""Rotary frequencies: the scalings that checkpoints ask for."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from penstock.core.errors import ConfigError
from penstock.nn.config import DecoderConfig

Frequencies = tuple[Tensor, float]  # [dim / 2] float32 radians per position, and a factor on cos and sin


def frequencies(config: DecoderConfig) -> Frequencies:
    """Angular frequency of every pair, and the factor on cos and sin. Raises ConfigError on an unknown kind."""
    kind = config.rope.kind
    if kind not in SCALINGS:
        raise ConfigError(f"config.json: rope_type is {kind!r}, supported are {', '.join(SCALINGS)}", "rope_parameters")
    try:
        return SCALINGS[kind](config, _base(config), config.rope.options)
    except KeyError as missing:
        raise ConfigError(f"config.json: rope_type {kind!r} needs {missing}", "rope_parameters") from None


def check(config: DecoderConfig) -> None:
    """Raise ConfigError unless there is a frequency for every pair."""
    with torch.device("cpu"):
        base, factor = frequencies(config)
    if not (base.isfinite().all() and math.isfinite(factor)):
        raise ConfigError(
            f"config.json: rope_parameters: {dict(config.rope.options)} make no finite frequencies", "rope_parameters"
        )


def longest(config: DecoderConfig) -> int:
    """Positions that the checkpoint's rotation is meant for.

    "dynamic" would rotate the same token differently as its text grows, so keys that are cached or shared would be
    wrong: it is served up to the length where it changes nothing.
    """
    kind, options = config.rope.kind, config.rope.options
    if kind == "linear":
        return int(config.max_positions * options.get("factor", 1.0))
    if kind == "yarn" and options.get("factor"):
        return max(config.max_positions, int(options["original_max_position_embeddings"] * options["factor"]))
    return config.max_positions


def _base(config: DecoderConfig) -> Tensor:
    exponent = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    return 1.0 / config.rope.theta**exponent


def _default(config: DecoderConfig, base: Tensor, options: Mapping[str, Any]) -> Frequencies:
    return base, 1.0


def _linear(config: DecoderConfig, base: Tensor, options: Mapping[str, Any]) -> Frequencies:
    return base / options["factor"], 1.0


def _llama3(config: DecoderConfig, base: Tensor, options: Mapping[str, Any]) -> Frequencies:
    """Llama 3.1: slow pairs are divided by the factor, fast ones kept, those between interpolated."""
    factor, original = options["factor"], options["original_max_position_embeddings"]
    low, high = options["low_freq_factor"], options["high_freq_factor"]
    turns = original * base / (2 * math.pi)  # rotations within the original length
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - smooth) * base / factor + smooth * base, 1.0


def _yarn(config: DecoderConfig, base: Tensor, options: Mapping[str, Any]) -> Frequencies:
    """YaRN (Peng et al. 2023, sections 3.2 to 3.4)."""
    original = options["original_max_position_embeddings"]
    factor = options.get("factor") or config.max_positions / original
    dim, theta = config.head_dim, config.rope.theta

    def pair_with(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_with(options.get("beta_fast") or 32), pair_with(options.get("beta_slow") or 1)
    if options.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = ((torch.arange(dim // 2).float() - low) / ((high - low) or 0.001)).clamp(0, 1)
    return base / factor * ramp + base * (1 - ramp), _yarn_attention(factor, options)


def _yarn_attention(factor: float, options: Mapping[str, Any]) -> float:
    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    given = options.get("attention_factor")
    if given is not None:
        return float(given)
    mscale, all_dim = options.get("mscale"), options.get("mscale_all_dim")
    return magnitude(mscale) / magnitude(all_dim) if mscale and all_dim else magnitude(1.0)


SCALINGS: dict[str, Callable[[DecoderConfig, Tensor, Mapping[str, Any]], Frequencies]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _default,
    "llama3": _llama3,
    "yarn": _yarn,
}
