"""In two stages, each a partial softmax: the prompt's K and V, read once for all rows, and each row's own, gathered.
The two are merged by the logarithms of their sums."""

import torch
from torch import Tensor

from penstock.core.plan import BLOCK_TOKENS
from penstock.nn.batch import BranchSpan, Scratch
from penstock.nn.ops.attention.context import read


def attention(q: Tensor, cache: Tensor, span: BranchSpan, scale: float, window: int | None, scratch: Scratch) -> Tensor:
    # what a batch computes for a span has shapes of that span alone, so its results do not depend on the others
    dtype = torch.float32 if q.device.type == "cpu" else q.dtype
    queries = q.to(dtype).unflatten(1, (cache.shape[2], -1))  # [rows, kv_heads, heads / kv_heads, dim]
    first = 0 if window is None else max(0, span.length - window)
    own = _own(queries, cache, span, scale, max(0, first - span.prompt.length))
    if first >= span.prompt.length:
        heads = own[0]
    else:
        heads = _merge(_shared(queries, cache, span, scale, first, scratch), own)
    return heads.flatten(1, 2).to(q.dtype)


def _shared(
    queries: Tensor, cache: Tensor, span: BranchSpan, scale: float, first: int, scratch: Scratch
) -> tuple[Tensor, Tensor]:
    """Of the prompt's positions from `first` on; see `_partial`."""
    skip = first // BLOCK_TOKENS
    seen = slice(first - skip * BLOCK_TOKENS, span.prompt.length - skip * BLOCK_TOKENS)
    k, v = read(cache, span.prompt, skip, queries.dtype, scratch)[:, :, seen]  # [kv_heads, positions, dim]
    # rows and the heads that share K and V are rows of one product: [kv_heads, rows * heads / kv_heads, dim]
    heads, lse = _partial(queries.transpose(0, 1).flatten(1, 2), k, v, scale)
    apart = (len(queries), queries.shape[2])
    return heads.unflatten(1, apart).transpose(0, 1), lse.unflatten(1, apart).transpose(0, 1)


def _own(queries: Tensor, cache: Tensor, span: BranchSpan, scale: float, first: int) -> tuple[Tensor, Tensor]:
    """Of each row's places from the `first` on; see `_partial`."""
    slots = span.slots[:, first:]
    found = cache[slots // BLOCK_TOKENS, :, :, slots % BLOCK_TOKENS]  # [rows, positions, 2, kv_heads, dim]
    k, v = found.permute(2, 0, 3, 1, 4).to(queries.dtype)  # [rows, kv_heads, positions, dim]
    return _partial(queries, k, v, scale)


def _partial(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """[..., n, dim], twice [..., positions, dim] -> their attention [..., n, dim] float32, and the logarithms of what
    its weights were divided by [..., n, 1]."""
    scores = (q @ k.transpose(-1, -2)).float() * scale
    lse = scores.logsumexp(-1, keepdim=True)
    return ((scores - lse).exp().to(v.dtype) @ v).float(), lse


def _merge(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> Tensor:
    share = torch.sigmoid(a[1] - b[1])  # of a in the sum of both
    return a[0] * share + b[0] * (1 - share)
