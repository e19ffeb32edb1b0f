#!/usr/bin/env python3
"""Train the bundled demo model from the English text that ships with CPython.

The model is a very small Qwen3 with its own tokenizer.  It exists so that a machine without a network has
something to serve whose answers are recognisably about Python.  Everything it reads comes from the running
interpreter: the ``help()`` topics and the docstrings of the standard library, pure Python and C alike.

    python tools/train_demo.py --out penstock/demo --minutes 40
    python tools/train_demo.py --evaluate penstock/demo
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from pathlib import Path

import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from transformers import Qwen3ForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.demo.card import Run, write_card
from tools.demo.corpus import IGNORED, VOCAB_SIZE, WINDOW, Corpus, batches, train_tokenizer
from tools.demo.model import Score, evaluate, new_model, save_fixed_files, save_weights, score
from tools.demo.text import END_OF_TEXT, docstring_documents, topic_documents


def new_optimizer(model: Qwen3ForCausalLM, weight_decay: float) -> torch.optim.AdamW:
    """AdamW that leaves the norms' gains undecayed."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    gains = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": gains, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), fused=True)


def learning_rate(peak: float, step: int, done: float, warmup: int = 100) -> float:
    """Linear warm-up over steps, then a cosine over the share `done` of the run, down to 2 % of the peak."""
    return peak * min(1.0, (step + 1) / warmup) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(1.0, done))))


class Trainer:
    """One training run: keeps the weights that predict the held-out text best in `options.out`."""

    def __init__(self, corpus: Corpus, held_out: str, options: argparse.Namespace) -> None:
        self.corpus = corpus
        self.held_out = held_out
        self.held_out_ids = corpus.tokenizer.encode(END_OF_TEXT + held_out).ids
        self.options = options
        self.model = new_model(options.seed)
        self.loss = torch.compile(self.plain_loss) if options.compile else self.plain_loss
        self.optimizer = new_optimizer(self.model, options.weight_decay)
        self.run = Run(Score(math.inf, 1, 1))
        self.started = time.monotonic()

    def done(self) -> float:
        """The share of the run that lies behind, by steps if they are given and else by the clock."""
        if self.options.steps:
            return self.run.steps / float(self.options.steps)
        return self.run.seconds / float(60 * self.options.minutes)

    def plain_loss(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The mean loss of a batch in nats per learnt token; ids and labels are [batch, WINDOW]."""
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.options.precision == "bf16"):
            logits = self.model(input_ids=ids, use_cache=False).logits
        # Shifting the small labels spares a copy of the large logits.
        following = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED)
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), following.flatten())

    def step(self, ids: torch.Tensor, labels: torch.Tensor) -> float:
        """One optimiser step on a batch; returns its loss."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.options.lr, self.run.steps, self.done())
        loss = self.loss(ids, labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.run.steps += 1
        self.run.tokens += ids.numel()
        self.run.seconds = time.monotonic() - self.started
        return loss.item()

    def keep_if_better(self) -> Score:
        """Score the held-out text and save the weights if no earlier ones did better."""
        self.model.eval()
        now = score(self.model, self.held_out_ids, self.held_out)
        self.model.train()
        if now.nats < self.run.score.nats:
            self.run.score, self.run.kept_step = now, self.run.steps
            save_weights(self.options.out, self.model)
        return now

    def train(self) -> Run:
        """Train until the steps or the minutes are used up."""
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        smooth, next_score = math.log(VOCAB_SIZE), self.options.score_every
        with Progress(*columns) as progress:
            bar = progress.add_task("training", total=1.0)
            for epoch, ids, labels in batches(self.corpus, self.options.batch, self.options.seed):
                smooth += 0.02 * (self.step(ids, labels) - smooth)
                self.run.epochs = epoch + 1
                speed = self.run.tokens / self.run.seconds
                text = f"epoch {epoch} step {self.run.steps} loss {smooth:.3f} {speed:,.0f} tokens/s"
                progress.update(bar, completed=min(1.0, self.done()), description=text)
                if self.done() >= 1 or self.run.seconds >= next_score:
                    now = self.keep_if_better()
                    progress.console.print(
                        f"{self.run.seconds:6.0f} s  {text}  held-out perplexity {now.perplexity:.2f}, "
                        f"{now.bits_per_byte:.3f} bits per byte",
                        soft_wrap=True,
                    )
                    next_score = time.monotonic() - self.started + self.options.score_every
                if self.done() >= 1:
                    return self.run
        raise AssertionError("batches() does not end")


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("penstock/demo"), help="where the model is written")
    parser.add_argument("--evaluate", type=Path, metavar="DIR", help="only recompute DIR's held-out perplexity")
    parser.add_argument("--minutes", type=float, default=40.0, help="how long to train, by the clock (default 40)")
    parser.add_argument("--steps", type=int, help="train for this many steps instead of by the clock")
    parser.add_argument("--seed", type=int, default=0, help="of the first weights, order and wordings (default 0)")
    parser.add_argument("--batch", type=int, default=8, help=f"windows of {WINDOW} tokens per step (default 8)")
    parser.add_argument("--lr", type=float, default=3e-3, help="peak learning rate (default 0.003)")
    parser.add_argument("--weight-decay", type=float, default=0.1, help="of the matrices (default 0.1)")
    parser.add_argument("--precision", choices=("bf16", "fp32"), default="bf16", help="of the matrix products")
    parser.add_argument("--compile", action="store_true", help="use torch.compile; faster, needs a C++ compiler")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default 2)")
    parser.add_argument("--score-every", type=float, default=90.0, help="seconds between checkpoints (default 90)")
    return parser.parse_args()


def report(result: Score) -> None:
    """Print a score."""
    print(f"perplexity {result.perplexity:.3f} per token over {result.tokens} tokens")
    print(f"bits per byte {result.bits_per_byte:.4f} over {result.text_bytes} bytes")


def main() -> None:
    """Train, or evaluate what was trained."""
    options = arguments()
    torch.set_num_threads(options.threads)
    if options.evaluate:
        report(evaluate(options.evaluate))
        return
    documents = docstring_documents() + topic_documents()
    train = [document for document in documents if not document.held_out]
    held_out = [document for document in documents if document.held_out]
    held_out_text = "".join(document.text + END_OF_TEXT for document in held_out)
    answers = (turn.text for document in train for turn in document.turns)
    tokenizer = train_tokenizer([*(document.text for document in train), *answers])
    save_fixed_files(options.out, tokenizer, held_out_text)
    corpus = Corpus(train, tokenizer)
    tokens = sum(map(len, corpus.plain))
    print(f"{len(train)} documents, {tokens} tokens, {len(corpus.turns)} chat turns; {len(held_out)} held out")
    run = Trainer(corpus, held_out_text, options).train()
    report(write_card(options.out, train, held_out, run, options))


if __name__ == "__main__":
    main()
