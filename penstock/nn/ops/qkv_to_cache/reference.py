from torch import Tensor

from penstock.nn.batch import Batch
from penstock.nn.ops.rms_norm.reference import rms_norm
from penstock.nn.ops.rotary.reference import rotary
from penstock.nn.ops.store_kv.reference import store_kv


def qkv_to_cache(
    qkv: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    rotation: tuple[Tensor, Tensor],
    cache: Tensor,
    batch: Batch,
) -> Tensor:
    kv_heads, dim = cache.shape[2], cache.shape[4]
    heads = qkv.unflatten(1, (-1, dim))
    q, k, v = heads.split((heads.shape[1] - 2 * kv_heads, kv_heads, kv_heads), dim=1)
    if norms is not None:
        q, k = rms_norm(q, norms[0], eps), rms_norm(k, norms[1], eps)
    store_kv(rotary(k, *rotation), v, cache, batch)
    return rotary(q, *rotation)
