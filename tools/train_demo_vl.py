#!/usr/bin/env python3
"""Train the bundled demo model that sees: it tells the shapes and the colours of simple pictures.

A very small Qwen2.5-VL with its own tokenizer. All that it is trained on is drawn, and asked, by `demo/pictures.py`.

    python tools/train_demo_vl.py --out penstock/demo_vl
    python tools/train_demo_vl.py --out penstock/demo_vl --go-on penstock/demo_vl --lr 1.5e-3 --seed 77
    python tools/train_demo_vl.py --evaluate penstock/demo_vl
"""

from __future__ import annotations

import argparse
import base64
import math
import random
import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from penstock.media.processor import Processor, read_processor
from tools.demo.corpus import IGNORED, WORDS
from tools.demo.model import save_weights, write_json, write_text
from tools.demo.pictures import COLOURS, QUESTIONS, SHAPES, Picture, ask, draw
from tools.demo.text import SPECIALS

VISION_START, VISION_END, IMAGE = "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"
TOKENS = [*SPECIALS, VISION_START, VISION_END, IMAGE]
VOCAB_SIZE = 512
TURNS = 4  # of a conversation about a picture
PIXELS = 4200  # of a resized picture at most, which has 64 x 64 where it is square
NAMES = [*COLOURS]
WIDTHS = (len(SHAPES) + 1, len(COLOURS) + 1, len(COLOURS))  # of what `Hints` tells
HELD_OUT = 1_000_003  # of the seeds of pictures that are not trained on
MANTISSA = 3  # bits of it that weights keep
MOST_BYTES = 1_000_000  # of the weights, as they are bundled

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "model_type": "qwen2_5_vl",
    "image_token_id": TOKENS.index(IMAGE),
    "vision_start_token_id": TOKENS.index(VISION_START),
    "vision_end_token_id": TOKENS.index(VISION_END),
    "video_token_id": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "eos_token_id": SPECIALS.index("<|im_end|>"),
    "text_config": {
        "model_type": "qwen2_5_vl_text",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
        "bos_token_id": None,
        "eos_token_id": SPECIALS.index("<|im_end|>"),
    },
    "vision_config": {
        "model_type": "qwen2_5_vl_vision",
        "depth": 4,
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_heads": 4,
        "out_hidden_size": 64,
        "patch_size": 8,
        "spatial_merge_size": 2,
        "temporal_patch_size": 1,
        "window_size": 112,
        "fullatt_block_indexes": [0, 1, 2, 3],
    },
}
PREPROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 8,
    "merge_size": 2,
    "temporal_patch_size": 1,
    "min_pixels": 4000,
    "max_pixels": PIXELS,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
CHAT_TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' }}
    {%- if message['content'] is string %}
        {{- message['content'] }}
    {%- else %}
        {%- for part in message['content'] or [] %}
            {%- if part['type'] == 'image' %}{{- '<|vision_start|><|image_pad|><|vision_end|>' }}{%- endif %}
            {%- if part['type'] == 'text' %}{{- part['text'] }}{%- endif %}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


def train_tokenizer() -> Tokenizer:
    """A byte-level BPE of what is asked and answered."""
    rng = random.Random(0)
    turns = (ask(rng, draw(rng) if i % 8 else None) for i in range(4000))
    texts = [f"user\n{question}\nassistant\n{answer}\n" for question, answer in turns]
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(WORDS), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_fixed_files(folder: Path, tokenizer: Tokenizer) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    end, pad = SPECIALS.index("<|im_end|>"), SPECIALS.index("<|endoftext|>")
    write_json(folder / "config.json", CONFIG)
    write_json(folder / "preprocessor_config.json", PREPROCESSOR)
    write_json(folder / "generation_config.json", {"do_sample": False, "eos_token_id": [end, pad]})
    write_text(folder / "tokenizer.json", tokenizer.to_str(pretty=False) + "\n")
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": CONFIG["text_config"]["max_position_embeddings"],
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    write_json(folder / "tokenizer_config.json", tokenizer_config)


@dataclass
class Sample:
    """A conversation: tokens and what is learnt of them, the patches of its pictures, and what each of their tokens
    stands for, as `Hints` has it."""

    ids: list[int] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)
    patches: list[Tensor] = field(default_factory=list)
    grids: list[tuple[int, int, int]] = field(default_factory=list)
    there: list[tuple[int, int, int]] = field(default_factory=list)

    def add(self, ids: list[int], *, learnt: bool) -> None:
        self.ids += ids
        self.labels += ids if learnt else [IGNORED] * len(ids)


class Sampler:
    """Conversations of pictures, as many questions of each."""

    def __init__(self, tokenizer: Tokenizer, processor: Processor, seed: int) -> None:
        self.rng, self.processor = random.Random(seed), processor
        self._encode = lambda text: tokenizer.encode(text, add_special_tokens=False).ids

    def sample(self, pictures: int, turns: int) -> Sample:
        """Of so many pictures, one after the other; now and then of none. Without turns it is a picture alone."""
        sample = Sample()
        if not turns:
            self._show(sample, draw(self.rng))
            return sample
        if self.rng.random() < 0.04:
            self._turn(sample, None, shown=False)
            return sample
        for _ in range(pictures):
            picture = draw(self.rng)
            for i in range(turns):
                self._turn(sample, picture, shown=i == 0)
        return sample

    def _turn(self, sample: Sample, picture: Picture | None, *, shown: bool) -> None:
        question, answer = ask(self.rng, picture)
        sample.add(self._encode("<|im_start|>user\n"), learnt=False)
        before = self.rng.random() < 0.7
        if shown and picture is not None and before:
            self._show(sample, picture)
        sample.add(self._encode(question), learnt=False)
        if shown and picture is not None and not before:
            self._show(sample, picture)
        sample.add(self._encode("<|im_end|>\n<|im_start|>assistant\n"), learnt=False)
        sample.add(self._encode(f"{answer}<|im_end|>"), learnt=True)
        sample.add(self._encode("\n"), learnt=False)

    def _show(self, sample: Sample, picture: Picture) -> None:
        source = picture.image
        height, width = self.processor.size("image", source.height, source.width)
        pixels = np.asarray(source.resize((width, height), Image.Resampling.BICUBIC))
        side, merge = PREPROCESSOR["patch_size"], PREPROCESSOR["merge_size"]
        assert isinstance(side, int)
        assert isinstance(merge, int)
        rows, columns = height // side, width // side
        colours = torch.from_numpy(pixels.copy()).float().permute(2, 0, 1) / 127.5 - 1
        split = colours.view(3, rows // merge, merge, side, columns // merge, merge, side)
        sample.patches.append(split.permute(1, 4, 2, 5, 0, 3, 6).reshape(rows * columns, -1))
        sample.grids.append((1, rows, columns))
        rows, columns = rows // merge, columns // merge
        y, x = np.indices((rows, columns))
        known = [(0, 0), *((SHAPES.index(one.shape) + 1, NAMES.index(one.colour) + 1) for one in picture.things)]
        for number in picture.at((x.ravel() + 0.5) / columns, (y.ravel() + 0.5) / rows):
            sample.there.append((*known[number + 1], NAMES.index(picture.background)))
        marks = [TOKENS.index(VISION_START), *[TOKENS.index(IMAGE)] * (rows * columns)]
        sample.add([*marks, TOKENS.index(VISION_END)], learnt=False)

    def batches(self, size: int, turns: int = TURNS) -> Iterator[dict[str, Tensor]]:
        while True:
            pictures = 2 if turns and self.rng.random() < 0.1 else 1
            drawn = [self.sample(pictures, turns) for _ in range(size // pictures)]
            longest = max(len(sample.ids) for sample in drawn)
            ids = torch.full((len(drawn), longest), SPECIALS.index("<|endoftext|>"))
            labels = torch.full((len(drawn), longest), IGNORED)
            for i, sample in enumerate(drawn):
                ids[i, : len(sample.ids)] = torch.tensor(sample.ids)
                labels[i, : len(sample.ids)] = torch.tensor(sample.labels)
            yield {
                "input_ids": ids,
                "labels": labels,
                "mm_token_type_ids": (ids == TOKENS.index(IMAGE)).int(),
                "pixel_values": torch.cat([patch for sample in drawn for patch in sample.patches]),
                "image_grid_thw": torch.tensor([grid for sample in drawn for grid in sample.grids]),
                "there": torch.tensor([what for sample in drawn for what in sample.there]),
            }


class Hints(torch.nn.Module):
    """Has the tower tell of each of its tokens the shape and the colour that are there, and the background's: by
    answers alone it takes long to find out what there is to see. Not a part of the model."""

    def __init__(self, tower: Any, width: int) -> None:
        super().__init__()
        self.head = torch.nn.Linear(width, sum(WIDTHS))
        self.made: Tensor | None = None
        tower.merger.register_forward_hook(self._keep)

    def _keep(self, _: object, __: object, made: Tensor) -> None:
        self.made = made

    def forward(self, there: Tensor) -> Tensor:
        """[tokens, 3] -> the loss."""
        assert self.made is not None
        parts = self.head(self.made).split(WIDTHS, dim=1)
        losses = [torch.nn.functional.cross_entropy(part, there[:, i]) for i, part in enumerate(parts)]
        return torch.stack(losses).sum()


def new_model(seed: int) -> Any:
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    torch.manual_seed(seed)
    given = {key: value for key, value in CONFIG.items() if key not in ("torch_dtype", "video_token_id")}
    model = Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(**given))
    for (
        name,
        part,
    ) in model.named_parameters():  # by width: what is usual for large models learns nothing in such small ones
        if part.ndim > 1 and "embed_tokens" not in name:
            deep = name.endswith(("o_proj.weight", "down_proj.weight", "attn.proj.weight"))
            torch.nn.init.normal_(part, std=(0.4 if deep else 1.0) * part[0].numel() ** -0.5)
    return model


def optimizer_of(parts: list[torch.nn.Module], weight_decay: float) -> torch.optim.AdamW:
    every = [weight for part in parts for weight in part.parameters()]
    matrices, others = [weight for weight in every if weight.ndim > 1], [weight for weight in every if weight.ndim == 1]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.98), fused=True)


class Phase:
    """So many steps, by a rate that grows at first and then falls; says now and then how it goes."""

    def __init__(self, name: str, optimizer: torch.optim.AdamW, steps: int, peak: float) -> None:
        self.name, self.optimizer, self.steps, self.peak = name, optimizer, steps, peak
        self.losses = deque[float](maxlen=100)
        self.started, self.step = time.monotonic(), 0

    def learn(self, loss: Tensor) -> None:
        self.step += 1
        share = 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * self.step / self.steps))
        for group in self.optimizer.param_groups:
            group["lr"] = self.peak * min(1.0, self.step / 100) * share
        loss.backward()
        torch.nn.utils.clip_grad_norm_([each for group in self.optimizer.param_groups for each in group["params"]], 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.losses.append(loss.item())
        if self.step % 100 == 0 or self.step == self.steps:
            mean, seconds = sum(self.losses) / len(self.losses), time.monotonic() - self.started
            print(f"{self.name}: {seconds:4.0f} s  step {self.step}  loss {mean:.4f}", flush=True)


def train(options: argparse.Namespace) -> None:
    """The tower by itself first, which is quick, and then all of it."""
    tokenizer = train_tokenizer()
    save_fixed_files(options.out, tokenizer)
    processor = read_processor(options.out)
    assert isinstance(processor, Processor)
    model = new_model(options.seed)
    print(f"{sum(part.numel() for part in model.parameters())} parameters")
    hints = Hints(model.model.visual, CONFIG["text_config"]["hidden_size"])
    sampler = Sampler(tokenizer, processor, options.seed)
    optimizer = optimizer_of([model.model.visual, hints], options.weight_decay)
    if options.go_on is not None:
        weights = load_file(options.go_on / "model.safetensors")
        model.load_state_dict({name: weight.float() for name, weight in weights.items()}, strict=False)
        options.tower_steps = 0
    hint = 0.2 if options.go_on is None else 0.0  # what tells them is not kept
    phase = Phase("tower", optimizer, options.tower_steps, options.lr)
    for batch in islice(sampler.batches(options.batch, turns=0), options.tower_steps):
        model.model.visual(batch["pixel_values"], grid_thw=batch["image_grid_thw"])
        phase.learn(hints(batch["there"]))
    phase = Phase("all", optimizer_of([model, hints], options.weight_decay), options.steps, options.lr)
    for batch in islice(sampler.batches(options.batch), options.steps):
        there = batch.pop("there")
        loss = model(**batch, use_cache=False).loss
        phase.learn(loss + hint * hints(there))
    save(options.out, model)
    if (size := (options.out / "model.safetensors").stat().st_size) > MOST_BYTES:
        raise SystemExit(f"model.safetensors has {size} bytes; what is bundled may have {MOST_BYTES}")


def save(folder: Path, model: Any) -> None:
    """Weights of few bits, which take less room in a wheel; they stay bf16."""
    with torch.no_grad():
        for part in model.parameters():
            if part.ndim > 1:
                mantissa, exponent = torch.frexp(part)
                scale = 2.0 ** (MANTISSA + 1)
                part.copy_(torch.ldexp((mantissa * scale).round() / scale, exponent))
    save_weights(folder, model)


def evaluate(folder: Path, pictures: int) -> dict[str, float]:
    """The share of right answers to each kind of question about pictures that were not trained on, as penstock serves
    them: drawn by seeds of their own, sent as PNG files of 240 x 240 pixels or as many, and compared word for word."""
    from penstock import LLM

    talks, truths = [], []
    for number in range(pictures):
        rng = random.Random(HELD_OUT + number)
        picture = draw(rng, 240)
        url = f"data:image/png;base64,{base64.b64encode(picture.png()).decode()}"
        for kind in QUESTIONS:
            question, answer = QUESTIONS[kind](rng, picture)
            parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": question}]
            talks.append([{"role": "user", "content": parts}])
            truths.append((kind, answer))
    outputs = LLM(str(folder)).chat(talks)
    right: dict[str, list[bool]] = {kind: [] for kind in QUESTIONS}
    for (kind, answer), output in zip(truths, outputs, strict=True):
        right[kind].append(output.text == answer)
    return {kind: sum(of) / len(of) for kind, of in right.items()}


CARD = """---
license: apache-2.0
language: en
library_name: transformers
pipeline_tag: image-text-to-text
---

# penstock demo model that sees

A very small Qwen2.5-VL, {parameters:,} parameters ({megabytes:.2f} MB in bf16), that tells the shapes (circle, square,
triangle, star, cross) and the colours (red, green, blue, yellow, orange, purple, black, white; of backgrounds grey too)
of simple pictures with one to three shapes. It is bundled so that a fresh machine has something to serve that can be
shown a picture, and answers truly. It knows nothing else.

All that it was trained on is drawn, and asked, by `tools/demo/pictures.py`, which has the questions that it
understands. `python tools/train_demo_vl.py` trains it, in ten minutes of one core: its tower tells first, of each
token, what is there, and then all of it learns to answer. It went on with `--go-on`, for 1,550 steps.

## How often it is right

Of {pictures} pictures that were not trained on, as penstock serves them, word for word:
`python tools/train_demo_vl.py --evaluate penstock/demo_vl`

| question | right |
|---|---|
{rows}
"""


def write_card(folder: Path, shares: dict[str, float], pictures: int) -> None:
    count = sum(part.numel() for part in new_model(0).parameters())
    size = (folder / "model.safetensors").stat().st_size / 1e6
    rows = "\n".join(f"| {kind} | {100 * share:.1f} % |" for kind, share in shares.items())
    text = CARD.format(parameters=count, megabytes=size, pictures=pictures, rows=rows)
    write_text(folder / "README.md", text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("penstock/demo_vl"), help="where the model is written")
    parser.add_argument("--evaluate", type=Path, metavar="DIR", help="only ask DIR's model of held-out pictures")
    parser.add_argument("--pictures", type=int, default=500, help="that are asked of (default 500)")
    parser.add_argument("--tower-steps", type=int, default=2400, help="of the tower alone (default 2400)")
    parser.add_argument("--steps", type=int, default=1000, help="of the whole model (default 1000)")
    parser.add_argument("--go-on", type=Path, metavar="DIR", help="with DIR's weights, and without the tower's steps")
    parser.add_argument("--seed", type=int, default=0, help="of the first weights and of pictures (default 0)")
    parser.add_argument("--batch", type=int, default=32, help="conversations of a step (default 32)")
    parser.add_argument("--lr", type=float, default=2e-3, help="peak learning rate (default 0.002)")
    parser.add_argument("--weight-decay", type=float, default=0.02, help="of the matrices (default 0.02)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default 1)")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.evaluate is None:
        train(options)
    shares = evaluate(options.evaluate or options.out, options.pictures)
    for kind, share in shares.items():
        print(f"{kind:12} {share:.1%}")
    if options.evaluate is None:
        write_card(options.out, shares, options.pictures)
    print(f"{'all':12} {sum(shares.values()) / len(shares):.1%} of {options.pictures * len(shares)} questions")


if __name__ == "__main__":
    main()
