"""K and V of sequences out of the cache, wherever their blocks lie."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.nn.batch import Scratch, Span


def read(cache: Tensor, span: Span, skip: int, dtype: torch.dtype, scratch: Scratch) -> Tensor:
    """One sequence's K and V without its first `skip` blocks: [2, kv_heads, tokens, dim], strided as it comes.

    Where its blocks are consecutive, nothing is gathered: when its tokens lie at one stride and are of the wanted
    dtype, they are read where they are, and otherwise copied.
    """
    if not isinstance(span.ids, range):
        return gather(cache, span.blocks[None, skip:], dtype, scratch)[:, 0]
    source = cache[span.ids[skip] : span.ids.stop].permute(1, 2, 0, 3, 4)  # [2, kv_heads, blocks, BLOCK_TOKENS, dim]
    kinds, kv_heads, blocks, tokens, dim = source.shape
    if source.dtype == dtype and source.stride(2) == tokens * source.stride(3):
        return source.flatten(2, 3)
    if not _by_token(cache):
        return scratch.take("context", source.shape, dtype, cache.device).copy_(source).flatten(2, 3)
    shape = (blocks, tokens, kinds, kv_heads, dim)
    copy = scratch.take("gathered", shape, cache.dtype, cache.device)
    copy.permute(2, 3, 0, 1, 4).copy_(source)
    if copy.dtype != dtype:  # short strided runs are copied faster than they are converted
        copy = scratch.take("context", shape, dtype, cache.device).copy_(copy)
    return copy.permute(2, 3, 0, 1, 4).flatten(2, 3)


def gather(cache: Tensor, blocks: Tensor, dtype: torch.dtype, scratch: Scratch) -> Tensor:
    """K and V of sequences with equally many blocks: [2, sequences, kv_heads, tokens, dim], strided as it comes.

    The memory is looked at as pieces that lie together (one head's part of a block, or all heads' part of a token),
    because selecting whole pieces runs at the speed of memory, and indexing by several dimensions does not.

    Args:
        blocks: [sequences, blocks] int64.
    """
    _, kinds, kv_heads, tokens, dim = cache.shape
    device, count = cache.device, len(blocks)
    by_token = _by_token(cache)
    piece = kinds * kv_heads * dim if by_token else tokens * dim
    if cache.stride(0) % piece:  # blocks are padded
        found = cache[blocks].permute(2, 0, 3, 1, 4, 5)  # [2, sequences, kv_heads, blocks, BLOCK_TOKENS, dim]
        return found.to(dtype).flatten(3, 4)
    first, to_block = cache.storage_offset() // piece, cache.stride(0) // piece
    if by_token:
        places = torch.arange(tokens, device=device) * (cache.stride(3) // piece) + first
        wanted = (blocks[:, :, None] * to_block + places).flatten()
        shape = (count, blocks.shape[1] * tokens, kinds, kv_heads, dim)
    else:
        heads = torch.arange(kv_heads, device=device)[:, None] * (cache.stride(2) // piece) + first
        keys = blocks[:, None, :] * to_block + heads  # [sequences, kv_heads, blocks]
        wanted = torch.stack((keys, keys + cache.stride(1) // piece)).flatten()
        shape = (kinds, count, kv_heads, blocks.shape[1] * tokens, dim)
    pieces = cache.as_strided((cache.untyped_storage().nbytes() // cache.itemsize // piece, piece), (piece, 1), 0)
    found = scratch.take("gathered", (len(wanted), piece), cache.dtype, device)
    torch.index_select(pieces, 0, wanted, out=found)
    if found.dtype != dtype:
        found = scratch.take("context", found.shape, dtype, device).copy_(found)
    found = found.view(shape)
    return found.permute(2, 0, 3, 1, 4) if by_token else found


def _by_token(cache: Tensor) -> bool:
    """Whether all heads of a token lie together, rather than all tokens of a head."""
    return cache.stride(2) == cache.shape[4] and cache.stride(3) > cache.stride(2)
