"""Qwen3 with experts: Qwen3's attention, and experts in some or all layers."""

from collections.abc import Mapping
from typing import Any, ClassVar

from penstock.core.hf_config import count
from penstock.nn.config import DecoderConfig, ExpertsConfig, late_windows, read_decoder, read_routing, sparse_layers
from penstock.nn.models.decoder import EXPERTS, WEIGHTS, Decoder, WeightMap

# what transformers takes where config.json has no such key
DEFAULTS = {
    "max_position_embeddings": 32768,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 768,
    "num_experts_per_tok": 8,
    "num_experts": 128,
}


class Qwen3MoE(Decoder):
    weights: ClassVar[WeightMap] = {**WEIGHTS, **EXPERTS}

    @staticmethod
    def read_config(hf: Mapping[str, Any]) -> DecoderConfig:
        hf = DEFAULTS | {"num_experts": hf.get("num_local_experts", 128)} | dict(hf)  # as transformers 5 writes it
        bias = bool(hf.get("attention_bias", False))
        return read_decoder(
            hf,
            windows=late_windows(hf | {"max_window_layers": 0}),  # all layers have one, or none
            qkv_bias=bias,
            o_bias=bias,
            qk_norm=True,
            experts=ExpertsConfig(
                routing=read_routing(hf, "num_experts", renormalised=bool(hf.get("norm_topk_prob", False))),
                width=count(hf, "moe_intermediate_size"),
                layers=sparse_layers(hf),
            ),
        )
