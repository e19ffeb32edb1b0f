"""K and V into the cache, as they are or with what comes before: norms of heads and rotation."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.nn.batch import Batch
from penstock.nn.kv import LayerKV
from penstock.nn.triton import power_of_two

HEADS = 8  # that a program handles


@triton.jit(do_not_specialize=("slot_blocks", "slot_offsets"))
def qkv_kernel(
    qkv,
    q_norm,
    k_norm,
    cos,
    sin,
    slot_blocks,
    slot_offsets,
    q_out,
    values,
    qkv_stride,
    block_stride,
    kind_stride,
    head_stride,
    token_stride,
    heads,
    kv_heads,
    eps,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    NORMED: tl.constexpr,
    WIDE: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Some heads of one row a program: first those of Q, then of K, then of V. HALF: of what is turned of a head."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    i = tl.arange(0, BLOCK)
    there = (head < heads + 2 * kv_heads)[:, None] & (i < DIM)[None, :]
    source = qkv + row * qkv_stride + head[:, None] * DIM
    x = tl.load(source + i[None, :], mask=there, other=0.0)
    # the other of its pair
    j = tl.where(i < HALF, i + HALF, tl.where(i < 2 * HALF, i - HALF, i))
    y = tl.load(source + j[None, :], mask=there, other=0.0)
    wide_x, wide_y = x.to(tl.float32), y.to(tl.float32)
    is_q, is_v = (head < heads)[:, None], (head >= heads + kv_heads)[:, None]
    if NORMED:
        factor = tl.rsqrt(tl.sum(wide_x * wide_x, 1) / DIM + eps)[:, None]
        inside = i < DIM
        q_x, q_y = tl.load(q_norm + i, mask=inside, other=0.0), tl.load(q_norm + j, mask=inside, other=0.0)
        k_x, k_y = tl.load(k_norm + i, mask=inside, other=0.0), tl.load(k_norm + j, mask=inside, other=0.0)
        weight_x = tl.where(is_q, q_x.to(tl.float32)[None, :], k_x.to(tl.float32)[None, :])
        weight_y = tl.where(is_q, q_y.to(tl.float32)[None, :], k_y.to(tl.float32)[None, :])
        normed_x, normed_y = wide_x * factor, wide_y * factor
        if not WIDE:
            normed_x, normed_y = normed_x.to(x.dtype).to(tl.float32), normed_y.to(x.dtype).to(tl.float32)
        wide_x = (normed_x * weight_x).to(x.dtype).to(tl.float32)
        wide_y = (normed_y * weight_y).to(x.dtype).to(tl.float32)
    turned = i < 2 * HALF
    angle = row * HALF + tl.where(i < HALF, i, i - HALF)
    c = tl.load(cos + angle, mask=turned, other=1.0).to(tl.float32)[None, :]
    s = tl.load(sin + angle, mask=turned, other=0.0).to(tl.float32)[None, :]
    s = tl.where((i < HALF)[None, :], -s, s)
    # each product is rounded, as torch's are
    rotated = (wide_x * c).to(x.dtype).to(tl.float32) + (wide_y * s).to(x.dtype).to(tl.float32)
    result = tl.where(is_v, x, rotated.to(x.dtype))
    target = q_out + (row * heads + head[:, None]) * DIM + i[None, :]
    tl.store(target, result, mask=there & is_q)
    block = tl.load(slot_blocks + row)
    offset = tl.load(slot_offsets + row)
    kv_head = tl.where(is_v, head[:, None] - heads - kv_heads, head[:, None] - heads)
    place = values + block * block_stride + kv_head * head_stride + offset * token_stride + i[None, :]
    place += tl.where(is_v, kind_stride, 0)
    # a row that pads a step belongs nowhere: its block is -1
    tl.store(place, result, mask=there & (head >= heads)[:, None] & (block >= 0))


def qkv_to_cache(
    qkv: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    rotation: tuple[Tensor, Tensor],
    cache: LayerKV,
    batch: Batch,
) -> Tensor:
    """Of [rows, width] with dense rows, into a cache of the same dtype."""
    cos, sin = (x.contiguous() for x in rotation)
    kv_heads, dim = cache.kv_heads, cache.dim
    heads = qkv.shape[1] // dim - 2 * kv_heads
    q = torch.empty(len(qkv), heads, dim, dtype=qkv.dtype, device=qkv.device)
    weights = norms or (q, q)
    qkv_kernel[(len(qkv), triton.cdiv(heads + 2 * kv_heads, HEADS))](
        qkv,
        *weights,
        cos,
        sin,
        batch.slot_blocks,
        batch.slot_offsets,
        q,
        cache.values,
        qkv.stride(0),
        *cache.values.stride()[:4],
        heads,
        kv_heads,
        eps,
        dim,
        cos.shape[1],
        norms is not None,
        weights[0].dtype != qkv.dtype,
        HEADS,
        power_of_two(dim),
    )
    return q


@triton.jit(do_not_specialize=("slot_blocks", "slot_offsets"))
def store_kernel(
    k,
    v,
    slot_blocks,
    slot_offsets,
    values,
    k_stride,
    k_head_stride,
    v_stride,
    v_head_stride,
    block_stride,
    kind_stride,
    head_stride,
    token_stride,
    kv_heads,
    DIM: tl.constexpr,
    BOTH: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Some heads of one row a program."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    i = tl.arange(0, BLOCK)
    block = tl.load(slot_blocks + row)
    # a row that pads a step belongs nowhere: its block is -1
    there = (head < kv_heads)[:, None] & (i < DIM)[None, :] & (block >= 0)
    place = values + block * block_stride + tl.load(slot_offsets + row) * token_stride
    place += head[:, None] * head_stride + i[None, :]
    source = k + row * k_stride + head[:, None] * k_head_stride + i[None, :]
    tl.store(place, tl.load(source, mask=there, other=0.0), mask=there)
    if BOTH:
        source = v + row * v_stride + head[:, None] * v_head_stride + i[None, :]
        tl.store(place + kind_stride, tl.load(source, mask=there, other=0.0), mask=there)


def store(k: Tensor, v: Tensor | None, cache: LayerKV, batch: Batch) -> None:
    """As the op, into a cache of the same dtype."""
    rows, kv_heads, dim = k.shape
    k, other = (x if x.stride(2) == 1 else x.contiguous() for x in (k, k if v is None else v))
    store_kernel[(rows, triton.cdiv(kv_heads, HEADS))](
        k,
        other,
        batch.slot_blocks,
        batch.slot_offsets,
        cache.values,
        *k.stride()[:2],
        *other.stride()[:2],
        *cache.values.stride()[:4],
        kv_heads,
        dim,
        v is not None,
        min(HEADS, power_of_two(kv_heads)),
        power_of_two(dim),
    )
