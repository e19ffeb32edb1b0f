"""How families of models write tool calls: one parser each."""

from __future__ import annotations

from penstock.text.tools.base import ToolParser
from penstock.text.tools.deepseek_v3 import DeepSeekV3
from penstock.text.tools.deepseek_v31 import DeepSeekV31
from penstock.text.tools.glm45 import Glm45
from penstock.text.tools.granite import Granite
from penstock.text.tools.hermes import Hermes
from penstock.text.tools.internlm import InternLm
from penstock.text.tools.jamba import Jamba
from penstock.text.tools.kimi_k2 import KimiK2
from penstock.text.tools.llama3_json import Llama3Json
from penstock.text.tools.minimax_m2 import MiniMaxM2
from penstock.text.tools.mistral import Mistral
from penstock.text.tools.olmo3 import Olmo3
from penstock.text.tools.phi4_mini import Phi4Mini
from penstock.text.tools.pythonic import Pythonic
from penstock.text.tools.qwen3_coder import Qwen3Coder
from penstock.text.tools.seed_oss import SeedOss

# by vLLM's names; of those whose signs a chat template has, the first is meant
PARSERS: dict[str, type[ToolParser]] = {
    "qwen3_coder": Qwen3Coder,
    "seed_oss": SeedOss,
    "minimax_m2": MiniMaxM2,
    "glm45": Glm45,
    "deepseek_v3": DeepSeekV3,
    "deepseek_v31": DeepSeekV31,
    "kimi_k2": KimiK2,
    "mistral": Mistral,
    "granite": Granite,
    "internlm": InternLm,
    "phi4_mini_json": Phi4Mini,
    "olmo3": Olmo3,
    "pythonic": Pythonic,
    "llama3_json": Llama3Json,
    "jamba": Jamba,
    "hermes": Hermes,
}
# vLLM's other names for them
PARSERS |= {
    "hunyuan_a13b": Jamba,
    "llama4_json": Llama3Json,
    "llama4_pythonic": Pythonic,
    "minimax": Jamba,
    "qwen3_xml": Qwen3Coder,
}
# of models whose chat templates do not say it: model_type in config.json -> parser
ARCHITECTURES = {
    "deepseek_v3": "deepseek_v3",
    "granite": "granite",
    "llama": "llama3_json",
    "mistral": "mistral",
    "phi3": "phi4_mini_json",
    "qwen2": "hermes",
    "qwen2_moe": "hermes",
    "qwen3": "hermes",
    "qwen3_moe": "hermes",
    "seed_oss": "seed_oss",
}


def detected(template: str, model_type: str) -> type[ToolParser] | None:
    """The parser that a chat template is written for, or else an architecture's; None where neither says one."""
    for parser in PARSERS.values():
        if parser.signs and all(sign in template for sign in parser.signs):
            return parser
    name = ARCHITECTURES.get(model_type)
    return None if name is None else PARSERS[name]
