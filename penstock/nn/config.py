"""config.json of a Hugging Face checkpoint as the few numbers that a dense decoder needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from penstock.core.errors import ConfigError
from penstock.core.hf_config import count, number

THETA = (1.0, 1e15)
POSITIVE, FROM_ZERO = (1e-6, 1e6), (0.0, 1e6)
ROPE_NUMBERS = {
    "factor": POSITIVE,
    "low_freq_factor": POSITIVE,
    "high_freq_factor": POSITIVE,
    "attention_factor": POSITIVE,
    "beta_fast": FROM_ZERO,
    "beta_slow": FROM_ZERO,
    "mscale": FROM_ZERO,
    "mscale_all_dim": FROM_ZERO,
}
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary frequencies.

    Attributes:
        kind: "default", "linear", "dynamic", "llama3" or "yarn".
        theta: base of the frequencies.
        options: what else the checkpoint says of this kind (factor, original_max_position_embeddings, ...).
    """

    kind: str
    theta: float
    options: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """A dense decoder: pre-norm blocks of grouped-query attention and a gated MLP.

    Attributes:
        windows: per layer, how many positions a token sees with itself; None is all.
        qk_norm: whether queries and keys are normed per head before the rotation.
        qkv_bias, o_bias, mlp_bias: whether those projections add a bias.
        dtype: of the weights as config.json says, or None when it does not.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    norm_eps: float
    rope: RopeConfig
    max_positions: int
    tie_embeddings: bool
    dtype: torch.dtype | None
    windows: tuple[int | None, ...]
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False


def read_decoder(
    hf: Mapping[str, Any], *, windows: tuple[int | None, ...] | None = None, **flags: bool
) -> DecoderConfig:
    """The part of config.json that all dense decoders share; `flags` are the architecture's own. Raises ConfigError.

    Keys that are missing have the architecture's defaults in transformers: `hf` must hold those already.
    """
    heads = count(hf, "num_attention_heads")
    hidden = count(hf, "hidden_size")
    layers = count(hf, "num_hidden_layers")
    activation = hf.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ConfigError(f"config.json: hidden_act is {activation!r}, supported is 'silu'", "hidden_act")
    config = DecoderConfig(
        vocab_size=count(hf, "vocab_size"),
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=count(hf, "num_key_value_heads", heads),
        head_dim=count(hf, "head_dim", hidden // heads),
        intermediate_size=count(hf, "intermediate_size"),
        norm_eps=number(hf, "rms_norm_eps", 1e-6, 0.0, 1.0),
        rope=_rope(hf),
        max_positions=count(hf, "max_position_embeddings"),
        tie_embeddings=bool(hf.get("tie_word_embeddings", False)),
        dtype=_dtype(hf),
        windows=windows or (None,) * layers,
        **flags,
    )
    if config.num_heads % config.num_kv_heads:
        raise ConfigError(
            f"config.json: num_attention_heads {heads} is no multiple of num_key_value_heads {config.num_kv_heads}",
            "num_key_value_heads",
        )
    if config.head_dim % 2:
        raise ConfigError(f"config.json: head_dim {config.head_dim} is odd", "head_dim")
    return config


def late_windows(hf: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Per-layer windows as Qwen configures them: `layer_types`, or `use_sliding_window` from `max_window_layers` on."""
    layers = count(hf, "num_hidden_layers")
    window = count(hf, "sliding_window", 4096) if hf.get("use_sliding_window") else None
    kinds = hf.get("layer_types")
    if kinds is None:
        first = count(hf, "max_window_layers", 28, least=0)
        return tuple(window if i >= first else None for i in range(layers))
    if len(kinds) != layers:
        raise ConfigError(f"config.json: layer_types names {len(kinds)} layers of {layers}", "layer_types")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _dtype(hf: Mapping[str, Any]) -> torch.dtype | None:
    name = str(hf.get("dtype") or hf.get("torch_dtype") or "auto").removeprefix("torch.")
    if name == "auto":
        return None
    if name not in DTYPES:
        raise ConfigError(f"config.json: dtype is {name!r}, supported are {', '.join(DTYPES)}", "dtype")
    return DTYPES[name]


def _rope(hf: Mapping[str, Any]) -> RopeConfig:
    """Reads both spellings: `rope_parameters`, and `rope_theta` beside `rope_scaling`, which goes before the other."""
    options = dict(hf.get("rope_scaling") or hf.get("rope_parameters") or {})
    kind = options.pop("rope_type", None) or options.pop("type", None) or "default"
    options.pop("type", None)
    theta = options.pop("rope_theta", None) or hf.get("rope_theta")
    if any((source.get("partial_rotary_factor") or 1.0) != 1.0 for source in (options, hf)):
        raise ConfigError("config.json: partial_rotary_factor is not supported", "partial_rotary_factor")
    original = hf.get("original_max_position_embeddings") or options.get("original_max_position_embeddings")
    given = {"original_max_position_embeddings": original or count(hf, "max_position_embeddings")}
    options |= {name: count(given, name) for name in given}
    for name, between in ROPE_NUMBERS.items():
        if options.get(name) is not None:
            options[name] = number(options, name, 1.0, *between, within="rope_parameters")
    return RopeConfig(kind=kind, theta=number({"rope_theta": theta}, "rope_theta", 10000.0, *THETA), options=options)
