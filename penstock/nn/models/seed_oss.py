"""Seed-OSS: Llama's shape, with biases on Q, K and V."""

from collections.abc import Mapping
from typing import Any

from penstock.nn.config import DecoderConfig, read_decoder
from penstock.nn.models.decoder import Decoder

# what transformers takes where config.json has no such key
DEFAULTS = {"attention_bias": True, "head_dim": 128, "max_position_embeddings": 524288, "num_key_value_heads": 8}


class SeedOss(Decoder):
    @staticmethod
    def read_config(hf: Mapping[str, Any]) -> DecoderConfig:
        hf = DEFAULTS | dict(hf)
        return read_decoder(
            hf,
            qkv_bias=bool(hf["attention_bias"]),
            o_bias=bool(hf.get("attention_out_bias", False)),
            mlp_bias=bool(hf.get("mlp_bias", False)),
        )
