"""Attention over some of a sequence's positions, and what such parts make together: so several devices can attend for
one sequence (xLLM, section 4.4.3, layer 2).

Positions are attended to in pieces of a fixed length, counted from the sequence's start, each by itself, and pieces are
merged in their order. So it makes no difference, to the bit, who computes which of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.core.plan import BLOCK_TOKENS
from penstock.nn.kv import LayerKV
from penstock.nn.ops.backends import Backend, Op

Pieces = tuple[Tensor, Tensor]


def partial_attention(q: Tensor, cache: LayerKV, blocks: Tensor, length: int, piece: int, scale: float) -> Pieces:
    """softmax(q k^T * scale) v over each piece of a context.

    Args:
        q: [rows, heads, dim]; heads share K and V as in `attention`. All rows see all of these positions.
        cache: one layer.
        blocks: [blocks] int64: those that hold the positions, the first of which begins a piece.
        length: how many positions there are.
        piece: positions of each but the last, a multiple of a block's.
        scale: of the scores.

    Returns:
        [pieces, rows, heads, value dim] float32, and [pieces, rows, heads] float32, the logarithms of what the weights
        were divided by.
    """
    return PARTIAL_OP[q.device.type](q, cache, blocks, length, piece, scale)


def merge_attention(heads: Tensor, logarithms: Tensor, dtype: torch.dtype) -> Tensor:
    """What `partial_attention` returned of all pieces, in their order -> [rows, heads, value dim] of that dtype:
    sum of o_i exp(l_i - l), where l is the logarithm of the sum of exp(l_i)."""
    return MERGE_OP[heads.device.type](heads, logarithms, dtype)


def _partial_reference(q: Tensor, cache: LayerKV, blocks: Tensor, length: int, piece: int, scale: float) -> Pieces:
    assert piece % BLOCK_TOKENS == 0
    group = q.shape[1] // cache.kv_heads
    heads, logarithms = list[Tensor](), list[Tensor]()
    for first in range(0, length, piece):
        count = min(piece, length - first)
        own = blocks[first // BLOCK_TOKENS : -(-(first + count) // BLOCK_TOKENS)]
        # [blocks, kinds, kv_heads, block, dim] -> [kinds, heads, count, dim]
        context = cache.of_blocks(own, torch.float32).permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :count]
        k, v = cache.parts(context.repeat_interleave(group, dim=1))
        scores = torch.einsum("nhd,hld->nhl", q.float(), k) * scale
        total = scores.logsumexp(-1)
        heads.append(torch.einsum("nhl,hld->nhd", (scores - total[..., None]).exp(), v))
        logarithms.append(total)
    return torch.stack(heads), torch.stack(logarithms)


def _merge_reference(heads: Tensor, logarithms: Tensor, dtype: torch.dtype) -> Tensor:
    most = logarithms.amax(0)
    shares = (logarithms - most).exp()
    out, divisor = torch.zeros_like(heads[0]), torch.zeros_like(most)
    for own, share in zip(heads, shares, strict=True):
        out = out + own * share[..., None]
        divisor = divisor + share
    return (out / divisor[..., None]).to(dtype)


PARTIAL_OP = Op("partial_attention", Backend("reference", _partial_reference))
MERGE_OP = Op("merge_attention", Backend("reference", _merge_reference))
