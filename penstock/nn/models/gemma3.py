"""Gemma 3, text only: windows on most layers, which rotate otherwise; what a block adds is normed too."""

from collections.abc import Mapping
from typing import Any, ClassVar

from penstock.core.errors import ConfigError
from penstock.core.hf_config import count, number
from penstock.nn.config import POSITIVE, THETA, DecoderConfig, RopeConfig, read_decoder, read_rope, typed_windows
from penstock.nn.layers import Attention, Block, GatedMLP
from penstock.nn.linear import Shard
from penstock.nn.models.decoder import WEIGHTS, Decoder, WeightMap
from penstock.nn.models.gemma import GemmaRMSNorm

# what transformers takes where config.json has no such key
DEFAULTS = {
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131072,
    "num_key_value_heads": 4,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
UNSUPPORTED = ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention")


class Gemma3(Decoder):
    norm = GemmaRMSNorm
    weights: ClassVar[WeightMap] = {
        **WEIGHTS,
        "mixer_post_norm": ("post_attention_layernorm",),
        "feed_forward_norm": ("pre_feedforward_layernorm",),
        "feed_forward_post_norm": ("post_feedforward_layernorm",),
    }

    @classmethod
    def block(cls, config: DecoderConfig, layer: int, shard: Shard) -> Block:
        mixer, feed_forward = Attention(config, layer, shard, cls.norm), GatedMLP(config, shard)
        return Block(config, mixer, feed_forward, cls.norm, post_norms=True)

    @staticmethod
    def read_config(hf: Mapping[str, Any]) -> DecoderConfig:
        hf = DEFAULTS | dict(hf)
        for name in UNSUPPORTED:
            if hf.get(name):
                raise ConfigError(f"config.json: {name} is {hf[name]!r}, supported is none", name)
        bias = bool(hf.get("attention_bias", False))
        return read_decoder(
            _with_rope(hf, "full_attention", number(hf, "rope_theta", 1e6, *THETA), hf.get("rope_scaling")),
            windows=_windows(hf),
            window_rope=_window_rope(hf),
            scaled_positions=True,
            scale=number(hf, "query_pre_attn_scalar", 256, *POSITIVE) ** -0.5,
            embedding_scale=count(hf, "hidden_size") ** 0.5,
            qkv_bias=bias,
            o_bias=bias,
            qk_norm=True,
        )


def _windows(hf: Mapping[str, Any]) -> tuple[int | None, ...]:
    """By `layer_types`, or on all layers but each one that completes a pattern."""
    window = count(hf, "sliding_window")
    if hf.get("layer_types") is not None:
        return typed_windows(hf, window)
    layers, pattern = count(hf, "num_hidden_layers"), count(hf, "sliding_window_pattern", 6)
    return tuple(window if (i + 1) % pattern else None for i in range(layers))


def _window_rope(hf: Mapping[str, Any]) -> RopeConfig:
    local = _with_rope(hf, "sliding_attention", number(hf, "rope_local_base_freq", 1e4, *THETA), None)
    return read_rope(local, count(hf, "head_dim"))


def _with_rope(hf: Mapping[str, Any], kind: str, theta: Any, scaling: Any) -> dict[str, Any]:
    """With the frequencies of one kind of layers where other architectures have theirs."""
    given = (hf.get("rope_parameters") or {}).get(kind) or {}
    return {**hf, "rope_theta": theta, "rope_parameters": {**given, **(scaling or {})}, "rope_scaling": None}
