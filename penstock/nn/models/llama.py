"""Llama 2, 3, 3.1 to 3.3 and the many checkpoints of their shape."""

from collections.abc import Mapping
from typing import Any

from penstock.nn.config import DecoderConfig, read_decoder
from penstock.nn.models.decoder import Decoder

# what transformers takes where config.json has no such key
DEFAULTS = {"max_position_embeddings": 2048}


class Llama(Decoder):
    @staticmethod
    def read_config(hf: Mapping[str, Any]) -> DecoderConfig:
        hf = DEFAULTS | dict(hf)
        bias = bool(hf.get("attention_bias", False))
        return read_decoder(hf, qkv_bias=bias, o_bias=bias, mlp_bias=bool(hf.get("mlp_bias", False)))
