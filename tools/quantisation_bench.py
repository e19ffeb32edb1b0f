"""What quantising costs a model: its memory, how well it predicts a text, and whether it computes what its weights say.

usage: python tools/quantisation_bench.py [MODEL ...] [--quantization int8 ...] [--text FILE] [--tokens N]

A MODEL is "demo", by default, or a checkpoint folder, plain or quantised. A plain one is measured as it is, and
quantised to each of what --quantization names. `reference` is a plain model with the dequantised weights: its
perplexity, and at how many of the text's positions both expect the same next token.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from penstock import LLM, SamplingParams
from penstock.core.device import WEIGHT_BITS
from penstock.nn.checkpoint import weight_files
from penstock.nn.linear import Linear
from penstock.nn.loader import load_model
from penstock.nn.models.decoder import Decoder
from penstock.nn.places import LAYER
from penstock.service.checkpoint import find_checkpoint

ROOT = Path(__file__).resolve().parents[1]
TEXT = ROOT / "penstock" / "demo" / "heldout.txt"
WINDOW = 512  # tokens that are predicted together
CPU = torch.device("cpu")


class Read(NamedTuple):
    """What a model made of a text: at each position the log-probability of the token there, and the most likely one."""

    logprobs: list[float]
    best: list[int]

    @property
    def perplexity(self) -> float:
        return math.exp(-sum(self.logprobs) / len(self.logprobs))


def read(model: str, quantization: str, text: str, tokens: int) -> Read:
    """A text in windows, each from its beginning."""
    llm = LLM(model, quantization=quantization, dtype="bfloat16", max_model_len=2 * WINDOW, weight_cache=False)
    ids = llm.tokenizer.encode(text)[:tokens]
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
    windows = [ids[i : i + WINDOW] for i in range(0, len(ids) - 1, WINDOW)]
    found = Read([], [])
    for output in llm.generate([{"prompt_token_ids": window} for window in windows], params):
        for position in output.prompt_logprobs or []:
            if position is not None:
                found.logprobs.append(position.chosen)
                found.best.append(position.top[0][0])
    return found


def dequantise(model: Decoder, source: Path, to: Path) -> None:
    """A plain checkpoint with what a model's weights say."""
    tensors: dict[str, Tensor] = {}
    for file in weight_files(source):
        with safe_open(file, framework="pt") as opened:
            norms = [name for name in opened.keys() if name.endswith("norm.weight")]  # noqa: SIM118 - no mapping
            tensors |= {name: opened.get_tensor(name) for name in norms}
    for path, part in model.named_modules():
        block = LAYER.match(path)
        names = (path,) if block is None else [block[0] + name for name in model.weights.get(path[block.end() :], ())]
        if isinstance(part, Linear):
            parts = part.dense().split(part.outs) if len(names) > 1 else [part.dense()]
            tensors |= {f"{name}.weight": own.clone() for name, own in zip(names, parts, strict=True)}
            if part.bias is not None:
                biases = part.bias.split(part.outs) if len(names) > 1 else [part.bias]
                tensors |= {f"{name}.bias": own.clone() for name, own in zip(names, biases, strict=True)}
    for file in source.iterdir():
        if file.is_file() and file.suffix != ".safetensors" and not file.name.endswith(".index.json"):
            shutil.copy(file, to / file.name)
    config = json.loads((source / "config.json").read_text())
    config.pop("quantization_config", None)
    (to / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": model.lm_head is None}))
    save_file(tensors, to / "model.safetensors")


def measure(name: str, quantization: str, text: str, tokens: int) -> str:
    """A row of the table."""
    folder = find_checkpoint(name)
    model = load_model(folder, CPU, torch.bfloat16, quantization=quantization)
    linears = [part for part in model.modules() if isinstance(part, Linear)]
    layers = sum(part.weight_bytes for part in model.model.layers.modules() if isinstance(part, Linear))
    params = sum(math.prod(part.weight.shape) for part in model.model.layers.modules() if isinstance(part, Linear))
    size = sum(part.weight_bytes for part in linears) / 2**20
    ours = read(str(folder), quantization, text, tokens)
    row = f"| {name} {quantization} | {8 * layers / params:.2f} | {size:.2f} | {ours.perplexity:.3f} |"
    if not model.quantised:
        return f"{row} | |"
    with tempfile.TemporaryDirectory() as place:
        dequantise(model, folder, Path(place))
        theirs = read(place, "auto", text, tokens)
    same = sum(a == b for a, b in zip(ours.best, theirs.best, strict=True)) / len(ours.best)
    return f"{row} {theirs.perplexity:.3f} | {100 * same:.2f} % |"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=["demo"], metavar="MODEL")
    parser.add_argument("--quantization", nargs="*", default=list(WEIGHT_BITS), choices=list(WEIGHT_BITS))
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument("--tokens", type=int, default=1 << 30)
    options = parser.parse_args(arguments)
    text = options.text.read_text()
    print("| model | bits of a layer's weight | MiB of weights | perplexity | reference | same next token |")
    print("|---|---|---|---|---|---|")
    for name in options.models:
        plain = not json.loads((find_checkpoint(name) / "config.json").read_text()).get("quantization_config")
        for quantization in ("auto", *(options.quantization if plain else ())):
            print(measure(name, quantization, text, options.tokens), flush=True)


if __name__ == "__main__":
    main()
