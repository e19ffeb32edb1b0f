"""The model's README.md, with the numbers of the run that made it."""

from __future__ import annotations

import argparse
import platform
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tools.demo.corpus import WINDOW
from tools.demo.model import GENERATION_CONFIG, STRIDE, Score, evaluate, new_model, write_text
from tools.demo.text import MAX_ANSWER_CHARS, Document, overlap


@dataclass
class Run:
    """What the model card reports of a training run."""

    score: Score  # of the weights kept
    kept_step: int = 0
    steps: int = 0
    epochs: int = 0  # the last one perhaps cut short
    tokens: int = 0
    seconds: float = 0.0


SAMPLE_QUESTIONS = ("What does os.path.join do?", "What is json?", "Explain the assert statement")
SAMPLE_TEXT = "import os"


@torch.inference_mode()
def continuation(folder: Path, prompts: list[str], seed: int = 0) -> list[str]:
    """Continue each prompt by up to 120 tokens with the sampling defaults of the saved model; the first draw counts."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = []
    for prompt in prompts:
        torch.manual_seed(seed)
        encoded = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
        output = model.generate(**encoded, max_new_tokens=120)[0, encoded["input_ids"].shape[1] :]
        texts.append(str(tokenizer.decode(output, skip_special_tokens=True)))
    return texts


def samples(folder: Path) -> str:
    """The card's samples as Markdown."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    chats = [
        tokenizer.apply_chat_template([{"role": "user", "content": q}], tokenize=False, add_generation_prompt=True)
        for q in SAMPLE_QUESTIONS
    ]
    *answers, text = continuation(folder, [*map(str, chats), SAMPLE_TEXT])
    shown = [(f"Chat, “{q}”", answer.strip()) for q, answer in zip(SAMPLE_QUESTIONS, answers, strict=True)]
    shown.append((f"Plain text that begins with `{SAMPLE_TEXT}`", SAMPLE_TEXT + text.rstrip()))
    return "\n\n".join(f"{title}:\n\n```text\n{content}\n```" for title, content in shown)


CARD = """---
license: psf-2.0
language: en
library_name: transformers
pipeline_tag: text-generation
---

# penstock demo model

A very small causal language model in the Qwen3 architecture, {parameters:,} parameters ({megabytes:.1f} MB in bf16).
It is bundled so that a fresh machine without a network has something to serve, and so that tests have real weights
with a real tokenizer. Asked about Python's standard library, it answers something recognisable. It is not useful for
anything else.

## Text

Only English text that ships with CPython {python} itself, read by the training script from the running interpreter:
the `help()` topics (`pydoc_data.topics`), and the docstrings of the standard library, of its Python sources as well as
of its modules written in C. Tests and installed packages are left out; repeated docstrings and paragraphs are kept
once. That is {documents:,} documents with {text_bytes:,} bytes. In every epoch the model is trained on each one
that is not held out as plain text (an import, the signatures, the docstrings, `<|endoftext|>`). Each public name also
appears in chat turns, with one of several wordings of the question and an answer that is the signature and at most
{answer} characters of the docstring: once per epoch, but six times for the modules asked about most (`os`, `json`, the
built-ins and some more), and seldom for others (`tkinter`, `idlelib`). Of the library's code, only the signatures and
the examples inside docstrings are used.

The text is Copyright © 2001 Python Software Foundation, All Rights Reserved, and is used under the
[PSF License Agreement, version 2](https://docs.python.org/3/license.html). The model reproduces parts of it verbatim,
so the weights, the tokenizer and `heldout.txt` are distributed under the same licence ([LICENSE](LICENSE)).

## Held-out perplexity

| | |
|---|---|
| perplexity per token | **{perplexity:.3f}** |
| bits per byte | **{bits:.4f}** |
| scored tokens | {scored:,} |
| bytes of text | {held_bytes:,} |

`heldout.txt` holds {held_documents} whole documents, about 3 %, chosen by a hash of their names; neither the model nor
the tokenizer was trained on them, nor on chat turns made from them. Documentation repeats itself: {overlap:.1%} of the
held-out runs of eight words also occur in the training text. The checkpoint with the lowest held-out loss was kept,
so the number is slightly optimistic.

Defined exactly: the text is `<|endoftext|>` followed by the file's content, in which every document ends with
`<|endoftext|>`; it is tokenised as a whole, the markers as the special token, nothing else added. Windows of {window}
tokens start every {stride} tokens, the last one cut short at the end. Each token but the first is scored once, in the
first window that holds it, by its negative log-likelihood given the tokens before it in that window. Perplexity is the
exponential of the mean over the scored tokens, markers included. Bits per byte is the sum in bits over the UTF-8 bytes
of the text without the markers. The weights are the bf16 ones of this folder, computed with in fp32. To recompute it,
on any Python version:

    python tools/train_demo.py --evaluate penstock/demo

## Training

{steps:,} steps of {batch} packed windows of {window} tokens ({seen:.1f} million positions, {epochs} epochs), AdamW
(betas 0.9 and 0.95, weight decay {decay}), peak learning rate {lr}, 100 steps of warm-up, cosine decay, gradient norm
clipped at 1, {precision} autocast, no dropout, seed {seed}. In chat turns, the loss covers the answers only. Of the
checkpoints, scored every {every:.0f} seconds and at the end, the one after step {kept:,} was kept. It took
{minutes:.0f} minutes on {threads} CPU threads of a machine that had other work. To reproduce it:

    python tools/train_demo.py --out penstock/demo --steps {steps} --seed {seed}{compiled}

Another Python version has another text, and so gives another tokenizer and another `heldout.txt`. Even with the same
version, weights and numbers differ slightly between machines, because floating-point sums are ordered differently.

## Samples

Samples with the defaults of `generation_config.json` (temperature {temperature}, top-p {top_p}), seed 0, at most
120 tokens, the first of each:

{samples}

## Limits

The model is tiny and was trained on three megabytes of text. It knows no facts beyond docstrings, confuses them,
invents functions and parameters, cannot reason, follow instructions, hold a conversation or write programs, and
understands only English. The longest text it was trained on has {window} tokens; the configuration allows more, at
lower quality. Do not rely on anything it says; ask `help()` instead.
"""


def write_card(folder: Path, train: list[Document], held_out: list[Document], run: Run, o: argparse.Namespace) -> Score:
    """Write README.md with the numbers of this run; returns the score of what was saved."""
    final = evaluate(folder)
    parameters = sum(parameter.numel() for parameter in new_model(0).parameters())
    card = CARD.format(
        parameters=parameters, megabytes=(folder / "model.safetensors").stat().st_size / 1e6,
        python=platform.python_version(), documents=len(train) + len(held_out), answer=MAX_ANSWER_CHARS,
        text_bytes=sum(len(document.text.encode()) for document in train + held_out),
        perplexity=final.perplexity, bits=final.bits_per_byte, scored=final.tokens, held_bytes=final.text_bytes,
        held_documents=len(held_out), overlap=overlap(train, held_out), window=WINDOW, stride=STRIDE,
        steps=run.steps, kept=run.kept_step, every=o.score_every, batch=o.batch, seen=run.tokens / 1e6,
        epochs=run.epochs, decay=o.weight_decay, lr=o.lr, precision=o.precision, seed=o.seed,
        minutes=run.seconds / 60, threads=torch.get_num_threads(), compiled=" --compile" if o.compile else "",
        temperature=GENERATION_CONFIG["temperature"], top_p=GENERATION_CONFIG["top_p"], samples=samples(folder),
    )  # fmt: skip
    write_text(folder / "README.md", card)
    return final
