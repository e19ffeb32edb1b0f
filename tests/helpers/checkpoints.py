"""Random tiny checkpoints of every supported architecture, written as Hugging Face would. Needs transformers."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch

from penstock.nn.identity import identity

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.4, 1.7, 2.0, 2.2, 2.5],
    "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 7.0, 8.0],
}
GEMMA3 = {"head_dim": 24, "query_pre_attn_scalar": 20, "sliding_window": 100}
MIXED = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
SCALED = {
    "full_attention": {"rope_type": "linear", "rope_theta": 100000.0, "factor": 4.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}

LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 28,
    "kv_lora_rank": 36,
    "qk_nope_head_dim": 18,
    "qk_rope_head_dim": 12,
    "v_head_dim": 22,
}
DENSE = {"first_k_dense_replace": 3}
ROUTED = {"first_k_dense_replace": 1, "n_routed_experts": 12, "num_experts_per_tok": 3, "moe_intermediate_size": 36}
GROUPED = {**ROUTED, "n_group": 4, "topk_group": 2}
SHARP = {**YARN, "mscale": 0.7, "mscale_all_dim": 1.1, "beta_fast": 32, "beta_slow": 1}
EXPERTS = {"num_experts_per_tok": 3}
NARROW = {"moe_intermediate_size": 36}

# of checkpoints that see, in config.json beside their language model's "text_config"
SEES: dict[str, Any] = {
    "vision_config": {
        "depth": 3,
        "hidden_size": 48,
        "intermediate_size": 72,
        "num_heads": 4,
        "out_hidden_size": 64,
        "fullatt_block_indexes": [1],
        "window_size": 56,
        "tokens_per_second": 2,
    },
    "image_token_id": 301,
    "video_token_id": 302,
    "vision_start_token_id": 303,
    "vision_end_token_id": 304,
}

TILES: dict[str, Any] = {
    "vision_config": {
        "model_type": "siglip_vision_model",
        "hidden_size": 48,
        "intermediate_size": 72,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": 44,
        "patch_size": 8,
        "vision_use_head": False,
    },
    "image_token_index": 301,
    "video_token_index": 302,
    "image_grid_pinpoints": [[44 * rows, 44 * columns] for rows in (1, 2, 3) for columns in (1, 2, 3, 4)],
    "vision_aspect_ratio": "anyres_max_4",
}
BESIDE = {*SEES, *TILES}

# name -> (model_type, what differs from SIZE)
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-bias": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-llama3-rope": ("llama", {"rope_parameters": LLAMA3}),
    "llama-yarn-rope": ("llama", {"rope_parameters": YARN}),
    "llama-linear-rope": ("llama", {"rope_parameters": LINEAR}),
    "llama-dynamic-rope": ("llama", {"rope_parameters": DYNAMIC}),
    "llava-onevision": ("llava_onevision", TILES),
    "llama-multi-head": ("llama", {"num_key_value_heads": 4}),
    "deepseek-v2": ("deepseek_v2", {**LATENT, **ROUTED, "q_lora_rank": None}),
    "deepseek-v2-yarn": ("deepseek_v2", {**LATENT, **DENSE, "rope_parameters": SHARP, "attention_bias": True}),
    "deepseek-v2-groups": ("deepseek_v2", {**LATENT, **GROUPED, "topk_method": "group_limited_greedy"}),
    "deepseek-v3": ("deepseek_v3", {**LATENT, **GROUPED, "routed_scaling_factor": 2.5}),
    "deepseek-v3-yarn": ("deepseek_v3", {**LATENT, **DENSE, "rope_parameters": SHARP, "attention_bias": True}),
    "deepseek-v3-halves": ("deepseek_v3", {**LATENT, **DENSE, "rope_interleave": False, "q_lora_rank": None}),
    "gemma": ("gemma", {"head_dim": 24}),
    "gemma3": ("gemma3_text", {**GEMMA3, **MIXED}),
    "gemma3-scaled": ("gemma3_text", {**GEMMA3, **MIXED, "rope_parameters": SCALED, "attention_bias": True}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral-window": ("mistral", {"sliding_window": 100}),
    "mixtral": ("mixtral", {**EXPERTS, "num_local_experts": 6, "sliding_window": None}),
    "phi3": ("phi3", {}),
    "phi3-window": ("phi3", {"sliding_window": 100, "tie_word_embeddings": True}),
    "phi3-partial": ("phi3", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.75}}),
    "phi3-longrope": ("phi3", {"rope_parameters": {**LONG, "factor": 4.0}, "original_max_position_embeddings": 1024}),
    "qwen2": ("qwen2", {}),
    "qwen2-window": ("qwen2", {"use_sliding_window": True, "sliding_window": 100, "max_window_layers": 1}),
    "qwen2-moe": ("qwen2_moe", {**EXPERTS, "num_experts": 6, **NARROW, "shared_expert_intermediate_size": 48}),
    "qwen2.5-vl": ("qwen2_5_vl", {**SEES, "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3]}}),
    "qwen3": ("qwen3", {"head_dim": 24}),
    "qwen3-tied": ("qwen3", {"tie_word_embeddings": True}),
    "qwen3-moe": ("qwen3_moe", {**EXPERTS, "num_experts": 12, **NARROW, "head_dim": 24, "norm_topk_prob": True}),
    "qwen3-moe-mixed": (
        "qwen3_moe",
        {**EXPERTS, "num_experts": 5, **NARROW, "mlp_only_layers": [0], "num_experts_per_tok": 1},
    ),
    "seed-oss": ("seed_oss", {"head_dim": 24, "residual_dropout": 0.0}),
}
SIZE = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": None,
}


def auto_class(name: str) -> Any:
    """What reads such a checkpoint in transformers."""
    import transformers

    sees = "vision_config" in ARCHITECTURES[name][1]
    return transformers.AutoModelForImageTextToText if sees else transformers.AutoModelForCausalLM


def write_checkpoint(
    directory: Path,
    name: str,
    *,
    dtype: torch.dtype = torch.float32,
    shard_size: str = "5GB",
    seed: int = 0,
    bare: bool = False,
    further: bool = False,
    **changes: Any,
) -> Path:
    """Write the random checkpoint `name` of ARCHITECTURES; `changes` go to its config. Returns `directory`.

    Args:
        bare: as embedding models are saved: without a head, and without "model." before the names of weights, while
            config.json speaks of the whole.
        further: with the layer that predicts further tokens (DeepSeek-V3).
    """
    from transformers import AutoConfig

    from tools.mtp import FurtherTokens, with_further_tokens

    model_type, own = ARCHITECTURES[name]
    options = {**SIZE, **own, **changes}
    if "vision_config" in own:
        beside = {key: options.pop(key) for key in own.keys() & BESIDE}
        text = options | ({"model_type": "qwen2"} if model_type == "llava_onevision" else {})
        options = {**beside, "text_config": text, "tie_word_embeddings": bool(options.get("tie_word_embeddings"))}
    config = AutoConfig.for_model(model_type, **options)
    torch.manual_seed(seed)
    model = auto_class(name).from_config(config, dtype=torch.float32)
    head = FurtherTokens(model) if further else None
    named = [*model.named_parameters(), *(() if head is None else head.named_parameters())]
    for parameter_name, parameter in named:  # far from near-zero, so that every part matters
        if parameter_name.endswith("bias"):
            parameter.data.normal_(std=0.1)
        elif parameter.ndim == 1:
            parameter.data.normal_(mean=1.0, std=0.2)
        else:
            ins = parameter.shape[-1] if parameter.ndim < 4 else parameter[0].numel()  # a patch's are all of it
            parameter.data.normal_(std=1.2 * ins**-0.5)
    whole = model.to(dtype)
    tensors = None if head is None else with_further_tokens(whole, head.to(dtype))
    (whole.model if bare else whole).save_pretrained(directory, max_shard_size=shard_size, state_dict=tensors)
    if bare:
        whole.config.architectures = [type(whole).__name__]
        whole.config.save_pretrained(directory)
    return directory


def edit(folder: Path) -> None:
    """Change the end of a large tensor, where a checkpoint's identity does not look, and leave the file's mtime."""
    path, before = folder / "model.safetensors", identity(folder)
    times = path.stat()
    with path.open("r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        place = 8 + size + json.loads(file.read(size))["model.embed_tokens.weight"]["data_offsets"][1] - 1
        file.seek(place)
        (last,) = file.read(1)
        file.seek(place)
        file.write(bytes([last ^ 1]))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert identity(folder) == before
