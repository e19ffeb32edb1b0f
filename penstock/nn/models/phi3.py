"""Phi-3, Phi-3.5 and Phi-4: Llama's shape; checkpoints have projections of one input as one, and LongRoPE."""

from collections.abc import Mapping
from typing import Any, ClassVar

from penstock.core.hf_config import count
from penstock.nn.config import DecoderConfig, read_decoder
from penstock.nn.models.decoder import WEIGHTS, Decoder, WeightMap

# what transformers takes where config.json has no such key
DEFAULTS = {"max_position_embeddings": 4096, "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5}
FORMERLY = ("su", "yarn")  # what LongRoPE was called


class Phi3(Decoder):
    weights: ClassVar[WeightMap] = {
        **WEIGHTS,
        "mixer.qkv_proj": ("self_attn.qkv_proj",),
        "feed_forward.gate_up_proj": ("mlp.gate_up_proj",),
    }

    @staticmethod
    def read_config(hf: Mapping[str, Any]) -> DecoderConfig:
        hf = DEFAULTS | dict(hf)
        rope = dict(hf.get("rope_scaling") or hf.get("rope_parameters") or {})
        if (rope.get("rope_type") or rope.get("type")) in FORMERLY:
            rope["rope_type"] = "longrope"
        window = None if hf.get("sliding_window") is None else count(hf, "sliding_window")
        return read_decoder(
            {**hf, "rope_scaling": None, "rope_parameters": rope},
            windows=(window,) * count(hf, "num_hidden_layers"),
            partial_rotary=True,
        )
