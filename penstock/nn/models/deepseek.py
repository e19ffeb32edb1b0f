"""DeepSeek V2 and V3, and R1: multi-head latent attention, and experts in all layers but the first ones."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from penstock.core.errors import ConfigError
from penstock.core.hf_config import count
from penstock.nn.config import (
    DecoderConfig,
    ExpertsConfig,
    LatentConfig,
    RopeConfig,
    deepseek_experts,
    read_decoder,
    read_rope,
)
from penstock.nn.experts import feed_forward
from penstock.nn.latent import LatentAttention
from penstock.nn.layers import Block
from penstock.nn.linear import Shard
from penstock.nn.models.decoder import EXPERTS, WEIGHTS, Decoder, WeightMap
from penstock.nn.rope import magnitude

# what transformers takes where config.json has no such key
DEFAULTS = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
V2 = DEFAULTS | {"max_position_embeddings": 2048, "moe_intermediate_size": 1407, "n_shared_experts": 2}
V3 = DEFAULTS | {
    "max_position_embeddings": 4096,
    "first_k_dense_replace": 3,
    "moe_intermediate_size": 2048,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
}


class DeepseekV2(Decoder):
    weights: ClassVar[WeightMap] = {
        **WEIGHTS,
        **EXPERTS,
        "mixer.q_proj": ("self_attn.q_proj",),
        "mixer.q_a_proj": ("self_attn.q_a_proj",),
        "mixer.q_a_norm": ("self_attn.q_a_layernorm",),
        "mixer.q_b_proj": ("self_attn.q_b_proj",),
        "mixer.kv_a_proj": ("self_attn.kv_a_proj_with_mqa",),
        "mixer.kv_a_norm": ("self_attn.kv_a_layernorm",),
        "mixer.kv_b_proj": ("self_attn.kv_b_proj",),
    }

    @staticmethod
    def read_config(hf: Mapping[str, Any]) -> DecoderConfig:
        hf = V2 | dict(hf)
        experts = deepseek_experts(hf, corrected=False)
        return _read(hf, experts, interleaved=True, mlp_bias=bool(hf.get("mlp_bias", False)))

    @classmethod
    def block(cls, config: DecoderConfig, layer: int, shard: Shard) -> Block:
        return Block(config, LatentAttention(config, shard, cls.norm), feed_forward(config, layer, shard), cls.norm)


class DeepseekV3(DeepseekV2):
    draft_weights: ClassVar[WeightMap] = {
        "token_norm": ("enorm",),
        "hidden_norm": ("hnorm",),
        "join": ("eh_proj",),
        "norm": ("shared_head.norm",),
    }

    @staticmethod
    def read_config(hf: Mapping[str, Any]) -> DecoderConfig:
        hf = V3 | dict(hf)
        experts = deepseek_experts(hf, corrected=True)
        mtp_layers = count(hf, "num_nextn_predict_layers", 1, least=0)
        return _read(hf, experts, interleaved=bool(hf.get("rope_interleave", True)), mtp_layers=mtp_layers)


def _read(hf: Mapping[str, Any], experts: ExpertsConfig | None, *, interleaved: bool, **own: Any) -> DecoderConfig:
    latent = LatentConfig(
        rank=count(hf, "kv_lora_rank"),
        rope=count(hf, "qk_rope_head_dim"),
        key=count(hf, "qk_nope_head_dim"),
        value=count(hf, "v_head_dim"),
        q_rank=None if "q_lora_rank" in hf and hf["q_lora_rank"] is None else count(hf, "q_lora_rank", 1536),
        interleaved=interleaved,
    )
    if latent.rope % 2:
        raise ConfigError(f"config.json: qk_rope_head_dim {latent.rope} is odd", "qk_rope_head_dim")
    bias, dim = bool(hf.get("attention_bias", False)), latent.key + latent.rope
    # what checkpoints say of head_dim is that of the rotated part, and of K's heads nothing is kept
    whole = {**hf, "head_dim": dim + dim % 2, "num_key_value_heads": None}
    config = read_decoder(whole, qkv_bias=bias, o_bias=bias, experts=experts, **own)
    rope = read_rope(hf, latent.rope)
    return replace(config, head_dim=dim, latent=latent, rope=rope, scale=dim**-0.5 * _sharpened(rope))


def _sharpened(rope: RopeConfig) -> float:
    """By how much YaRN makes scores larger, besides what it does to cos and sin."""
    all_dim = rope.options.get("mscale_all_dim")
    if rope.kind == "default" or not all_dim:
        return 1.0
    factor = rope.options.get("factor")
    if factor is None:
        raise ConfigError("config.json: rope_parameters.mscale_all_dim needs factor", "rope_parameters")
    return magnitude(factor, all_dim) ** 2
