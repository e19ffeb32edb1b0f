"""The architectures that are served: the name in config.json -> the class. One file each, one line here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.core.errors import ConfigError
from penstock.nn.models.decoder import Decoder
from penstock.nn.models.deepseek import DeepseekV2, DeepseekV3
from penstock.nn.models.gemma import Gemma
from penstock.nn.models.gemma3 import Gemma3
from penstock.nn.models.llama import Llama
from penstock.nn.models.llava_onevision import LlavaOnevision
from penstock.nn.models.mistral import Mistral
from penstock.nn.models.mixtral import Mixtral
from penstock.nn.models.phi3 import Phi3
from penstock.nn.models.qwen2 import Qwen2
from penstock.nn.models.qwen2_5_vl import Qwen25VL
from penstock.nn.models.qwen2_moe import Qwen2MoE
from penstock.nn.models.qwen3 import Qwen3
from penstock.nn.models.qwen3_moe import Qwen3MoE
from penstock.nn.models.seed_oss import SeedOss

MODELS: dict[str, type[Decoder]] = {
    "DeepseekV2ForCausalLM": DeepseekV2,
    "DeepseekV3ForCausalLM": DeepseekV3,
    "Gemma3ForCausalLM": Gemma3,
    "GemmaForCausalLM": Gemma,
    "LlamaForCausalLM": Llama,
    "LlavaOnevisionForConditionalGeneration": LlavaOnevision,
    "MistralForCausalLM": Mistral,
    "MixtralForCausalLM": Mixtral,
    "Phi3ForCausalLM": Phi3,
    "Qwen2_5_VLForConditionalGeneration": Qwen25VL,
    "Qwen2ForCausalLM": Qwen2,
    "Qwen2MoeForCausalLM": Qwen2MoE,
    "Qwen3ForCausalLM": Qwen3,
    "Qwen3MoeForCausalLM": Qwen3MoE,
    "SeedOssForCausalLM": SeedOss,
}


def architecture(hf: Mapping[str, Any]) -> type[Decoder]:
    """The class for a config.json. Raises ConfigError with the list of what is supported."""
    names = hf.get("architectures") or []
    for name in names:
        whole = str(name).removesuffix("Model") + "ForCausalLM"  # a model saved without its head
        if found := MODELS.get(name) or MODELS.get(whole):
            return found
    given = ", ".join(map(str, names)) or "none"
    raise ConfigError(f"config.json: architectures is {given}; supported are {', '.join(MODELS)}", "architectures")
