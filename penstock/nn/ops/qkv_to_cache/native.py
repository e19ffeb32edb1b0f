from ctypes import addressof

from torch import Tensor

from penstock.nn.batch import Batch
from penstock.nn.native import function
from penstock.nn.native.views import computable, dense_rows, of_layer
from penstock.nn.ops.qkv_to_cache import reference


def qkv_to_cache(
    qkv: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    rotation: tuple[Tensor, Tensor],
    cache: Tensor,
    batch: Batch,
) -> Tensor:
    if not computable(qkv, *(norms or ()), *rotation, cache):
        return reference.qkv_to_cache(qkv, norms, eps, rotation, cache, batch)
    qkv, layer = dense_rows(qkv), of_layer(cache)
    cos, sin = (x.contiguous() for x in rotation)
    weights = tuple(x.contiguous() for x in norms) if norms else ()
    heads = qkv.shape[1] // layer.dim - 2 * layer.kv_heads
    function("penstock_qkv_to_cache", "ppnnppfppppn")(
        addressof(layer),
        qkv.data_ptr(),
        qkv.stride(0),
        heads,
        *([x.data_ptr() for x in weights] or (None, None)),
        eps,
        cos.data_ptr(),
        sin.data_ptr(),
        batch.slot_blocks.data_ptr(),
        batch.slot_offsets.data_ptr(),
        len(qkv),
    )
    return qkv[:, : heads * layer.dim].unflatten(1, (heads, layer.dim))
