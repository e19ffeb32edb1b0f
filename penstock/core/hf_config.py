"""Numbers of a Hugging Face config.json, each checked against what any model could mean."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from penstock.core.errors import ConfigError

# far beyond every model there is, and small enough that nothing made of them overflows or takes long
MOST = {
    "num_hidden_layers": 10_000,
    "num_attention_heads": 1 << 14,
    "num_key_value_heads": 1 << 14,
    "head_dim": 1 << 14,
    "hidden_size": 1 << 20,
    "intermediate_size": 1 << 22,
    "vocab_size": 1 << 24,
    "max_position_embeddings": 1 << 30,
    "original_max_position_embeddings": 1 << 30,
    "sliding_window": 1 << 30,
    "max_window_layers": 10_000,
    "sliding_window_pattern": 10_000,
    "num_nextn_predict_layers": 10_000,
    "q_lora_rank": 1 << 16,
    "kv_lora_rank": 1 << 16,
    "qk_nope_head_dim": 1 << 14,
    "qk_rope_head_dim": 1 << 14,
    "v_head_dim": 1 << 14,
    "num_experts": 1 << 14,
    "num_local_experts": 1 << 14,
    "n_routed_experts": 1 << 14,
    "num_experts_per_tok": 1 << 10,
    "moe_intermediate_size": 1 << 22,
    "shared_expert_intermediate_size": 1 << 22,
    "n_shared_experts": 1 << 10,
    "n_group": 1 << 14,
    "topk_group": 1 << 14,
    "decoder_sparse_step": 10_000,
    "first_k_dense_replace": 10_000,
    "moe_layer_freq": 10_000,
    "depth": 10_000,
    "num_heads": 1 << 14,
    "patch_size": 1 << 10,
    "spatial_merge_size": 1 << 5,
    "temporal_patch_size": 1 << 5,
    "window_size": 1 << 16,
    "image_size": 1 << 13,
}


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """What it says of the language model: of one that sees, some have this in an object of its own."""
    own = config.get("text_config")
    if not isinstance(own, dict):
        return dict(config)
    tied = bool(config.get("tie_word_embeddings") or own.get("tie_word_embeddings"))
    return {**config, **{key: value for key, value in own.items() if value is not None}, "tie_word_embeddings": tied}


def count(config: Mapping[str, Any], name: str, default: int | None = None, least: int = 1) -> int:
    """A whole number from `least` to `MOST[name]`; None and a missing one are `default`. Raises ConfigError."""
    value = config.get(name)
    value = default if value is None else value
    if type(value) is not int or not least <= value <= MOST[name]:
        raise ConfigError(
            f"config.json: {name} is {_shown(value)}, allowed is a whole number from {least} to {MOST[name]}", name
        )
    return value


def number(config: Mapping[str, Any], name: str, default: float, low: float, high: float, within: str = "") -> float:
    """A number between two others; None and a missing one are `default`.

    Args:
        within: the key of the object that holds it.

    Raises:
        ConfigError: anything else, NaN too.
    """
    value = config.get(name)
    value = default if value is None else value
    if type(value) not in (int, float) or not low <= value <= high:
        field = f"{within}.{name}" if within else name
        raise ConfigError(
            f"config.json: {field} is {_shown(value)}, allowed is a number from {low:g} to {high:g}", field
        )
    return float(value)


def mixed_windows(config: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Of each layer, how many positions a token sees with itself, None for all; empty where that is the same for all
    layers. Raises ConfigError."""
    layers, kinds = count(config, "num_hidden_layers"), config.get("layer_types")
    if config.get("sliding_window") is None or config.get("use_sliding_window") is False:
        return ()
    window = count(config, "sliding_window")
    if isinstance(kinds, list) and len(kinds) == layers:
        having = [kind == "sliding_attention" for kind in kinds]
    elif config.get("sliding_window_pattern") is not None:
        pattern = count(config, "sliding_window_pattern")
        having = [(i + 1) % pattern > 0 for i in range(layers)]
    elif config.get("use_sliding_window"):
        first = count(config, "max_window_layers", 28, least=0)
        having = [i >= first for i in range(layers)]
    else:
        return ()
    return tuple(window if has else None for has in having) if len(set(having)) > 1 else ()


def check_finite(value: Any, file: str, name: str = "") -> None:
    """Raise ConfigError when a number in what a JSON file holds is none, or infinite: Python's parser takes both."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{file}: {name} is {value}, a finite number is needed", "model")
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        check_finite(inner, file, f"{name}[{key}]" if isinstance(value, list) else f"{name}.{key}".lstrip("."))


def _shown(value: object) -> str:
    if value is None:
        return "missing"
    if isinstance(value, int) and abs(value) >= 10**18:
        return "huge"  # Python refuses to spell integers of thousands of digits
    text = ascii(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def image_settings(processor: Mapping[str, Any], preprocessor: Mapping[str, Any]) -> dict[str, Any]:
    """How images are prepared, out of processor_config.json and preprocessor_config.json, of which a checkpoint has one
    or the other."""
    found = processor.get("image_processor") or preprocessor
    return dict(found) if isinstance(found, Mapping) else {}
