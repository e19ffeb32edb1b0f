"""Causal attention of a step's rows over their sequences' cached K and V."""

from ctypes import addressof

import torch
from torch import Tensor

from penstock.nn import triton
from penstock.nn.batch import Batch
from penstock.nn.kv import LayerKV
from penstock.nn.native import DTYPES, cached, dense_rows, function, missing, of_layer
from penstock.nn.ops.backends import Backend, Op
from penstock.nn.ops.sdpa import attention as sdpa


def attention(q: Tensor, cache: LayerKV, batch: Batch, scale: float, window: int | None = None) -> Tensor:
    """softmax(q k^T * scale) v, where a row at position p sees positions (p - window, p] of its own sequence.

    Args:
        q: [rows, heads, dim]; query heads h * heads / kv_heads and following share K and V head h.
        cache: one layer; the step's own rows are stored already, and read as they were stored.
        batch: says which blocks hold each sequence.
        scale: of the scores.
        window: how many positions a row sees, itself included; None is all.

    Returns:
        [rows, heads, value dim] in q's dtype.
    """
    return OP[q.device.type](q, cache, batch, scale, window)


def reads_in_place(device: str, dtype: torch.dtype) -> bool:
    """Whether blocks are read where they lie, through a table as fast as in a range."""
    return OP.backend_on(device).name == "native" and dtype in DTYPES


def _reference(q: Tensor, cache: LayerKV, batch: Batch, scale: float, window: int | None) -> Tensor:
    """Written to be read: one sequence after the other, every score spelled out, in float32."""
    out = q.new_empty(*q.shape[:2], cache.value_dim)
    group = q.shape[1] // cache.kv_heads
    for span in batch.spans:
        length = span.start + span.rows
        # [blocks, kinds, kv_heads, block, dim] -> [kinds, heads, length, dim]
        context = cache.of_blocks(span.blocks, torch.float32).permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :length]
        k, v = cache.parts(context.repeat_interleave(group, dim=1))
        rows = slice(span.row, span.row + span.rows)
        scores = torch.einsum("nhd,hld->hnl", q[rows].float(), k) * scale
        behind = torch.arange(span.start, length, device=q.device)[:, None] - torch.arange(length, device=q.device)
        hidden = (behind < 0) if window is None else (behind < 0) | (behind >= window)
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        out[rows] = torch.einsum("hnl,hld->nhd", weights, v).to(q.dtype)
    return out


def _native(q: Tensor, cache: LayerKV, batch: Batch, scale: float, window: int | None) -> Tensor:
    """One kernel for decodes and prompts, over blocks where they lie (native/attention.h); equal to the bit."""
    if not cached(cache, q):
        return sdpa(q, cache, batch, scale, window)
    q, layer = dense_rows(q), of_layer(cache, q.dtype)
    out = q.new_empty(*q.shape[:2], cache.value_dim)
    spans, ids = batch.places
    function("penstock_attention", "pnppnpnpfn")(
        spans.data_ptr(),
        len(spans),
        ids.data_ptr(),
        addressof(layer),
        q.shape[1],
        q.data_ptr(),
        q.stride(0),
        out.data_ptr(),
        scale,
        window or 0,
    )
    return out


def _triton(q: Tensor, cache: LayerKV, batch: Batch, scale: float, window: int | None) -> Tensor:
    """One kernel for decodes and prompts (triton/attention.py, latent.py); equal to the bit."""
    from penstock.nn.triton import attention as kernels
    from penstock.nn.triton import latent

    if not kernels.serves(q, cache):
        return sdpa(q, cache, batch, scale, window)
    if cache.latent:
        assert window is None
        return latent.attention(q, cache, batch, scale)
    return kernels.attention(q, cache, batch, scale, window)


OP = Op(
    "attention",
    Backend("native", _native, frozenset({"cpu"}), missing),
    Backend("triton", _triton, triton.DEVICES, triton.missing),
    Backend("sdpa", sdpa),
    Backend("reference", _reference),
)
