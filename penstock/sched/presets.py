"""Devices and models by name: data sheets, and the geometry that a config.json describes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.core.device import DeviceModel, Experts, Latents, ModelShape, TowerShape
from penstock.core.hf_config import count, mixed_windows, text_config

# Data sheets of the makers: dense bfloat16, memory, and half of what they give for links in both directions together.
# Hosts are behind PCIe 5.0 x16 where a value is named, 63e9 bytes/s of which four fifths are usable; else behind 4.0.
DEVICES = {
    "a100": DeviceModel(peak_flops=312e12, bandwidth=2.039e12, memory=80 * 10**9, link_bandwidth=300e9),
    "h100": DeviceModel(
        peak_flops=989e12, bandwidth=3.35e12, memory=80 * 10**9, link_bandwidth=450e9, host_bandwidth=50e9
    ),
    # no data sheet is public; as vendors of servers with it say
    "h20": DeviceModel(
        peak_flops=148e12, bandwidth=4.0e12, memory=96 * 10**9, link_bandwidth=450e9, host_bandwidth=50e9
    ),
    "h200": DeviceModel(
        peak_flops=989e12, bandwidth=4.8e12, memory=141 * 10**9, link_bandwidth=450e9, host_bandwidth=50e9
    ),
    "l4": DeviceModel(peak_flops=121e12, bandwidth=0.3e12, memory=24 * 10**9),  # 242e12 is with sparsity
    "l40s": DeviceModel(peak_flops=362e12, bandwidth=0.864e12, memory=48 * 10**9),
    # there is no public data sheet: 376 TFLOPS is what vendors of Atlas A2 servers name for their larger variant, where
    # xLLM's own model takes 390; 1.6 TB/s is xLLM's; seven HCCS links of 56 GB/s both ways together
    "ascend-910b": DeviceModel(peak_flops=376e12, bandwidth=1.6e12, memory=64 * 10**9, link_bandwidth=196e9),
}


def _every_sixth(layers: int, window: int) -> tuple[int | None, ...]:
    """Windows on all layers but each sixth, as Gemma 3 has them."""
    return tuple(window if (i + 1) % 6 else None for i in range(layers))


GEOMETRIES = {
    "qwen3-0.6b": ModelShape(
        layers=28, hidden=1024, heads=16, kv_heads=8, head_dim=128, intermediate=3072, vocab=151936, tied=True
    ),
    "qwen3-8b": ModelShape(
        layers=36, hidden=4096, heads=32, kv_heads=8, head_dim=128, intermediate=12288, vocab=151936
    ),
    "qwen3-32b": ModelShape(
        layers=64, hidden=5120, heads=64, kv_heads=8, head_dim=128, intermediate=25600, vocab=151936
    ),
    "qwen-7b": ModelShape(
        layers=32, hidden=4096, heads=32, kv_heads=32, head_dim=128, intermediate=11008, vocab=151936
    ),
    "qwen2-7b": ModelShape(
        layers=28, hidden=3584, heads=28, kv_heads=4, head_dim=128, intermediate=18944, vocab=152064
    ),
    "qwen2.5-vl-7b": ModelShape(
        layers=28,
        hidden=3584,
        heads=28,
        kv_heads=4,
        head_dim=128,
        intermediate=18944,
        vocab=152064,
        vision=TowerShape(
            layers=32,
            hidden=1280,
            intermediate=3420,
            patch_values=3 * 2 * 14 * 14,
            merge=2,
            window=64,
            full_layers=4,
            width=3584,
        ),
    ),
    "qwen2.5-32b": ModelShape(
        layers=64, hidden=5120, heads=40, kv_heads=8, head_dim=128, intermediate=27648, vocab=152064
    ),
    "llama-2-70b": ModelShape(
        layers=80, hidden=8192, heads=64, kv_heads=8, head_dim=128, intermediate=28672, vocab=32000
    ),
    "gemma-3-27b": ModelShape(
        layers=62,
        hidden=5376,
        heads=32,
        kv_heads=16,
        head_dim=128,
        intermediate=21504,
        vocab=262208,
        tied=True,
        windows=_every_sixth(62, 1024),
    ),
    "llama-3.1-8b": ModelShape(
        layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128, intermediate=14336, vocab=128256
    ),
    "mixtral-8x7b": ModelShape(
        layers=32,
        hidden=4096,
        heads=32,
        kv_heads=8,
        head_dim=128,
        intermediate=14336,
        vocab=32000,
        experts=Experts(count=8, per_token=2, intermediate=14336),
    ),
    "qwen3-30b-a3b": ModelShape(
        layers=48,
        hidden=2048,
        heads=32,
        kv_heads=4,
        head_dim=128,
        intermediate=6144,
        vocab=151936,
        experts=Experts(count=128, per_token=8, intermediate=768),
    ),
    "qwen3-235b-a22b": ModelShape(
        layers=94,
        hidden=4096,
        heads=64,
        kv_heads=4,
        head_dim=128,
        intermediate=12288,
        vocab=151936,
        experts=Experts(count=128, per_token=8, intermediate=1536),
    ),
    # and R1; published in 8 bits
    "deepseek-v3": ModelShape(
        layers=61,
        hidden=7168,
        heads=128,
        kv_heads=128,
        head_dim=192,
        intermediate=18432,
        vocab=129280,
        layer_bits=8.0,
        experts=Experts(count=256, per_token=8, intermediate=2048, shared_intermediate=2048, dense_layers=3),
        latents=Latents(kv_rank=512, rope_dim=64, nope_dim=128, value_dim=128, q_rank=1536),
    ),
}


def read_shape(config: Mapping[str, Any]) -> ModelShape:
    """The geometry that a config.json of a decoder describes. Raises ConfigError naming what is missing."""
    whole, config = config, text_config(config)
    hidden, heads = count(config, "hidden_size"), count(config, "num_attention_heads")
    latents = _latents(config)
    width = hidden // heads if latents is None else latents.nope_dim + latents.rope_dim
    return ModelShape(
        layers=count(config, "num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=count(config, "num_key_value_heads", heads),
        head_dim=count(config, "head_dim", width) if latents is None else width,
        intermediate=count(config, "intermediate_size"),
        vocab=count(config, "vocab_size"),
        tied=bool(config.get("tie_word_embeddings", False)),
        windows=mixed_windows(config),
        experts=_experts(config),
        latents=latents,
        vision=_tower(whole, hidden),
    )


def _tower(config: Mapping[str, Any], width: int) -> TowerShape | None:
    """As Qwen2.5-VL spells it; None for others, of which nothing is predicted."""
    tower = config.get("vision_config")
    if not isinstance(tower, Mapping) or "fullatt_block_indexes" not in tower:
        return None
    patch = count(tower, "patch_size", 14)
    return TowerShape(
        layers=count(tower, "depth"),
        hidden=count(tower, "hidden_size"),
        intermediate=count(tower, "intermediate_size"),
        patch_values=count(tower, "in_channels", 3) * count(tower, "temporal_patch_size", 2) * patch * patch,
        merge=count(tower, "spatial_merge_size", 2),
        window=(count(tower, "window_size", 112) // patch) ** 2,
        full_layers=len(tower["fullatt_block_indexes"]),
        width=count(tower, "out_hidden_size", width),
    )


def _experts(config: Mapping[str, Any]) -> Experts | None:
    """As DeepSeek, Qwen and Mixtral spell them. Layers with a dense MLP are taken for the first ones."""
    names = ("n_routed_experts", "num_experts", "num_local_experts")
    name = next((name for name in names if config.get(name) is not None), None)
    if name is None:
        return None
    width = count(config, "moe_intermediate_size", config.get("intermediate_size"))
    dense = count(config, "first_k_dense_replace", 0, least=0)
    only = config.get("mlp_only_layers")
    if isinstance(only, list):
        dense = max(dense, len(only))
    return Experts(
        count=count(config, name),
        per_token=count(config, "num_experts_per_tok"),
        intermediate=width,
        shared_intermediate=count(config, "shared_expert_intermediate_size", 0, least=0)
        or width * count(config, "n_shared_experts", 0, least=0),
        dense_layers=min(dense, count(config, "num_hidden_layers")),
    )


def _latents(config: Mapping[str, Any]) -> Latents | None:
    if config.get("kv_lora_rank") is None:
        return None
    return Latents(
        kv_rank=count(config, "kv_lora_rank"),
        rope_dim=count(config, "qk_rope_head_dim"),
        nope_dim=count(config, "qk_nope_head_dim"),
        value_dim=count(config, "v_head_dim"),
        q_rank=None if config.get("q_lora_rank") is None else count(config, "q_lora_rank"),
    )
