from ctypes import addressof

from torch import Tensor

from penstock.nn.batch import Batch
from penstock.nn.native import function
from penstock.nn.native.views import computable, dense_rows, of_layer
from penstock.nn.ops.store_kv import reference


def store_kv(k: Tensor, v: Tensor, cache: Tensor, batch: Batch) -> None:
    if not computable(k, v, cache):
        reference.store_kv(k, v, cache, batch)
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
