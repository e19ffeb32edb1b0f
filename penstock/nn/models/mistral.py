"""Mistral: Llama's shape, with one sliding window on every layer where config.json has one."""

from collections.abc import Mapping
from typing import Any

from penstock.core.errors import ConfigError
from penstock.core.hf_config import count
from penstock.nn.config import DecoderConfig, read_decoder
from penstock.nn.models.decoder import Decoder

# what transformers takes where config.json has no such key
DEFAULTS = {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096}


class Mistral(Decoder):
    @staticmethod
    def read_config(hf: Mapping[str, Any]) -> DecoderConfig:
        hf = DEFAULTS | dict(hf)
        if len(set(hf.get("layer_types") or [])) > 1:
            raise ConfigError("config.json: layer_types: mixed layers are not Mistral's", "layer_types")
        window = None if hf["sliding_window"] is None else count(hf, "sliding_window")
        return read_decoder(hf, windows=(window,) * count(hf, "num_hidden_layers"))
