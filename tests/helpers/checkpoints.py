"""Random tiny checkpoints of every supported architecture, written as Hugging Face would. Needs transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

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
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}

# name -> (model_type, what differs from SIZE)
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-bias": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-llama3-rope": ("llama", {"rope_parameters": LLAMA3}),
    "llama-yarn-rope": ("llama", {"rope_parameters": YARN}),
    "llama-linear-rope": ("llama", {"rope_parameters": LINEAR}),
    "llama-dynamic-rope": ("llama", {"rope_parameters": DYNAMIC}),
    "llama-multi-head": ("llama", {"num_key_value_heads": 4}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral-window": ("mistral", {"sliding_window": 100}),
    "qwen2": ("qwen2", {}),
    "qwen2-window": ("qwen2", {"use_sliding_window": True, "sliding_window": 100, "max_window_layers": 1}),
    "qwen3": ("qwen3", {"head_dim": 24}),
    "qwen3-tied": ("qwen3", {"tie_word_embeddings": True}),
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
}


def write_checkpoint(
    directory: Path,
    name: str,
    *,
    dtype: torch.dtype = torch.float32,
    shard_size: str = "5GB",
    seed: int = 0,
    bare: bool = False,
    **changes: Any,
) -> Path:
    """Write the random checkpoint `name` of ARCHITECTURES; `changes` go to its config. Returns `directory`.

    Args:
        bare: as embedding models are saved: without a head, and without "model." before the names of weights, while
            config.json speaks of the whole.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    model_type, own = ARCHITECTURES[name]
    config = AutoConfig.for_model(model_type, **{**SIZE, **own, **changes})
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter_name, parameter in model.named_parameters():  # far from near-zero, so that every part matters
        if parameter_name.endswith("bias"):
            parameter.data.normal_(std=0.1)
        elif parameter.ndim == 1:
            parameter.data.normal_(mean=1.0, std=0.2)
        else:
            parameter.data.normal_(std=1.2 * parameter.shape[-1] ** -0.5)
    whole = model.to(dtype)
    (whole.model if bare else whole).save_pretrained(directory, max_shard_size=shard_size)
    if bare:
        whole.config.architectures = [type(whole).__name__]
        whole.config.save_pretrained(directory)
    return directory
