"""Mixtral: Mistral's attention, and experts in all layers."""

from collections.abc import Mapping
from typing import Any, ClassVar

from penstock.core.hf_config import count
from penstock.nn.config import DecoderConfig, ExpertsConfig, read_decoder, read_routing
from penstock.nn.models.decoder import WEIGHTS, Decoder, WeightMap

# what transformers takes where config.json has no such key
DEFAULTS = {
    "max_position_embeddings": 131072,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "num_experts_per_tok": 2,
    "num_local_experts": 8,
    "rope_theta": 1e6,
}


class Mixtral(Decoder):
    weights: ClassVar[WeightMap] = {
        **WEIGHTS,
        "feed_forward.router": ("block_sparse_moe.gate",),
        "feed_forward.experts.gate_up_proj": ("block_sparse_moe.experts.*.w1", "block_sparse_moe.experts.*.w3"),
        "feed_forward.experts.down_proj": ("block_sparse_moe.experts.*.w2",),
    }

    @staticmethod
    def read_config(hf: Mapping[str, Any]) -> DecoderConfig:
        hf = DEFAULTS | dict(hf)
        layers = count(hf, "num_hidden_layers")
        window = None if hf.get("sliding_window") is None else count(hf, "sliding_window")
        return read_decoder(
            hf,
            windows=(window,) * layers,
            experts=ExpertsConfig(
                routing=read_routing(hf, "num_local_experts", renormalised=True),
                width=count(hf, "intermediate_size"),
                layers=frozenset(range(layers)),
            ),
        )
