"""Put the K and V of a step's rows into the cache."""

from ctypes import addressof

from torch import Tensor

from penstock.nn.batch import Batch
from penstock.nn.native import computable, dense_rows, function, missing, of_layer
from penstock.nn.ops.backends import Backend, Op


def store_kv(k: Tensor, v: Tensor, cache: Tensor, batch: Batch) -> None:
    """Write one layer's rows in place.

    Args:
        k, v: [rows, kv_heads, dim].
        cache: one layer, [blocks, 2, kv_heads, BLOCK_TOKENS, dim], K at 0 and V at 1.
        batch: says which block and place each row belongs to.
    """
    OP[k.device.type](k, v, cache, batch)


def reference(k: Tensor, v: Tensor, cache: Tensor, batch: Batch) -> None:
    cache[batch.slot_blocks, 0, :, batch.slot_offsets] = k
    cache[batch.slot_blocks, 1, :, batch.slot_offsets] = v


def _native(k: Tensor, v: Tensor, cache: Tensor, batch: Batch) -> None:
    if not computable(k, v, cache):
        reference(k, v, cache, batch)
        return
    k, v, layer = dense_rows(k), dense_rows(v), of_layer(cache)
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
