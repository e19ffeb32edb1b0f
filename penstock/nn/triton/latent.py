"""Multi-head latent attention: attention over latent vectors, and products of each head by itself.

A vector of a token is K of all heads, and its beginning V: a program has many heads of some rows of a sequence, and
reads each block once for them. Splits and their order are those of attention.py, and so a row's sums are the same to
the bit in any company.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.nn.batch import Batch
from penstock.nn.kv import LayerKV
from penstock.nn.triton import power_of_two
from penstock.nn.triton.attention import (
    LOG2E,
    MERGED,
    MOST_SPLITS,
    PROGRAMS,
    SPLIT,
    merge,
    merge_kernel,
    preparation,
    split_blocks,
)

TILE = 64  # rows of a product: so many tokens times the heads of a program
TOKENS = 32  # of a context at a time: they and the queries must find room
OPTIONS = {"num_warps": 8, "num_stages": 2}
ROWS, OUTS, INS = 64, 64, 64  # of a head's product


@triton.jit(do_not_specialize=("tiles", "ids", "parts", "slots"))
def attend_kernel(  # noqa: PLR0915 -- one program, as Triton has no smaller ones that share registers
    q,
    values,
    tiles,
    ids,
    out,
    part_sums,
    part_stats,
    q_stride,
    block_stride,
    token_stride,
    heads,
    scale,
    parts,
    slots,
    GROUP: tl.constexpr,
    RANK: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
    ROPE: tl.constexpr,
    ROPE_BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
    MOST: tl.constexpr,
):
    """A tile and GROUP heads a program; with several parts, every so many-th split of them.

    Args:
        scale: of scores, with the logarithm of 2 to the base e.
        part_sums, part_stats: [rows, heads, slots, RANK] and [rows, heads, slots, 2], with several parts.
    """
    tile = tiles + 4 * tl.program_id(0)
    part = tl.program_id(2)
    first_row = tl.load(tile)
    count = tl.load(tile + 1).to(tl.int32)
    if count <= 0:
        return
    start = tl.load(tile + 2).to(tl.int32)
    own_ids = ids - 1 - tl.load(tile + 3)
    size = split_blocks(start, SPLIT, MOST, BLOCK)

    m = tl.arange(0, TILE)
    r = tl.arange(0, RANK_BLOCK)
    t = tl.arange(0, ROPE_BLOCK)
    n = tl.arange(0, TOKENS)
    token = m // GROUP
    head = tl.program_id(1) * GROUP + m % GROUP
    valid = (token < count) & (head < heads)
    position = start + token
    row_head = (first_row + token) * heads + head
    in_rank, in_rope = r < RANK, t < ROPE
    query = q + (first_row + token) * q_stride + head * (RANK + ROPE)
    queries = tl.load(query[:, None] + r[None, :], mask=valid[:, None] & in_rank[None, :], other=0.0)
    turned = tl.load(query[:, None] + RANK + t[None, :], mask=valid[:, None] & in_rope[None, :], other=0.0)

    end = (start + count + TOKENS - 1) // TOKENS
    per_split = size * (BLOCK // TOKENS)
    all_most = tl.full((TILE,), -float("inf"), tl.float32)
    all_total = tl.zeros((TILE,), tl.float32)
    all_sums = tl.zeros((TILE, RANK_BLOCK), tl.float32)
    for split in range(part, (end + per_split - 1) // per_split, parts):
        most = tl.full((TILE,), -float("inf"), tl.float32)
        total = tl.zeros((TILE,), tl.float32)
        sums = tl.zeros((TILE, RANK_BLOCK), tl.float32)
        for piece in range(split * per_split, tl.minimum(end, (split + 1) * per_split)):
            place = piece * TOKENS + n
            slot = tl.load(own_ids + piece * TOKENS // BLOCK) * block_stride
            base = values + slot + (place % BLOCK)[:, None] * token_stride
            latent = tl.load(base + r[None, :], mask=in_rank[None, :], other=0.0)
            keys = tl.load(base + RANK + t[None, :], mask=in_rope[None, :], other=0.0)
            scores = tl.dot(queries, tl.trans(latent), input_precision="ieee")
            scores = tl.dot(turned, tl.trans(keys), scores, input_precision="ieee") * scale
            scores = tl.where(place[None, :] <= position[:, None], scores, -float("inf"))
            largest = tl.maximum(most, tl.max(scores, 1))
            lowest = tl.where(largest == -float("inf"), 0.0, largest)
            weights = tl.exp2(scores - lowest[:, None])
            shrink = tl.exp2(most - lowest)
            total = total * shrink + tl.sum(weights, 1)
            sums = tl.dot(weights.to(latent.dtype), latent, sums * shrink[:, None], input_precision="ieee")
            most = largest
        if parts == 1:
            all_most, all_total, all_sums = merge(all_most, all_total, all_sums, most, total, sums)
        else:
            partial = row_head * slots + split
            there = valid[:, None] & in_rank[None, :]
            tl.store(part_sums + partial[:, None] * RANK + r[None, :], sums, mask=there)
            tl.store(part_stats + 2 * partial, most, mask=valid)
            tl.store(part_stats + 2 * partial + 1, total, mask=valid)
    if parts == 1:
        tl.store(
            out + row_head[:, None] * RANK + r[None, :],
            (all_sums / all_total[:, None]).to(queries.dtype),
            mask=valid[:, None] & in_rank[None, :],
        )


def attention(q: Tensor, cache: LayerKV, batch: Batch, scale: float) -> Tensor:
    """Of latent vectors, where attention.py's `serves`: as the op."""
    rows, heads, dim = q.shape
    rank = cache.latent
    q = q if q.stride(2) == 1 and q.stride(1) == dim else q.contiguous()
    group = min(heads, TILE)
    step = batch.prepared(preparation(TILE // group))
    out = torch.empty(rows, heads, rank, dtype=q.dtype, device=q.device)
    count, groups = len(step.tiles), triton.cdiv(heads, group)
    if count == 0:
        return out
    parts = min(step.splits, -(-PROGRAMS // (count * groups)))
    sums, stats = out, out
    if parts > 1:
        sums = torch.empty(rows, heads, step.splits, rank, dtype=torch.float32, device=q.device)
        stats = torch.empty(rows, heads, step.splits, 2, dtype=torch.float32, device=q.device)
    tokens = cache.values.shape[3]
    constants = {"BLOCK": tokens, "SPLIT": SPLIT, "MOST": MOST_SPLITS}
    attend_kernel[(count, groups, parts)](
        q,
        cache.values,
        step.tiles,
        step.ids,
        out,
        sums,
        stats,
        q.stride(0),
        cache.values.stride(0),
        cache.values.stride(3),
        heads,
        scale * LOG2E,
        parts,
        step.splits,
        GROUP=group,
        RANK=rank,
        RANK_BLOCK=max(16, power_of_two(rank)),
        ROPE=dim - rank,
        ROPE_BLOCK=max(16, power_of_two(dim - rank)),
        TILE=TILE,
        TOKENS=TOKENS,
        **constants,
        **OPTIONS,
    )
    if parts > 1:
        block = max(16, power_of_two(rank))
        merge_kernel[(rows, triton.cdiv(heads, MERGED))](
            sums,
            stats,
            batch.positions,
            out,
            heads,
            0,
            step.splits,
            DIM=rank,
            DIM_BLOCK=block,
            HEADS=MERGED,
            **constants,
            num_warps=2,
        )
    return out


@triton.jit
def head_linear_kernel(
    x,
    weight,
    out,
    x_stride,
    x_head_stride,
    out_stride,
    out_head_stride,
    rows,
    outs,
    ins,
    ROWS: tl.constexpr,
    OUTS: tl.constexpr,
    INS: tl.constexpr,
):
    """Some outputs of some rows of a head a program, which goes through the inputs from the first to the last."""
    head = tl.program_id(2).to(tl.int64)
    row = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) * OUTS + tl.arange(0, OUTS)
    i = tl.arange(0, INS)
    row_there, column_there = row < rows, column < outs
    x_place = x + head * x_head_stride + row[:, None] * x_stride + i[None, :]
    weight_place = weight + (head * outs + column.to(tl.int64))[None, :] * ins + i[:, None]
    sums = tl.zeros((ROWS, OUTS), tl.float32)
    for first in range(0, ins, INS):
        there = first + i < ins
        left = tl.load(x_place + first, mask=row_there[:, None] & there[None, :], other=0.0)
        right = tl.load(weight_place + first, mask=column_there[None, :] & there[:, None], other=0.0)
        sums = tl.dot(left, right, sums, input_precision="ieee")
    place = out + head * out_head_stride + row[:, None] * out_stride + column[None, :]
    tl.store(place, sums.to(out.dtype.element_ty), mask=row_there[:, None] & column_there[None, :])


def head_linear(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """[rows, heads, ins] with dense heads and [heads, outs, ins] -> `out`, [rows, heads, outs] with dense heads."""
    rows, heads, ins = x.shape
    if rows == 0:
        return
    x = x if x.stride(2) == 1 else x.contiguous()
    outs = weight.shape[1]
    head_linear_kernel[(triton.cdiv(outs, OUTS), triton.cdiv(rows, ROWS), heads)](
        x, weight, out, x.stride(0), x.stride(1), out.stride(0), out.stride(1), rows, outs, ins, ROWS, OUTS, INS
    )
