"""Put the K and V of a step's rows into the cache."""

from ctypes import addressof

from torch import Tensor

from penstock.nn.batch import Batch
from penstock.nn.kv import LayerKV
from penstock.nn.native import cached, dense_rows, function, missing, of_layer
from penstock.nn.ops.backends import Backend, Op


def store_kv(k: Tensor, v: Tensor, cache: LayerKV, batch: Batch) -> None:
    """Write one layer's rows in place, over whatever a place had.

    Args:
        k, v: [rows, kv_heads, dim].
        cache: one layer.
        batch: says which block and place each row belongs to.
    """
    OP[k.device.type](k, v, cache, batch)


def reference(k: Tensor, v: Tensor, cache: LayerKV, batch: Batch) -> None:
    cache.put(0, batch.slot_blocks, batch.slot_offsets, k)
    cache.put(1, batch.slot_blocks, batch.slot_offsets, v)


def _native(k: Tensor, v: Tensor, cache: LayerKV, batch: Batch) -> None:
    if not cached(cache, k, v):
        reference(k, v, cache, batch)
        return
    k, v, layer = dense_rows(k), dense_rows(v), of_layer(cache, k.dtype)
    function("penstock_store_kv", "ppnpnppn")(
        addressof(layer),
        k.data_ptr(),
        k.stride(0),
        v.data_ptr(),
        v.stride(0),
        batch.slot_blocks.data_ptr(),
        batch.slot_offsets.data_ptr(),
        len(k),
    )


OP = Op("store_kv", Backend("native", _native, frozenset({"cpu"}), missing), Backend("reference", reference))
