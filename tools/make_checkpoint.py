"""Write a random checkpoint with the geometry of a real model: speed does not depend on what the weights say.

usage: python tools/make_checkpoint.py GEOMETRY FOLDER [--device cuda] [--layers N]      (needs transformers)

The tokenizer is the demo model's: its ids are valid in the larger vocabularies. For models that see, it has tokens of
their own that stand for images, and a chat template that writes them. What is like DeepSeek-V3 has a layer that
predicts further tokens, too.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")

# tokens behind the demo model's vocabulary
MEDIA_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
FIRST = 4096
SEES: dict[str, Any] = {
    "vision_start_token_id": FIRST,
    "vision_end_token_id": FIRST + 1,
    "image_token_id": FIRST + 2,
    "video_token_id": FIRST + 3,
}
SEEING_TEMPLATE = """{%- for message in messages -%}
<|{{ message.role }}|>
{% if message.content is string -%}
{{ message.content }}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type == "text" -%}{{ part.text }}
{%- else -%}<|vision_start|><|{{ part.type }}_pad|><|vision_end|>{%- endif -%}
{%- endfor -%}
{%- endif %}
{% endfor -%}
{%- if add_generation_prompt -%}<|assistant|>
{% endif -%}
"""

QWEN3: dict[str, Any] = {"max_position_embeddings": 40960, "vocab_size": 151936, "rms_norm_eps": 1e-6, "head_dim": 128}
QWEN3_ROPE = {"rope_type": "default", "rope_theta": 1e6}
LLAMA31_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

DEEPSEEK: dict[str, Any] = {
    "max_position_embeddings": 163840,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 40.0,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096,
    },
}
V2_LITE: dict[str, Any] = {
    "vocab_size": 102400,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "first_k_dense_replace": 1,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1408,
    "n_shared_experts": 2,
}


def size(hidden: int, layers: int, heads: int, kv_heads: int, intermediate: int) -> dict[str, int]:
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": intermediate,
    }


def experts(count: int, per_token: int, width: int) -> dict[str, Any]:
    """As Qwen3 configures them."""
    return {
        "num_experts": count,
        "num_experts_per_tok": per_token,
        "moe_intermediate_size": width,
        "norm_topk_prob": True,
    }


# name -> (model_type, config); the published sizes
GEOMETRIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-tiny": (
        "qwen3",
        {**QWEN3, **size(256, 4, 8, 4, 768), "head_dim": 32, "vocab_size": 8192, "rope_parameters": QWEN3_ROPE},
    ),
    "qwen3-0.6b": (
        "qwen3",
        {**QWEN3, **size(1024, 28, 16, 8, 3072), "tie_word_embeddings": True, "rope_parameters": QWEN3_ROPE},
    ),
    "qwen3-1.7b": (
        "qwen3",
        {**QWEN3, **size(2048, 28, 16, 8, 6144), "tie_word_embeddings": True, "rope_parameters": QWEN3_ROPE},
    ),
    "qwen3-8b": ("qwen3", {**QWEN3, **size(4096, 36, 32, 8, 12288), "rope_parameters": QWEN3_ROPE}),
    "qwen3-moe-tiny": (
        "qwen3_moe",
        {
            **QWEN3,
            **size(256, 4, 8, 4, 768),
            **experts(16, 4, 192),
            "head_dim": 32,
            "vocab_size": 8192,
            "rope_parameters": QWEN3_ROPE,
        },
    ),
    # one layer in four of the next one, and an eighth of its experts
    "qwen3-moe-1.7b": (
        "qwen3_moe",
        {**QWEN3, **size(2048, 12, 32, 4, 6144), **experts(16, 8, 768), "rope_parameters": QWEN3_ROPE},
    ),
    "qwen3-30b-a3b": (
        "qwen3_moe",
        {**QWEN3, **size(2048, 48, 32, 4, 6144), **experts(128, 8, 768), "rope_parameters": QWEN3_ROPE},
    ),
    "qwen2.5-vl-tiny": (
        "qwen2_5_vl",
        {
            **SEES,
            "text_config": {
                **size(256, 4, 8, 4, 768),
                "vocab_size": 8192,
                "bos_token_id": None,
                "eos_token_id": 2,
                "max_position_embeddings": 32768,
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 6, 6]},
            },
            "vision_config": {
                "depth": 4,
                "hidden_size": 128,
                "num_heads": 4,
                "intermediate_size": 256,
                "out_hidden_size": 256,
                "fullatt_block_indexes": [1, 3],
                "tokens_per_second": 2,
            },
        },
    ),
    "qwen2.5-vl-0.2b": (
        "qwen2_5_vl",
        {
            **SEES,
            "text_config": {
                **size(1024, 12, 16, 4, 2816),
                "vocab_size": 32000,
                "bos_token_id": None,
                "eos_token_id": 2,
                "max_position_embeddings": 32768,
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [8, 12, 12]},
            },
            "vision_config": {
                "depth": 12,
                "hidden_size": 640,
                "num_heads": 10,
                "intermediate_size": 1708,
                "out_hidden_size": 1024,
                "fullatt_block_indexes": [3, 7, 11],
                "tokens_per_second": 2,
            },
        },
    ),
    "deepseek-tiny": (
        "deepseek_v3",
        {
            **size(256, 4, 8, 8, 768),
            **DEEPSEEK,
            "q_lora_rank": 96,
            "kv_lora_rank": 64,
            "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 16,
            "v_head_dim": 32,
            "n_routed_experts": 16,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 192,
            "first_k_dense_replace": 1,
            "n_group": 4,
            "topk_group": 2,
            "vocab_size": 8192,
        },
    ),
    # a third of the layers of DeepSeek-V2-Lite, and a quarter of its experts
    "deepseek-2b": (
        "deepseek_v2",
        {**size(2048, 9, 16, 16, 10944), **DEEPSEEK, **V2_LITE, "n_routed_experts": 16},
    ),
    "deepseek-v2-lite": (
        "deepseek_v2",
        {**size(2048, 27, 16, 16, 10944), **DEEPSEEK, **V2_LITE, "n_routed_experts": 64},
    ),
    "mixtral-8x7b": (
        "mixtral",
        {
            **size(4096, 32, 32, 8, 14336),
            "vocab_size": 32000,
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-5,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        },
    ),
    "llama-3.1-8b": (
        "llama",
        {
            **size(4096, 32, 32, 8, 14336),
            "vocab_size": 128256,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_parameters": LLAMA31_ROPE,
        },
    ),
}


def write(name: str, folder: Path, device: str = "cpu", layers: int | None = None) -> None:
    """Weights are bf16, normal, scaled so that activations stay in range. `device` is where they are drawn.

    `layers` instead of as many as the real model has.
    """
    import torch
    import transformers
    from transformers import AutoConfig
    from transformers.initialization import no_init_weights

    sys.path.insert(0, str(ROOT))
    from tools.mtp import FurtherTokens, with_further_tokens

    model_type, geometry = GEOMETRIES[name]
    sees = "vision_config" in geometry
    if layers is not None:
        key = {"num_hidden_layers": layers}
        geometry = geometry | ({"text_config": geometry["text_config"] | key} if sees else key)
    auto = transformers.AutoModelForImageTextToText if sees else transformers.AutoModelForCausalLM
    config = AutoConfig.for_model(model_type, **geometry)
    torch.manual_seed(0)
    with no_init_weights(), torch.device(device):
        model = auto.from_config(config, dtype=torch.bfloat16)
        further = FurtherTokens(model) if model_type == "deepseek_v3" else None
    parts = [model] if further is None else [model, further]
    with torch.no_grad():
        for parameter in (parameter for part in parts for parameter in part.parameters()):
            if parameter.ndim == 1:
                parameter.fill_(1.0)
            else:
                ins = parameter.shape[-1] if parameter.ndim < 4 else parameter[0].numel()  # a patch's are all of it
                parameter.normal_(std=ins**-0.5)
    model.save_pretrained(folder, state_dict=None if further is None else with_further_tokens(model, further))
    for file in TOKENIZER:
        shutil.copy(ROOT / "penstock" / "demo" / file, folder)
    if sees:
        _add_media_tokens(folder)


def _add_media_tokens(folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer

    path = folder / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in MEDIA_TOKENS])
    assert tokenizer.token_to_id(MEDIA_TOKENS[0]) == FIRST
    tokenizer.save(str(path))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": SEEING_TEMPLATE}))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("geometry", choices=GEOMETRIES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--layers", type=int, default=None)
    options = parser.parse_args()
    write(options.geometry, options.folder, options.device, options.layers)
    return 0


if __name__ == "__main__":
    sys.exit(main())
