"""On torch's scaled_dot_product_attention: decoding sequences in padded groups or alone, prompts in pieces."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from penstock.core.plan import BLOCK_TOKENS
from penstock.nn.batch import Batch, Scratch, Span
from penstock.nn.kv import LayerKV

PIECE = 512  # rows of a prompt at a time: bounds the mask, and skips most of the triangle above the diagonal
# On a CPU, bytes of one layer's K and V as they are computed with. A decoding sequence that has so many (padded) is
# computed alone, which costs a call and saves the padding; shorter ones share calls that stay within the second.
ALONE = 1 << 20
TOGETHER = 4 << 20


@dataclass
class DecodeGroup:
    """Sequences with one row each whose contexts are padded to the same length.

    The padded length, a power of two of blocks, is a function of a sequence's own length, so that which others are in
    its group changes nothing for it.

    Attributes:
        spans: of the sequences.
        padded: length in blocks.
    """

    spans: list[Span]
    padded: int
    _masks: dict[int | None, Tensor] = field(default_factory=dict)
    _parts: dict[int, list[DecodeGroup]] = field(default_factory=dict)

    @cached_property
    def rows(self) -> Tensor:
        """[group] rows of the batch, int64."""
        return torch.tensor([span.row for span in self.spans], device=self.spans[0].device)

    @cached_property
    def blocks(self) -> Tensor:
        """[group, blocks] block ids, padded by the sequence's own first block, int64."""
        ids = [[*span.ids, *[span.ids[0]] * (self.padded - len(span.ids))] for span in self.spans]
        return torch.tensor(ids, device=self.spans[0].device)

    @cached_property
    def lengths(self) -> Tensor:
        """[group] context lengths with the row itself, int64."""
        return torch.tensor([span.length for span in self.spans], device=self.spans[0].device)

    def mask(self, window: int | None) -> Tensor:
        """[group, 1, 1, tokens] bool: what a row may see, at most `window` positions back with itself."""
        mask = self._masks.get(window)
        if mask is None:
            position = torch.arange(self.padded * BLOCK_TOKENS, device=self.lengths.device)
            mask = position < self.lengths[:, None]
            if window is not None:
                mask &= position >= self.lengths[:, None] - window
            mask = self._masks[window] = mask[:, None, None]
        return mask

    def parts(self, most: int) -> list[DecodeGroup]:
        """The same sequences in groups of at most so many."""
        if len(self.spans) <= most:
            return [self]
        parts = self._parts.get(most)
        if parts is None:
            starts = range(0, len(self.spans), most)
            parts = self._parts[most] = [DecodeGroup(self.spans[i : i + most], self.padded) for i in starts]
        return parts


@dataclass(frozen=True, slots=True)
class SdpaMetadata:
    """A step's sequences, by how they are computed.

    Attributes:
        decodes: those that have one row.
        prefills: those that have several.
    """

    decodes: list[DecodeGroup]
    prefills: list[Span]


def prepare(batch: Batch) -> SdpaMetadata:
    """Once for a step: see `Batch.prepared`."""
    groups: dict[int, list[Span]] = {}
    for span in batch.spans:
        if span.rows == 1:
            groups.setdefault(1 << (len(span.ids) - 1).bit_length(), []).append(span)
    decodes = [DecodeGroup(spans, padded) for padded, spans in sorted(groups.items())]
    return SdpaMetadata(decodes, [span for span in batch.spans if span.rows > 1])


def attention(q: Tensor, cache: LayerKV, batch: Batch, scale: float, window: int | None) -> Tensor:
    # torch's CPU kernels round the weights to bfloat16 differently for one row and for many; in float32 they differ in
    # the last bits only, and cost the same
    cpu = q.device.type == "cpu"
    dtype = torch.float32 if cpu else q.dtype
    out = q.new_empty(*q.shape[:2], cache.value_dim)
    q = q.to(dtype)
    per_block = math.prod(cache.values.shape[1:]) * dtype.itemsize
    metadata = batch.prepared(prepare)
    for group in metadata.decodes:
        size = group.padded * per_block
        if cpu and size >= ALONE:
            for span in group.spans:
                _decode_alone(out, q, cache, span, scale, window, batch.scratch)
        else:
            for part in group.parts(max(1, TOGETHER // size) if cpu else len(group.spans)):
                _decode_together(out, q, cache, part, scale, window, batch.scratch)
    for span in metadata.prefills:
        _prefill(out, q, cache, span, scale, window, batch.scratch)
    return out


def _decode_together(
    out: Tensor, q: Tensor, cache: LayerKV, group: DecodeGroup, scale: float, window: int | None, scratch: Scratch
) -> None:
    k, v = cache.parts(gather(cache, group.blocks, q.dtype, scratch))
    # query heads that share K and V are rows of one product: [group, kv_heads, heads / kv_heads, dim]
    queries = q[group.rows].unflatten(1, (cache.kv_heads, -1))
    heads = scaled_dot_product_attention(queries, k, v, attn_mask=group.mask(window), scale=scale)
    out[group.rows] = heads.reshape(-1, *out.shape[1:]).to(out.dtype)


def _decode_alone(
    out: Tensor, q: Tensor, cache: LayerKV, span: Span, scale: float, window: int | None, scratch: Scratch
) -> None:
    first = 0 if window is None else max(0, span.length - window)
    skip = first // BLOCK_TOKENS
    seen = slice(first - skip * BLOCK_TOKENS, span.length - skip * BLOCK_TOKENS)
    k, v = cache.parts(read(cache, span, skip, q.dtype, scratch)[:, None, :, seen])
    queries = q[span.row].unflatten(0, (cache.kv_heads, -1))[None]
    heads = scaled_dot_product_attention(queries, k, v, scale=scale)
    out[span.row] = heads[0].flatten(0, 1).to(out.dtype)


def _prefill(
    out: Tensor, q: Tensor, cache: LayerKV, span: Span, scale: float, window: int | None, scratch: Scratch
) -> None:
    skip = 0 if window is None else max(0, span.start + 1 - window) // BLOCK_TOKENS
    skipped = skip * BLOCK_TOKENS
    context = read(cache, span, skip, q.dtype, scratch)[:, None]  # [kinds, 1, kv_heads, tokens, dim]
    done = 0
    while done < span.rows:
        start = span.start + done
        # pieces end at multiples of PIECE in the sequence, however it is chunked
        count = min(span.rows - done, PIECE - start % PIECE)
        end = start + count
        first = 0 if window is None else max(0, start + 1 - window) // BLOCK_TOKENS * BLOCK_TOKENS
        k, v = cache.parts(context[:, :, :, first - skipped : end - skipped])
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


# --- K and V of sequences out of the cache, wherever their blocks lie


def read(cache: LayerKV, span: Span, skip: int, dtype: torch.dtype, scratch: Scratch) -> Tensor:
    """One sequence's K and V without its first `skip` blocks: [kinds, kv_heads, tokens, dim], strided as it comes.

    Where its blocks are consecutive, nothing is gathered: when its tokens lie at one stride and are of the wanted
    dtype, they are read where they are, and otherwise copied.
    """
    if not isinstance(span.ids, range):
        return gather(cache, span.blocks[None, skip:], dtype, scratch)[:, 0]
    wanted = slice(span.ids[skip], span.ids.stop)
    if cache.scales is not None:
        return cache.of_blocks(wanted, dtype).permute(1, 2, 0, 3, 4).flatten(2, 3)
    source = cache.values[wanted].permute(1, 2, 0, 3, 4)  # [kinds, kv_heads, blocks, BLOCK_TOKENS, dim]
    kinds, kv_heads, blocks, tokens, dim = source.shape
    if source.dtype == dtype and source.stride(2) == tokens * source.stride(3):
        return source.flatten(2, 3)
    if not _by_token(cache):
        return scratch.take("context", source.shape, dtype, source.device).copy_(source).flatten(2, 3)
    shape = (blocks, tokens, kinds, kv_heads, dim)
    copy = scratch.take("gathered", shape, source.dtype, source.device)
    copy.permute(2, 3, 0, 1, 4).copy_(source)
    if copy.dtype != dtype:  # short strided runs are copied faster than they are converted
        copy = scratch.take("context", shape, dtype, source.device).copy_(copy)
    return copy.permute(2, 3, 0, 1, 4).flatten(2, 3)


def gather(cache: LayerKV, blocks: Tensor, dtype: torch.dtype, scratch: Scratch) -> Tensor:
    """K and V of sequences with equally many blocks: [kinds, sequences, kv_heads, tokens, dim], strided as it comes.

    The memory is looked at as pieces that lie together (one head's part of a block, or all heads' part of a token),
    because selecting whole pieces runs at the speed of memory, and indexing by several dimensions does not.

    Args:
        blocks: [sequences, blocks] int64.
    """
    values = cache.values
    _, kinds, kv_heads, tokens, dim = values.shape
    device, count = values.device, len(blocks)
    by_token = _by_token(cache)
    piece = kinds * kv_heads * dim if by_token else tokens * dim
    if cache.scales is not None or values.stride(0) % piece or values.storage_offset() % piece:  # blocks are padded
        # [kinds, sequences, kv_heads, blocks, BLOCK_TOKENS, dim]
        return cache.of_blocks(blocks, dtype).permute(2, 0, 3, 1, 4, 5).flatten(3, 4)
    first, to_block = values.storage_offset() // piece, values.stride(0) // piece
    if by_token:
        places = torch.arange(tokens, device=device) * (values.stride(3) // piece) + first
        wanted = (blocks[:, :, None] * to_block + places).flatten()
        shape = (count, blocks.shape[1] * tokens, kinds, kv_heads, dim)
    else:
        heads = torch.arange(kv_heads, device=device)[:, None] * (values.stride(2) // piece) + first
        keys = blocks[:, None, :] * to_block + heads  # [sequences, kv_heads, blocks]
        wanted = torch.stack([keys + kind * values.stride(1) // piece for kind in range(kinds)]).flatten()
        shape = (kinds, count, kv_heads, blocks.shape[1] * tokens, dim)
    pieces = values.as_strided((values.untyped_storage().nbytes() // values.itemsize // piece, piece), (piece, 1), 0)
    found = scratch.take("gathered", (len(wanted), piece), values.dtype, device)
    torch.index_select(pieces, 0, wanted, out=found)
    if found.dtype != dtype:
        found = scratch.take("context", found.shape, dtype, device).copy_(found)
    found = found.view(shape)
    return found.permute(2, 0, 3, 1, 4) if by_token else found


def _by_token(cache: LayerKV) -> bool:
    """Whether all heads of a token lie together, rather than all tokens of a head."""
    return cache.values.stride(2) == cache.dim and cache.values.stride(3) > cache.values.stride(2)
