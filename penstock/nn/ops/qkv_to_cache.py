"""What attention needs of its projection, in one pass: norms of Q and K, rotation, K and V into the cache."""

from ctypes import addressof

import torch
from torch import Tensor

from penstock.nn import triton
from penstock.nn.batch import Batch
from penstock.nn.kv import LayerKV
from penstock.nn.native import cached, dense_rows, function, missing, of_layer
from penstock.nn.ops.backends import Backend, Op
from penstock.nn.ops.rms_norm import reference as rms_norm
from penstock.nn.ops.rotary import reference as rotary
from penstock.nn.ops.store_kv import reference as store_kv

Norms = tuple[Tensor, Tensor] | None


def qkv_to_cache(
    qkv: Tensor, norms: Norms, eps: float, rotation: tuple[Tensor, Tensor], cache: LayerKV, batch: Batch
) -> Tensor:
    """Store one layer's K and V and return its Q.

    Args:
        qkv: [rows, (heads + 2 * kv_heads) * dim]: Q, K, then V; may be overwritten.
        norms: [dim] weights of the norms of Q's and of K's heads, both as `rms_norm` has them, where there are such.
        eps: of the norms.
        rotation: cos and sin, as `rotary` has them.
        cache: one layer.
        batch: says which block and place each row belongs to.

    Returns:
        [rows, heads, dim], normed and rotated.
    """
    return OP[qkv.device.type](qkv, norms, eps, rotation, cache, batch)


def _reference(
    qkv: Tensor, norms: Norms, eps: float, rotation: tuple[Tensor, Tensor], cache: LayerKV, batch: Batch
) -> Tensor:
    kv_heads, dim = cache.kv_heads, cache.dim
    heads = qkv.unflatten(1, (-1, dim))
    q, k, v = heads.split((heads.shape[1] - 2 * kv_heads, kv_heads, kv_heads), dim=1)
    if norms is not None:
        q, k = rms_norm(q, norms[0], eps), rms_norm(k, norms[1], eps)
    store_kv(rotary(k, *rotation), v, cache, batch)
    return rotary(q, *rotation)


def _native(
    qkv: Tensor, norms: Norms, eps: float, rotation: tuple[Tensor, Tensor], cache: LayerKV, batch: Batch
) -> Tensor:
    if not cached(cache, qkv, *rotation) or any(x.dtype not in (qkv.dtype, torch.float32) for x in norms or ()):
        return _reference(qkv, norms, eps, rotation, cache, batch)
    qkv, layer = dense_rows(qkv), of_layer(cache, qkv.dtype)
    cos, sin = (x.contiguous() for x in rotation)
    weights = tuple(x.contiguous() for x in norms) if norms else ()
    heads = qkv.shape[1] // layer.dim - 2 * layer.kv_heads
    function("penstock_qkv_to_cache", "ppnnppnfppnppn")(
        addressof(layer),
        qkv.data_ptr(),
        qkv.stride(0),
        heads,
        *([x.data_ptr() for x in weights] or (None, None)),
        bool(weights) and weights[0].dtype != qkv.dtype,
        eps,
        cos.data_ptr(),
        sin.data_ptr(),
        2 * sin.shape[1],
        batch.slot_blocks.data_ptr(),
        batch.slot_offsets.data_ptr(),
        len(qkv),
    )
    return qkv[:, : heads * layer.dim].unflatten(1, (heads, layer.dim))


def _triton(
    qkv: Tensor, norms: Norms, eps: float, rotation: tuple[Tensor, Tensor], cache: LayerKV, batch: Batch
) -> Tensor:
    if cache.scales is not None or cache.values.dtype != qkv.dtype:
        return _reference(qkv, norms, eps, rotation, cache, batch)
    from penstock.nn.triton import cache as kernels

    weights = None if norms is None else (norms[0].contiguous(), norms[1].contiguous())
    return kernels.qkv_to_cache(dense_rows(qkv), weights, eps, rotation, cache, batch)


OP = Op(
    "qkv_to_cache",
    Backend("native", _native, frozenset({"cpu"}), missing),
    Backend("triton", _triton, triton.DEVICES, triton.missing),
    Backend("reference", _reference),
)
