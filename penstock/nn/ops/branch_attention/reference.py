"""Written to be read: one row after the other, its whole context put together, in float32."""

import torch
from torch import Tensor

from penstock.core.plan import BLOCK_TOKENS
from penstock.nn.batch import BranchSpan, Scratch


def attention(q: Tensor, cache: Tensor, span: BranchSpan, scale: float, window: int | None, scratch: Scratch) -> Tensor:
    out = torch.empty_like(q)
    group = q.shape[1] // cache.shape[2]
    first = 0 if window is None else max(0, span.length - window)
    shared = cache[span.prompt.blocks].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, : span.prompt.length]
    for row, slots in enumerate(span.slots):
        own = torch.stack([cache[slot // BLOCK_TOKENS, :, :, slot % BLOCK_TOKENS] for slot in slots.tolist()], dim=2)
        # [2, heads, context, dim]
        k, v = torch.cat([shared, own], dim=2)[:, :, first:].float().repeat_interleave(group, dim=1)
        weights = (torch.einsum("hd,hld->hl", q[row].float(), k) * scale).softmax(-1)
        out[row] = torch.einsum("hl,hld->hd", weights, v).to(q.dtype)
    return out
