"""Mistral: Llama's shape, with one sliding window on every layer where config.json has one."""

from collections.abc import Mapping
from typing import Any

from penstock.nn.config import DecoderConfig, read_decoder
from penstock.nn.models.decoder import Decoder


class Mistral(Decoder):
    @staticmethod
    def read_config(hf: Mapping[str, Any]) -> DecoderConfig:
        window = hf.get("sliding_window", 4096)  # the architecture's own default where the key is missing
        return read_decoder(hf, windows=(window,) * hf.get("num_hidden_layers", 0))
