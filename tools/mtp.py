"""The layer by which DeepSeek-V3 predicts further tokens (DeepSeek-AI, "DeepSeek-V3", 2024, section 2.2), made of
transformers' parts, as transformers itself leaves it out; and a very small model with it, trained in a minute or two.

python -m tools.mtp FOLDER --steps 400      trains on what the demo model is trained on, and measures accepted drafts
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

DEMO = Path(__file__).resolve().parents[1] / "penstock" / "demo"
FURTHER = 0.3  # weight of the loss of further tokens, as DeepSeek-V3's first (4.2)
WINDOW, BATCH, RATE = 128, 8, 4e-3
SMALL: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 320,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 64,
    "kv_lora_rank": 48,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 96,
    "n_group": 2,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "max_position_embeddings": 4096,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    "bos_token_id": None,
}


class FurtherTokens(nn.Module):
    """Modules are called as in published checkpoints.

    Args:
        model: a DeepseekV3ForCausalLM, whose embedding and head it shares.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        stack, config = model.model, model.config
        norm, self.number = type(stack.norm), config.num_hidden_layers
        self.enorm, self.hnorm = (norm(config.hidden_size, config.rms_norm_eps) for _ in range(2))
        self.eh_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.shared_head = nn.ModuleDict({"norm": norm(config.hidden_size, config.rms_norm_eps)})
        self.block = type(stack.layers[-1])(config, self.number)
        self.to(model.dtype)
        self._model = [model]  # not a part of it

    def forward(self, hidden: Tensor, following: Tensor) -> Tensor:
        """[batch, rows, hidden] after the model's last norm, and [batch, rows] the token after each -> the same shape,
        normed: the head makes of it what comes after that token."""
        stack = self._model[0].model
        x = torch.cat((self.enorm(stack.embed_tokens(following)), self.hnorm(hidden)), -1)
        positions = torch.arange(hidden.shape[1], device=hidden.device)[None]
        x = self.block(
            self.eh_proj(x),
            attention_mask=None,
            position_ids=positions,
            position_embeddings=stack.rotary_emb(hidden, positions),
        )
        out: Tensor = self.shared_head["norm"](x[0] if isinstance(x, tuple) else x)
        return out

    def tensors(self) -> dict[str, Tensor]:
        """As a checkpoint has them, copies of the embedding and the head too."""
        model, layer = self._model[0], f"model.layers.{self.number}."
        found = {layer + name.removeprefix("block."): value for name, value in self.state_dict().items()}
        shared = model.model.embed_tokens.weight, model.lm_head.weight
        names = ("embed_tokens.weight", "shared_head.head.weight")
        return found | {layer + name: weight.detach().clone() for name, weight in zip(names, shared, strict=True)}


def with_further_tokens(model: Any, further: FurtherTokens) -> dict[str, Tensor]:
    """What `save_pretrained` takes as `state_dict`."""
    return {**model.state_dict(), **further.tensors()}


def losses(model: Any, further: FurtherTokens, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Of the next tokens, and of those after them; ids and labels are [batch, WINDOW], not shifted."""
    hidden = model.model(ids, use_cache=False).last_hidden_state[:, :-1]
    made = further(hidden, ids[:, 1:])[:, :-1]
    shifted = ((hidden, labels[:, 1:]), (made, labels[:, 2:]))
    one, other = (cross_entropy(model.lm_head(x).flatten(0, 1), those.flatten()) for x, those in shifted)
    return one, other


def train(folder: Path, steps: int, seed: int = 0) -> tuple[float, float]:
    """Train the model and its further layer together, from nothing, and write a checkpoint. Returns the last losses, in
    nats a token: of the next tokens, and of those after them."""
    from tokenizers import Tokenizer
    from transformers import AutoConfig, AutoModelForCausalLM

    from tools.demo.corpus import VOCAB_SIZE, Corpus, batches
    from tools.demo.corpus import WINDOW as LEARNT
    from tools.demo.text import SPECIALS, TURN_END, topic_documents

    torch.manual_seed(seed)
    end = SPECIALS.index(TURN_END)
    config = AutoConfig.for_model("deepseek_v3", **SMALL, vocab_size=VOCAB_SIZE, eos_token_id=end, pad_token_id=None)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    further = FurtherTokens(model)
    model.apply(model._init_weights)
    further.apply(model._init_weights)
    learnt = [*model.parameters(), *further.parameters()]
    optimizer = torch.optim.AdamW(learnt, lr=RATE, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=steps, pct_start=0.1)
    documents = [document for document in topic_documents() if not document.held_out]
    corpus = Corpus(documents, Tokenizer.from_file(str(DEMO / "tokenizer.json")))
    last = (0.0, 0.0)
    for step, (_, *windows) in zip(range(1, steps + 1), batches(corpus, BATCH * WINDOW // LEARNT, seed), strict=False):
        next_ones, after = losses(model, further, *(window.view(-1, WINDOW) for window in windows))
        (next_ones + FURTHER * after).backward()
        nn.utils.clip_grad_norm_(learnt, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        last = next_ones.item(), after.item()
        if step % 50 == 0:
            print(f"step {step}: {last[0]:.2f} nats a token, {last[1]:.2f} a further one", flush=True)
    model, further = model.bfloat16(), further.bfloat16()
    model.save_pretrained(folder, state_dict=with_further_tokens(model, further))
    for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(DEMO / file, folder)
    return last


def measure(folder: Path, drafts: int, temperature: float, tokens: int = 96) -> tuple[float, list[list[int]]]:
    """Tokens that a step brings of a sequence which drafts, and the outputs of a few prompts. Without drafts that is 1.

    Args:
        drafts: of a step, whether they pay or not; 0 is none.
    """
    from penstock import LLM, SamplingParams

    config = {"method": "mtp", "num_speculative_tokens": drafts, "adaptive": False}
    llm = LLM(str(folder), speculative_config=json.dumps(config) if drafts else "off", kv_cache_memory=1 << 26)
    topics = (
        "lists",
        "the import statement",
        "class definitions",
        "exceptions",
        "strings",
        "numbers",
        "loops",
        "names",
    )
    asked = [[{"role": "user", "content": f"What do you know of {topic}?"}] for topic in topics]
    params = SamplingParams(temperature=temperature, seed=1, max_tokens=tokens, ignore_eos=True)
    outputs = [list(output.outputs[0].token_ids) for output in llm.chat(asked, params)]
    speculation = llm.engine.scheduler.speculation
    if speculation is None:
        return 1.0, outputs
    counters = speculation.counters
    return 1 + counters.accepted_tokens / counters.drafts, outputs


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--drafts", type=int, nargs="*", default=[1, 2, 3, 4])
    options = parser.parse_args(argv)
    if not (options.folder / "config.json").exists():
        began = time.monotonic()
        one, other = train(options.folder, options.steps, options.seed)
        took = time.monotonic() - began
        print(f"{options.steps} steps in {took:.0f} s: {one:.2f} nats a token, {other:.2f} a further one")
    for temperature in (0.0, 1.0):
        _, plain = measure(options.folder, 0, temperature)
        for drafts in options.drafts:
            length, outputs = measure(options.folder, drafts, temperature)
            same = "the same" if outputs == plain else "OTHER"
            print(f"temperature {temperature:g}, {drafts} drafts: {length:.2f} tokens a step, {same} tokens")
    return 0


if __name__ == "__main__":
    sys.exit(main())
