"""Qwen3, dense: Q and K are normed per head before the rotation."""

from collections.abc import Mapping
from typing import Any

from penstock.nn.config import DecoderConfig, late_windows, read_decoder
from penstock.nn.models.decoder import Decoder

# what transformers takes where config.json has no such key
DEFAULTS = {"max_position_embeddings": 32768, "num_key_value_heads": 32, "head_dim": 128}


class Qwen3(Decoder):
    @staticmethod
    def read_config(hf: Mapping[str, Any]) -> DecoderConfig:
        hf = DEFAULTS | dict(hf)
        bias = bool(hf.get("attention_bias", False))
        return read_decoder(hf, windows=late_windows(hf), qkv_bias=bias, o_bias=bias, qk_norm=True)
