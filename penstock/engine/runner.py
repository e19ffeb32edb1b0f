"""A plan to tensors, through the model, to tokens. Keeps nothing between steps but the KV cache."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from penstock.core.plan import BLOCK_TOKENS, StepPlan, StepResult
from penstock.engine.sampling import draw
from penstock.nn.batch import Batch
from penstock.nn.models.decoder import Decoder


class Runner:
    """A model and its KV cache.

    The cache is [blocks, layers, 2, kv_heads, BLOCK_TOKENS, dim]: a block is one stretch of memory, so moving it is
    one copy.
    """

    def __init__(self, model: Decoder, num_blocks: int) -> None:
        self.model = model
        self.device = model.device
        self.cache = allocate_cache(model, num_blocks)

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        if plan.fresh_blocks:
            self.cache[torch.tensor(plan.fresh_blocks, device=self.device)] = 0
        batch = Batch(plan.sequences, self.device)
        hidden = self.model(batch, self.cache)
        wrong = set(_not_finite(hidden))
        sampled = [(s, span) for s, span in zip(plan.sequences, batch.spans, strict=True) if s.sample]
        result = StepResult([], [])
        if sampled:
            last = [span.row + span.rows - 1 for _, span in sampled]
            logits = self.model.logits(hidden[torch.tensor(last, device=self.device)])
            wrong |= {last[i] for i in _not_finite(logits)}
            result = draw(logits, [s for s, _ in sampled])
        if not wrong:
            return result
        spans = zip(plan.sequences, batch.spans, strict=True)
        broken = {s.request_id for s, span in spans if wrong & set(range(span.row, span.row + span.rows))}
        return replace(result, broken=frozenset(broken))


def _not_finite(rows: Tensor) -> list[int]:
    """Which rows of [rows, width] hold an infinity or a NaN: then their sum is one."""
    return torch.nonzero(~rows.sum(-1, dtype=torch.float32).isfinite())[:, 0].tolist()


def cache_shape(model: Decoder, num_blocks: int) -> tuple[int, ...]:
    c = model.config
    return (num_blocks, c.num_layers, 2, c.num_kv_heads, BLOCK_TOKENS, c.head_dim)


def block_bytes(model: Decoder) -> int:
    """Bytes of one block, all layers."""
    return torch.Size(cache_shape(model, 1)).numel() * model.dtype.itemsize


def allocate_cache(model: Decoder, num_blocks: int) -> Tensor:
    """Not cleared: a plan names the blocks that must be before they are used."""
    return torch.empty(cache_shape(model, num_blocks), dtype=model.dtype, device=model.device)
