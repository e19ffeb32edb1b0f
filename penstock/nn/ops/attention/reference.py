"""Written to be read: one sequence after the other, every score spelled out, in float32."""

import torch
from torch import Tensor

from penstock.nn.batch import Batch


def attention(q: Tensor, cache: Tensor, batch: Batch, scale: float, window: int | None) -> Tensor:
    out = torch.empty_like(q)
    group = q.shape[1] // cache.shape[2]
    for span in batch.spans:
        length = span.start + span.rows
        # [blocks, 2, kv_heads, block, dim] -> [2, heads, length, dim]
        context = cache[span.blocks].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :length].float()
        k, v = context.repeat_interleave(group, dim=1)
        rows = slice(span.row, span.row + span.rows)
        scores = torch.einsum("nhd,hld->hnl", q[rows].float(), k) * scale
        behind = torch.arange(span.start, length, device=q.device)[:, None] - torch.arange(length, device=q.device)
        hidden = (behind < 0) if window is None else (behind < 0) | (behind >= window)
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        out[rows] = torch.einsum("hnl,hld->nhd", weights, v).to(q.dtype)
    return out
