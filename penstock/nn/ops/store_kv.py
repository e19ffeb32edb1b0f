"""Put the K and V of a step's rows into the cache."""

from ctypes import addressof

from torch import Tensor

from penstock.nn import triton
from penstock.nn.batch import Batch
from penstock.nn.kv import LayerKV
from penstock.nn.native import cached, dense_rows, function, missing, of_layer
from penstock.nn.ops.backends import Backend, Op


def store_kv(k: Tensor, v: Tensor | None, cache: LayerKV, batch: Batch) -> None:
    """Write one layer's rows in place, over whatever a place had.

    Args:
        k, v: [rows, kv_heads, dim]; of latent vectors k alone.
        cache: one layer.
        batch: says which block and place each row belongs to.
    """
    OP[k.device.type](k, v, cache, batch)


def reference(k: Tensor, v: Tensor | None, cache: LayerKV, batch: Batch) -> None:
    cache.put(0, batch.slot_blocks, batch.slot_offsets, k)
    if v is not None:
        cache.put(1, batch.slot_blocks, batch.slot_offsets, v)


def _native(k: Tensor, v: Tensor | None, cache: LayerKV, batch: Batch) -> None:
    if not cached(cache, k, *(() if v is None else (v,))):
        reference(k, v, cache, batch)
        return
    k, layer = dense_rows(k), of_layer(cache, k.dtype)
    v = None if v is None else dense_rows(v)
    function("penstock_store_kv", "ppnpnppn")(
        addressof(layer),
        k.data_ptr(),
        k.stride(0),
        *((None, 0) if v is None else (v.data_ptr(), v.stride(0))),
        batch.slot_blocks.data_ptr(),
        batch.slot_offsets.data_ptr(),
        len(k),
    )


def _triton(k: Tensor, v: Tensor | None, cache: LayerKV, batch: Batch) -> None:
    from penstock.nn.triton.cache import store

    if cache.scales is not None or cache.values.dtype != k.dtype:
        reference(k, v, cache, batch)
    elif len(k):
        store(k, v, cache, batch)


OP = Op(
    "store_kv",
    Backend("native", _native, frozenset({"cpu"}), missing),
    Backend("triton", _triton, triton.DEVICES, triton.missing),
    Backend("reference", reference),
)
