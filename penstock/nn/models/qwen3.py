"""Qwen3, dense: Q and K are normed per head before the rotation."""

from collections.abc import Mapping
from typing import Any

from penstock.nn.config import DecoderConfig, late_windows, read_decoder
from penstock.nn.models.decoder import Decoder


class Qwen3(Decoder):
    @staticmethod
    def read_config(hf: Mapping[str, Any]) -> DecoderConfig:
        bias = bool(hf.get("attention_bias", False))
        return read_decoder(hf, windows=late_windows(hf), qkv_bias=bias, o_bias=bias, qk_norm=True)
