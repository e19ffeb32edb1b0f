"""On torch's scaled_dot_product_attention: decoding sequences in padded groups, prompts one by one in pieces."""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from penstock.core.plan import BLOCK_TOKENS
from penstock.nn.batch import Batch, DecodeGroup, Span

PIECE = 512  # rows of a prompt at a time: bounds the mask, and skips most of the triangle above the diagonal


def attention(q: Tensor, cache: Tensor, batch: Batch, scale: float, window: int | None) -> Tensor:
    # torch's CPU kernels round the weights to bfloat16 differently for one row and for many; in float32 they differ in
    # the last bits only, and cost the same
    dtype = torch.float32 if q.device.type == "cpu" else q.dtype
    out = torch.empty_like(q)
    q = q.to(dtype)
    for group in batch.decode_groups:
        _decode(out, q, cache, group, scale, window)
    for span in batch.prefills:
        _prefill(out, q, cache, span, scale, window)
    return out


def _decode(out: Tensor, q: Tensor, cache: Tensor, group: DecodeGroup, scale: float, window: int | None) -> None:
    kv_heads, dim = cache.shape[2], cache.shape[4]
    k, v = _gather(cache, group.blocks).to(q.dtype)
    # query heads that share K and V are rows of one product: [group, kv_heads, heads / kv_heads, dim]
    queries = q[group.rows].unflatten(1, (kv_heads, -1))
    heads = scaled_dot_product_attention(queries, k, v, attn_mask=group.mask(window), scale=scale)
    out[group.rows] = heads.reshape(-1, q.shape[1], dim).to(out.dtype)


def _gather(cache: Tensor, blocks: Tensor) -> Tensor:
    """K and V of sequences with equally many blocks, in one copy: [2, sequences, kv_heads, tokens, dim].

    The memory is looked at as pieces of one head's part of a block, because selecting whole pieces runs at the speed of
    memory, and indexing by block and head does not.
    """
    _, _, kv_heads, tokens, dim = cache.shape
    piece = tokens * dim
    to_block, to_kind, to_head = (stride // piece for stride in cache.stride()[:3])
    first = cache.storage_offset() // piece
    heads = torch.arange(kv_heads, device=blocks.device)[:, None] * to_head + first
    keys = blocks[:, None, :] * to_block + heads  # [sequences, kv_heads, blocks]
    wanted = torch.stack((keys, keys + to_kind)).flatten()
    pieces = cache.as_strided((cache.untyped_storage().nbytes() // cache.itemsize // piece, piece), (piece, 1), 0)
    return pieces.index_select(0, wanted).view(2, len(blocks), kv_heads, -1, dim)


def _prefill(out: Tensor, q: Tensor, cache: Tensor, span: Span, scale: float, window: int | None) -> None:
    context = _gather(cache, span.blocks[None]).to(q.dtype)  # [2, 1, kv_heads, tokens, dim]
    done = 0
    while done < span.rows:
        start = span.start + done
        # pieces end at multiples of PIECE in the sequence, however it is chunked
        count = min(span.rows - done, PIECE - start % PIECE)
        end = start + count
        first = 0 if window is None else max(0, start + 1 - window) // BLOCK_TOKENS * BLOCK_TOKENS
        k, v = context[:, :, :, first:end]
        position = torch.arange(start, end, device=q.device)[:, None]
        column = torch.arange(first, end, device=q.device)
        mask = column <= position
        if window is not None:
            mask &= column > position - window
        rows = slice(span.row + done, span.row + done + count)
        queries = q[rows].transpose(0, 1)[None]
        heads = scaled_dot_product_attention(queries, k, v, attn_mask=mask, scale=scale, enable_gqa=True)
        out[rows] = heads[0].transpose(0, 1).to(out.dtype)
        done += count
