import torch
from torch import Tensor

from penstock.nn.native import function
from penstock.nn.native.views import computable, is_bf16
from penstock.nn.ops.rotary import reference


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    if not computable(x, cos, sin):
        return reference.rotary(x, cos, sin)
    if x.stride(2) != 1:
        x = x.contiguous()
    cos, sin = cos.contiguous(), sin.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype)
    function("penstock_rotary", "npnnpppnnn")(
        is_bf16(x),
        x.data_ptr(),
        x.stride(0),
        x.stride(1),
        cos.data_ptr(),
        sin.data_ptr(),
        out.data_ptr(),
        *x.shape,
    )
    return out
