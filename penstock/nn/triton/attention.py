"""Attention over paged K and V, for prompts and decodes alike.

A row's context is cut into splits of a fixed number of blocks, counted from the sequence's first position. Over a split
the softmax is online (Milakov, Gimelshein 2018), block by block; splits are merged one after the other, in their order.
So a row's sums are the same to the bit whether one program goes through all splits, as in large steps, or each has a
program of its own and a second kernel merges them, as in small ones (Flash-Decoding): only the row's position decides.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.core.plan import BLOCK_TOKENS
from penstock.nn.batch import Batch, to_device
from penstock.nn.kv import LayerKV
from penstock.nn.triton import power_of_two

TILE = 64  # rows of a product: so many tokens times the heads that share K and V
SPLIT = 8  # blocks of a split, in contexts of up to MOST_SPLITS of them; twice as many in up to twice as long ones, ...
MOST_SPLITS = 64
PROGRAMS = 264  # that keep a device busy
MOST_DIM = 256
MOST_LATENT = 512, 64  # values of a vector that are V too, and others: see latent.py
MERGED = 2  # heads that a program merges
LOG2E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class Tiles:
    """A step's rows as programs take them.

    Attributes:
        tiles: [tiles, 4] int64: first row, rows, position of the first, and -1 - (the first place of its sequence among
            the ids); a tile of no rows is none.
        ids: [ids] int64 of blocks.
        splits: that the longest context has.
    """

    tiles: Tensor
    ids: Tensor
    splits: int


@triton.jit
def split_blocks(position, SPLIT: tl.constexpr, MOST: tl.constexpr, BLOCK: tl.constexpr):
    """Blocks of a split of a row's context."""
    size = position * 0 + SPLIT
    while position >= size * MOST * BLOCK:
        size *= 2
    return size


@triton.jit
def merge(most, total, sums, more_most, more_total, more_sums):
    """Two partial softmaxes into one: the largest scores [n], sums of weights [n] and of weighted V [n, dim]."""
    largest = tl.maximum(most, more_most)
    base = tl.where(largest == -float("inf"), 0.0, largest)
    left, right = tl.exp2(most - base), tl.exp2(more_most - base)
    # spelled out, so that every kernel rounds in the same places
    total = tl.fma(total, left, more_total * right)
    left, right = tl.broadcast_to(left[:, None], sums.shape), tl.broadcast_to(right[:, None], sums.shape)
    return largest, total, tl.fma(sums, left, more_sums * right)


@triton.jit(do_not_specialize=("tiles", "ids", "window", "parts", "slots"))
def attend_kernel(  # noqa: PLR0915 -- one program, as Triton has no smaller ones that share registers
    q,
    k_values,
    v_values,
    tiles,
    ids,
    out,
    part_sums,
    part_stats,
    q_stride,
    block_stride,
    head_stride,
    token_stride,
    heads,
    scale,
    window,
    parts,
    slots,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
    MOST: tl.constexpr,
):
    """A tile and a head of K and V a program; with several parts, every so many-th split of them.

    Args:
        scale: of scores, with the logarithm of 2 to the base e.
        window: 0 is all.
        part_sums, part_stats: [rows, heads, slots, DIM] and [rows, heads, slots, 2], with several parts.
    """
    tile = tiles + 4 * tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    part = tl.program_id(2)
    first_row = tl.load(tile)
    count = tl.load(tile + 1).to(tl.int32)
    if count <= 0:
        return
    start = tl.load(tile + 2).to(tl.int32)
    own_ids = ids - 1 - tl.load(tile + 3)
    size = split_blocks(start, SPLIT, MOST, BLOCK)

    m = tl.arange(0, TILE)
    d = tl.arange(0, DIM_BLOCK)
    n = tl.arange(0, BLOCK)
    token = m // GROUP
    valid = token < count
    position = start + token
    row = first_row + token
    query_head = head * GROUP + m % GROUP
    inside = d < DIM
    queries = tl.load(
        q + row[:, None] * q_stride + query_head[:, None] * DIM + d[None, :],
        mask=valid[:, None] & inside[None, :],
        other=0.0,
    )
    k_base = k_values + head * head_stride
    v_base = v_values + head * head_stride
    k_offset = n[None, :] * token_stride + d[:, None]
    v_offset = n[:, None] * token_stride + d[None, :]

    end = (start + count + BLOCK - 1) // BLOCK
    begin = start * 0
    if window > 0:
        begin = tl.maximum(start + 1 - window, 0) // BLOCK
    all_most = tl.full((TILE,), -float("inf"), tl.float32)
    all_total = tl.zeros((TILE,), tl.float32)
    all_sums = tl.zeros((TILE, DIM_BLOCK), tl.float32)
    for split in range(begin // size + part, (end + size - 1) // size, parts):
        most = tl.full((TILE,), -float("inf"), tl.float32)
        total = tl.zeros((TILE,), tl.float32)
        sums = tl.zeros((TILE, DIM_BLOCK), tl.float32)
        for block in range(tl.maximum(begin, split * size), tl.minimum(end, (split + 1) * size)):
            slot = tl.load(own_ids + block) * block_stride
            k = tl.load(k_base + slot + k_offset, mask=inside[:, None], other=0.0)
            scores = tl.dot(queries, k, input_precision="ieee") * scale
            behind = position[:, None] - (block * BLOCK + n)[None, :]
            seen = behind >= 0
            if window > 0:
                seen = seen & (behind < window)
            scores = tl.where(seen, scores, -float("inf"))
            largest = tl.maximum(most, tl.max(scores, 1))
            base = tl.where(largest == -float("inf"), 0.0, largest)
            weights = tl.exp2(scores - base[:, None])
            shrink = tl.exp2(most - base)
            total = total * shrink + tl.sum(weights, 1)
            v = tl.load(v_base + slot + v_offset, mask=inside[None, :], other=0.0)
            sums = tl.dot(weights.to(v.dtype), v, sums * shrink[:, None], input_precision="ieee")
            most = largest
        if parts == 1:
            all_most, all_total, all_sums = merge(all_most, all_total, all_sums, most, total, sums)
        else:
            partial = (row * heads + query_head) * slots + split
            tl.store(part_sums + partial[:, None] * DIM + d[None, :], sums, mask=valid[:, None] & inside[None, :])
            tl.store(part_stats + 2 * partial, most, mask=valid)
            tl.store(part_stats + 2 * partial + 1, total, mask=valid)
    if parts == 1:
        tl.store(
            out + (row * heads + query_head)[:, None] * DIM + d[None, :],
            (all_sums / all_total[:, None]).to(queries.dtype),
            mask=valid[:, None] & inside[None, :],
        )


@triton.jit(do_not_specialize=("positions", "window", "slots"))
def merge_kernel(
    part_sums,
    part_stats,
    positions,
    out,
    heads,
    window,
    slots,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
    MOST: tl.constexpr,
):
    """Some heads of one row a program: its splits, merged in their order."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    d = tl.arange(0, DIM_BLOCK)
    position = tl.load(positions + row).to(tl.int32)
    size = split_blocks(position, SPLIT, MOST, BLOCK)
    begin = position * 0
    if window > 0:
        begin = tl.maximum(position + 1 - window, 0) // BLOCK
    there = head < heads
    inside = there[:, None] & (d < DIM)[None, :]
    most = tl.full((HEADS,), -float("inf"), tl.float32)
    total = tl.zeros((HEADS,), tl.float32)
    sums = tl.zeros((HEADS, DIM_BLOCK), tl.float32)
    for split in range(begin // size, position // BLOCK // size + 1):
        partial = (row * heads + head) * slots + split
        more_most = tl.load(part_stats + 2 * partial, mask=there, other=0.0)
        more_total = tl.load(part_stats + 2 * partial + 1, mask=there, other=1.0)
        more_sums = tl.load(part_sums + partial[:, None] * DIM + d[None, :], mask=inside, other=0.0)
        most, total, sums = merge(most, total, sums, more_most, more_total, more_sums)
    target = out + (row * heads + head)[:, None] * DIM + d[None, :]
    tl.store(target, (sums / total[:, None]).to(out.dtype.element_ty), mask=inside)


@functools.cache
def preparation(tokens: int) -> Callable[[Batch], Tiles]:
    """What makes tiles of so many tokens at most; one function for each number, as `Batch.prepared` asks for."""
    return functools.partial(_prepare, tokens)


def _prepare(tokens: int, batch: Batch) -> Tiles:
    if (packed := batch.packed) is not None:
        return Tiles(packed.places[batch.group], packed.ids, splits_of(packed.longest - 1))
    tiles: list[int] = []
    ids: list[int] = []
    for span in batch.spans:
        first = span.start
        while first < span.length:
            # splits get larger at a multiple of MOST_SPLITS of them: there a tile ends
            reach = MOST_SPLITS * BLOCK_TOKENS * blocks_of_split(first)
            end = min(first + tokens, span.length, reach)
            tiles += (span.row + first - span.start, end - first, first, -1 - len(ids))
            first = end
        ids += span.ids
    whole = to_device(tiles + ids, batch.tokens.device)
    splits = max((splits_of(span.length - 1) for span in batch.spans), default=1)
    return Tiles(whole[: len(tiles)].view(-1, 4), whole[len(tiles) :], splits)


def blocks_of_split(position: int) -> int:
    """In the context of a row at a position; as `split_blocks`."""
    size = SPLIT
    while position >= size * MOST_SPLITS * BLOCK_TOKENS:
        size *= 2
    return size


def splits_of(position: int) -> int:
    """Of the context of a row at a position."""
    return position // BLOCK_TOKENS // blocks_of_split(position) + 1


def serves(q: Tensor, cache: LayerKV) -> bool:
    """Whether the kernel computes this: a device has the instructions for 16 bits, and a program must hold a tile."""
    if cache.scales is not None or cache.values.dtype != q.dtype:
        return False
    if q.dtype == (torch.bfloat16 if q.is_cpu else torch.float32):  # of which the interpreter makes no products
        return False
    if cache.latent:
        return cache.latent <= MOST_LATENT[0] and cache.dim - cache.latent <= MOST_LATENT[1]
    return q.shape[1] // cache.kv_heads <= TILE and cache.dim <= MOST_DIM


def attention(q: Tensor, cache: LayerKV, batch: Batch, scale: float, window: int | None) -> Tensor:
    """Of K and V, where `serves`: as the op."""
    rows, heads, dim = q.shape
    kv_heads = cache.kv_heads
    group = heads // kv_heads
    q = q if q.stride(2) == 1 and q.stride(1) == dim else q.contiguous()
    step = batch.prepared(preparation(TILE // group))
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    count = len(step.tiles)
    if count == 0:
        return out
    parts = min(step.splits, -(-PROGRAMS // (count * kv_heads)))
    sums, stats = out, out
    if parts > 1:
        sums = torch.empty(rows, heads, step.splits, dim, dtype=torch.float32, device=q.device)
        stats = torch.empty(rows, heads, step.splits, 2, dtype=torch.float32, device=q.device)
    block = max(16, power_of_two(dim))
    block_stride, _, head_stride, token_stride, _ = cache.values.stride()
    constants = {"DIM": dim, "DIM_BLOCK": block, "BLOCK": BLOCK_TOKENS, "SPLIT": SPLIT, "MOST": MOST_SPLITS}
    attend_kernel[(count, kv_heads, parts)](
        q,
        cache.values,
        cache.values[:, 1],
        step.tiles,
        step.ids,
        out,
        sums,
        stats,
        q.stride(0),
        block_stride,
        head_stride,
        token_stride,
        heads,
        scale * LOG2E,
        window or 0,
        parts,
        step.splits,
        GROUP=group,
        TILE=TILE,
        **constants,
        **launch_options(block),
    )
    if parts > 1:
        merge_kernel[(rows, triton.cdiv(heads, MERGED))](
            sums, stats, batch.positions, out, heads, window or 0, step.splits, HEADS=MERGED, **constants, num_warps=2
        )
    return out


def launch_options(dim: int) -> dict[str, int]:
    """Of `attend_kernel`: one set for every step, as they decide how its products are rounded."""
    return {"num_warps": 8, "num_stages": 2} if dim > 128 else {"num_warps": 4, "num_stages": 3}
