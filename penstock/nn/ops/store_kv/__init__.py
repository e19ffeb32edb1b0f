"""Put the K and V of a step's rows into the cache."""

from torch import Tensor

from penstock.nn.batch import Batch
from penstock.nn.native import missing
from penstock.nn.ops.backends import Backend, Op
from penstock.nn.ops.store_kv import native, reference

OP = Op(
    "store_kv",
    Backend("native", native.store_kv, frozenset({"cpu"}), missing),
    Backend("reference", reference.store_kv),
)


def store_kv(k: Tensor, v: Tensor, cache: Tensor, batch: Batch) -> None:
    """Write one layer's rows in place.

    Args:
        k, v: [rows, kv_heads, dim].
        cache: one layer, [blocks, 2, kv_heads, BLOCK_TOKENS, dim], K at 0 and V at 1.
        batch: says which block and place each row belongs to.
    """
    OP.on(k.device.type)(k, v, cache, batch)
