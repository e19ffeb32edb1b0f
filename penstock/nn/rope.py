"""Rotary frequencies: the scalings that checkpoints ask for."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from penstock.core.errors import ConfigError
from penstock.nn.config import DecoderConfig, RopeConfig

Frequencies = tuple[Tensor, float]  # [dim / 2] float32 radians per position, and a factor on cos and sin


def frequencies(rope: RopeConfig, positions: int) -> Frequencies:
    """Angular frequency of every pair, and the factor on cos and sin.

    Args:
        positions: that config.json says the checkpoint has.

    Raises:
        ConfigError: an unknown kind, or one that lacks an option.
    """
    if rope.kind not in SCALINGS:
        raise ConfigError(
            f"config.json: rope_type is {rope.kind!r}, supported are {', '.join(SCALINGS)}", "rope_parameters"
        )
    try:
        return SCALINGS[rope.kind](rope, _base(rope), positions)
    except KeyError as missing:
        raise ConfigError(f"config.json: rope_type {rope.kind!r} needs {missing}", "rope_parameters") from None


def check(config: DecoderConfig) -> None:
    """Raise ConfigError unless there is a frequency for every pair."""
    for rope in config.ropes:
        with torch.device("cpu"):
            base, factor = frequencies(rope, config.max_positions)
        if not (base.isfinite().all() and math.isfinite(factor)):
            raise ConfigError(
                f"config.json: rope_parameters: {dict(rope.options)} make no finite frequencies", "rope_parameters"
            )


def settled(config: DecoderConfig, model_len: int | None) -> DecoderConfig:
    """The same, where the length of sequences chooses between frequencies: "longrope" has one set up to the length that
    the model was first trained with, and another beyond.

    transformers chooses by each sequence as it grows, which rotates the same token differently as its text gets longer,
    so keys that are cached or shared would be wrong. Here, as in vLLM, one set is for all sequences: that of the
    longest there may be.

    Args:
        model_len: that was asked for; None is what the checkpoint allows.
    """
    rope = config.rope
    if rope.kind != "longrope":
        return config
    name = "long" if (model_len or longest(config)) > rope.options["original_max_position_embeddings"] else "short"
    options = {**rope.options, "factors": rope.options.get(f"{name}_factor")}
    return replace(config, rope=replace(rope, options=options), variant=name)


def longest(config: DecoderConfig) -> int:
    """Positions that the checkpoint's rotation is meant for.

    "dynamic" would rotate the same token differently as its text grows, so keys that are cached or shared would be
    wrong: it is served up to the length where it changes nothing.
    """
    kind, options = config.rope.kind, config.rope.options
    if kind == "linear" and not config.scaled_positions:
        return int(config.max_positions * options.get("factor", 1.0))
    if kind == "yarn" and options.get("factor"):
        return max(config.max_positions, int(options["original_max_position_embeddings"] * options["factor"]))
    return config.max_positions


def _base(rope: RopeConfig) -> Tensor:
    exponent = torch.arange(0, rope.dim, 2, dtype=torch.int64).float() / rope.dim
    return 1.0 / rope.theta**exponent


def _default(rope: RopeConfig, base: Tensor, positions: int) -> Frequencies:
    return base, 1.0


def _linear(rope: RopeConfig, base: Tensor, positions: int) -> Frequencies:
    return base / rope.options["factor"], 1.0


def _llama3(rope: RopeConfig, base: Tensor, positions: int) -> Frequencies:
    """Llama 3.1: slow pairs are divided by the factor, fast ones kept, those between interpolated."""
    options = rope.options
    factor, original = options["factor"], options["original_max_position_embeddings"]
    low, high = options["low_freq_factor"], options["high_freq_factor"]
    turns = original * base / (2 * math.pi)  # rotations within the original length
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - smooth) * base / factor + smooth * base, 1.0


def _yarn(rope: RopeConfig, base: Tensor, positions: int) -> Frequencies:
    """YaRN (Peng et al. 2023, sections 3.2 to 3.4)."""
    options, dim, theta = rope.options, rope.dim, rope.theta
    original = options["original_max_position_embeddings"]
    factor = options.get("factor") or positions / original

    def pair_with(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_with(options.get("beta_fast") or 32), pair_with(options.get("beta_slow") or 1)
    if options.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = ((torch.arange(dim // 2).float() - low) / ((high - low) or 0.001)).clamp(0, 1)
    return base / factor * ramp + base * (1 - ramp), _yarn_attention(factor, options)


def magnitude(factor: float, weight: float) -> float:
    """YaRN's, of queries and keys that are stretched by a factor."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def _yarn_attention(factor: float, options: Mapping[str, Any]) -> float:
    given = options.get("attention_factor")
    if given is not None:
        return float(given)
    mscale, all_dim = options.get("mscale"), options.get("mscale_all_dim")
    if mscale and all_dim:
        return magnitude(factor, mscale) / magnitude(factor, all_dim)
    return magnitude(factor, 1.0)


def _longrope(rope: RopeConfig, base: Tensor, positions: int) -> Frequencies:
    """LongRoPE (Ding et al. 2024): a factor found by search for every pair."""
    options = rope.options
    original, factors = options["original_max_position_embeddings"], options["factors"]
    if factors is None:
        raise KeyError("short_factor and long_factor")
    factor, given = options.get("factor") or positions / original, options.get("attention_factor")
    if given is None:
        given = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return base / torch.tensor(factors), float(given)


SCALINGS: dict[str, Callable[[RopeConfig, Tensor, int], Frequencies]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _default,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
