"""Qwen2 and Qwen2.5: biases on Q, K and V; a window on the later layers where config.json asks for one."""

from collections.abc import Mapping
from typing import Any

from penstock.nn.config import DecoderConfig, late_windows, read_decoder
from penstock.nn.models.decoder import Decoder


class Qwen2(Decoder):
    @staticmethod
    def read_config(hf: Mapping[str, Any]) -> DecoderConfig:
        return read_decoder(hf, windows=late_windows(hf), qkv_bias=True)
