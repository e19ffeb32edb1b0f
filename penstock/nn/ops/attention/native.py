"""One kernel for decoding sequences and prompts, over blocks where they lie (native/attention.h). Equal to the bit."""

from ctypes import addressof

import torch
from torch import Tensor

from penstock.nn.batch import Batch
from penstock.nn.native import function
from penstock.nn.native.views import computable, dense_rows, of_layer
from penstock.nn.ops.attention import sdpa


def attention(q: Tensor, cache: Tensor, batch: Batch, scale: float, window: int | None) -> Tensor:
    if not computable(q, cache):
        return sdpa.attention(q, cache, batch, scale, window)
    q, layer = dense_rows(q), of_layer(cache)
    out = torch.empty(q.shape, dtype=q.dtype)
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
