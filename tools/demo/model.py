"""The model: its geometry, its files, and its score on the held-out text."""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from tools.demo.corpus import VOCAB_SIZE, WINDOW
from tools.demo.text import END_OF_TEXT, SPECIALS, TURN_END

STRIDE = 256  # tokens between the starts of two evaluation windows
MAX_MODEL_BYTES = 8_000_000

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 256,
    "intermediate_size": 640,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "rope_scaling": None,
    "tie_word_embeddings": True,
    "initializer_range": 0.02,
    "use_cache": True,
    "use_sliding_window": False,
    "sliding_window": None,
    "max_window_layers": 4,
    "bos_token_id": None,
    "eos_token_id": SPECIALS.index(TURN_END),
    "pad_token_id": SPECIALS.index(END_OF_TEXT),
    "torch_dtype": "bfloat16",
}

GENERATION_CONFIG: dict[str, Any] = {
    "do_sample": True,
    "temperature": 0.3,
    "top_p": 0.9,
    "eos_token_id": [SPECIALS.index(TURN_END), SPECIALS.index(END_OF_TEXT)],
    "pad_token_id": SPECIALS.index(END_OF_TEXT),
}

# Content may be a string or a list of typed parts; parts that are not text say nothing to a text model.
CHAT_TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>system\\nTools:\\n' }}
    {%- for tool in tools %}{{- tool | tojson + '\\n' }}{%- endfor %}
    {{- 'Call one by <tool_call>{"name": NAME, "arguments": OBJECT}</tool_call>.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' }}
    {%- if message['content'] is string %}
        {{- message['content'] }}
    {%- else %}
        {%- for part in message['content'] or [] %}
            {%- if part['type'] == 'text' %}{{- part['text'] }}{%- endif %}
        {%- endfor %}
    {%- endif %}
    {%- for call in message['tool_calls'] or [] %}
        {{- '<tool_call>' + {'name': call['function']['name'], 'arguments': call['function']['arguments']} | tojson }}
        {{- '</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


@dataclass(frozen=True)
class Score:
    """How well the held-out text is predicted."""

    nats: float  # summed over all scored tokens
    tokens: int
    text_bytes: int  # UTF-8, end-of-text markers not counted

    @property
    def perplexity(self) -> float:
        """Per token, so comparable only between models with the same tokenizer."""
        return math.exp(self.nats / self.tokens)

    @property
    def bits_per_byte(self) -> float:
        """Comparable between tokenizers."""
        return self.nats / math.log(2) / self.text_bytes


@torch.inference_mode()
def score(model: Qwen3ForCausalLM, ids: list[int], text: str) -> Score:
    """Score ids[1:], each token once: in windows of WINDOW tokens that start STRIDE apart.

    A window scores only the tokens that no earlier one did, so that all but those of the first window are predicted
    from at least WINDOW - STRIDE tokens (less one) before them.
    """
    nats, scored = 0.0, 1  # ids[0] has nothing before it
    for start in range(0, len(ids), STRIDE):
        window = torch.tensor([ids[start : start + WINDOW]])
        logits = model(input_ids=window, use_cache=False).logits[0, scored - start - 1 : -1].float()
        nats += torch.nn.functional.cross_entropy(logits, window[0, scored - start :], reduction="sum").item()
        scored = start + window.shape[1]
        if scored == len(ids):
            break
    text_bytes = len(text.replace(END_OF_TEXT, "").encode())
    return Score(nats, len(ids) - 1, text_bytes)


def evaluate(folder: Path) -> Score:
    """Score a saved model, its weights converted to fp32, on the held-out text that lies beside it."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = (folder / "heldout.txt").read_text(encoding="utf-8")
    ids = tokenizer(END_OF_TEXT + text, add_special_tokens=False)["input_ids"]
    return score(model, ids, text)


def write_atomically(path: Path, write: Any) -> None:
    """Let `write` make a file beside `path`, then put it in place, so that no reader sees half of one."""
    partial = path.with_name(f".{path.name}.partial")
    write(partial)
    partial.chmod(0o644)  # safetensors makes files that only their owner can read
    os.replace(partial, path)


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 with Unix line ends on every system; the held-out text's bytes count."""
    write_atomically(path, lambda partial: partial.write_bytes(text.encode()))


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write JSON as people read it."""
    write_text(path, json.dumps(content, indent=2) + "\n")


def save_fixed_files(folder: Path, tokenizer: Tokenizer, held_out: str) -> None:
    """Write everything that does not change while training."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", CONFIG)
    write_json(folder / "generation_config.json", GENERATION_CONFIG)
    write_text(folder / "tokenizer.json", tokenizer.to_str(pretty=False) + "\n")
    write_text(folder / "heldout.txt", held_out)
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": CONFIG["max_position_embeddings"],
        "bos_token": None,
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    write_json(folder / "tokenizer_config.json", tokenizer_config)


def save_weights(folder: Path, model: Qwen3ForCausalLM) -> None:
    """Write the weights as bf16, without the output matrix, which is the embedding."""
    weights = {
        name: value.detach().to(torch.bfloat16).contiguous()
        for name, value in model.state_dict().items()
        if name != "lm_head.weight"
    }
    write_atomically(folder / "model.safetensors", lambda partial: save_file(weights, partial, {"format": "pt"}))
    size = (folder / "model.safetensors").stat().st_size
    if size > MAX_MODEL_BYTES:
        raise SystemExit(f"model.safetensors has {size} bytes; a bundled model may have {MAX_MODEL_BYTES}")


def new_model(seed: int) -> Qwen3ForCausalLM:
    """An untrained model of the fixed geometry in fp32."""
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(Qwen3Config(**{**CONFIG, "torch_dtype": "float32"}))
