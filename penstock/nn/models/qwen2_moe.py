"""Qwen2 with experts: Qwen2's attention, and in some or all layers experts beside one for all rows, behind a gate."""

from collections.abc import Mapping
from typing import Any, ClassVar

from penstock.core.hf_config import count
from penstock.nn.config import (
    DecoderConfig,
    ExpertsConfig,
    read_decoder,
    read_routing,
    sparse_layers,
    typed_windows,
)
from penstock.nn.models.decoder import EXPERTS, WEIGHTS, Decoder, WeightMap

# what transformers takes where config.json has no such key
DEFAULTS = {
    "max_position_embeddings": 32768,
    "num_key_value_heads": 16,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
    "num_experts_per_tok": 4,
    "num_experts": 60,
}


class Qwen2MoE(Decoder):
    weights: ClassVar[WeightMap] = {
        **WEIGHTS,
        **EXPERTS,
        "feed_forward.shared_experts.gate_up_proj": ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
        "feed_forward.shared_experts.down_proj": ("mlp.shared_expert.down_proj",),
        "feed_forward.shared_expert_gate": ("mlp.shared_expert_gate",),
    }

    @staticmethod
    def read_config(hf: Mapping[str, Any]) -> DecoderConfig:
        hf = DEFAULTS | dict(hf)
        return read_decoder(
            hf,
            windows=_windows(hf),
            qkv_bias=bool(hf.get("qkv_bias", True)),
            experts=ExpertsConfig(
                routing=read_routing(hf, "num_experts", renormalised=bool(hf.get("norm_topk_prob", False))),
                width=count(hf, "moe_intermediate_size"),
                layers=sparse_layers(hf),
                shared=count(hf, "shared_expert_intermediate_size"),
                shared_gate=True,
            ),
        )


def _windows(hf: Mapping[str, Any]) -> tuple[int | None, ...] | None:
    """Where config.json has no `layer_types`, of every other layer before `max_window_layers`."""
    if not hf.get("use_sliding_window"):
        return None
    window = count(hf, "sliding_window", 4096)
    if hf.get("layer_types") is not None:
        return typed_windows(hf, window)
    last = count(hf, "max_window_layers", 28, least=0)
    return tuple(window if i % 2 == 0 and i < last else None for i in range(count(hf, "num_hidden_layers")))
