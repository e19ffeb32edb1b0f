"""What attention needs of its projection, in one pass: norms of Q and K, rotation, K and V into the cache."""

from torch import Tensor

from penstock.nn.batch import Batch
from penstock.nn.native import missing
from penstock.nn.ops.backends import Backend, Op
from penstock.nn.ops.qkv_to_cache import native, reference

OP = Op(
    "qkv_to_cache",
    Backend("native", native.qkv_to_cache, frozenset({"cpu"}), missing),
    Backend("reference", reference.qkv_to_cache),
)


def qkv_to_cache(
    qkv: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    rotation: tuple[Tensor, Tensor],
    cache: Tensor,
    batch: Batch,
) -> Tensor:
    """Store one layer's K and V and return its Q.

    Args:
        qkv: [rows, (heads + 2 * kv_heads) * dim]: Q, K, then V; may be overwritten.
        norms: [dim] weights of the norms of Q's and of K's heads, where there are such.
        eps: of the norms.
        rotation: cos and sin, [rows, dim / 2] in qkv's dtype.
        cache: one layer, [blocks, 2, kv_heads, BLOCK_TOKENS, dim].
        batch: says which block and place each row belongs to.

    Returns:
        [rows, heads, dim], normed and rotated.
    """
    return OP.on(qkv.device.type)(qkv, norms, eps, rotation, cache, batch)
