"""Qwen2 and Qwen2.5: biases on Q, K and V; a window on the later layers where config.json asks for one."""

from collections.abc import Mapping
from typing import Any

from penstock.nn.config import DecoderConfig, late_windows, read_decoder
from penstock.nn.models.decoder import Decoder

# what transformers takes where config.json has no such key
DEFAULTS = {"max_position_embeddings": 32768, "num_key_value_heads": 32}


class Qwen2(Decoder):
    @staticmethod
    def read_config(hf: Mapping[str, Any]) -> DecoderConfig:
        hf = DEFAULTS | dict(hf)
        return read_decoder(hf, windows=late_windows(hf), qkv_bias=True)
