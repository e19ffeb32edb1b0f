"""Attention of the beams of a search: a prompt that all share, and places of their own that are found by index."""

import torch
from torch import Tensor

from penstock.core.plan import BLOCK_TOKENS
from penstock.nn.batch import BranchSpan, Scratch
from penstock.nn.kv import LayerKV
from penstock.nn.ops.backends import Backend, Op
from penstock.nn.ops.sdpa import read


def branch_attention(
    q: Tensor, cache: LayerKV, span: BranchSpan, scale: float, window: int | None, scratch: Scratch
) -> Tensor:
    """softmax(q k^T * scale) v, where every row sees the prompt and then its own places, the last of them its own.

    Args:
        q: [rows of the span, heads, dim]; heads share K and V as in `attention`.
        cache: one layer; the step's own rows are stored already, and read as they were stored.
        span: says where the prompt's blocks and each row's places are.
        scale: of the scores.
        window: how many positions a row sees, itself included; None is all.
        scratch: for what is computed on the way.

    Returns:
        [rows of the span, heads, value dim] in q's dtype.
    """
    return OP[q.device.type](q, cache, span, scale, window, scratch)


def _reference(
    q: Tensor, cache: LayerKV, span: BranchSpan, scale: float, window: int | None, scratch: Scratch
) -> Tensor:
    """Written to be read: one row after the other, its whole context put together, in float32."""
    out = q.new_empty(*q.shape[:2], cache.value_dim)
    group = q.shape[1] // cache.kv_heads
    first = 0 if window is None else max(0, span.length - window)
    prompt = cache.of_blocks(span.prompt.blocks, torch.float32)
    shared = prompt.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, : span.prompt.length]
    for row, slots in enumerate(span.slots):
        own = cache.of_tokens(slots // BLOCK_TOKENS, slots % BLOCK_TOKENS, torch.float32).permute(1, 2, 0, 3)
        # [kinds, heads, context, dim]
        k, v = cache.parts(torch.cat([shared, own], dim=2)[:, :, first:].repeat_interleave(group, dim=1))
        weights = (torch.einsum("hd,hld->hl", q[row].float(), k) * scale).softmax(-1)
        out[row] = torch.einsum("hl,hld->hd", weights, v).to(q.dtype)
    return out


def _merged(q: Tensor, cache: LayerKV, span: BranchSpan, scale: float, window: int | None, scratch: Scratch) -> Tensor:
    """Two partial softmaxes, merged by the logarithms of their sums: over the prompt's K and V, read once for all rows,
    and over each row's own, gathered."""
    # what a batch computes for a span has shapes of that span alone, so its results do not depend on the others
    dtype = torch.float32 if q.device.type == "cpu" else q.dtype
    queries = q.to(dtype).unflatten(1, (cache.kv_heads, -1))  # [rows, kv_heads, heads / kv_heads, dim]
    first = 0 if window is None else max(0, span.length - window)
    own = _own(queries, cache, span, scale, max(0, first - span.prompt.length))
    if first >= span.prompt.length:
        heads = own[0]
    else:
        heads = _merge(_shared(queries, cache, span, scale, first, scratch), own)
    return heads.flatten(1, 2).to(q.dtype)


def _shared(
    queries: Tensor, cache: LayerKV, span: BranchSpan, scale: float, first: int, scratch: Scratch
) -> tuple[Tensor, Tensor]:
    """Of the prompt's positions from `first` on; see `_partial`."""
    skip = first // BLOCK_TOKENS
    seen = slice(first - skip * BLOCK_TOKENS, span.prompt.length - skip * BLOCK_TOKENS)
    # [kv_heads, positions, dim]
    k, v = cache.parts(read(cache, span.prompt, skip, queries.dtype, scratch)[:, :, seen])
    # rows and the heads that share K and V are rows of one product: [kv_heads, rows * heads / kv_heads, dim]
    heads, lse = _partial(queries.transpose(0, 1).flatten(1, 2), k, v, scale)
    apart = (len(queries), queries.shape[2])
    return heads.unflatten(1, apart).transpose(0, 1), lse.unflatten(1, apart).transpose(0, 1)


def _own(queries: Tensor, cache: LayerKV, span: BranchSpan, scale: float, first: int) -> tuple[Tensor, Tensor]:
    """Of each row's places from the `first` on; see `_partial`."""
    slots = span.slots[:, first:]
    # [rows, positions, kinds, kv_heads, dim]
    found = cache.of_tokens(slots // BLOCK_TOKENS, slots % BLOCK_TOKENS, queries.dtype)
    k, v = cache.parts(found.permute(2, 0, 3, 1, 4))  # [rows, kv_heads, positions, dim]
    return _partial(queries, k, v, scale)


def _partial(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """[..., n, dim], [..., positions, dim] and [..., positions, value dim] -> their attention [..., n, value dim]
    float32, and the logarithms of what its weights were divided by [..., n, 1]."""
    scores = (q @ k.transpose(-1, -2)).float() * scale
    lse = scores.logsumexp(-1, keepdim=True)
    return ((scores - lse).exp().to(v.dtype) @ v).float(), lse


def _merge(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> Tensor:
    share = torch.sigmoid(a[1] - b[1])  # of a in the sum of both
    return a[0] * share + b[0] * (1 - share)


OP = Op("branch_attention", Backend("merged", _merged), Backend("reference", _reference))
