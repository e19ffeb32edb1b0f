import torch
from torch import Tensor

from penstock.nn.native import function
from penstock.nn.native.views import computable, dense_rows, is_bf16
from penstock.nn.ops.silu_mul import reference


def silu_mul(gate_up: Tensor) -> Tensor:
    if not computable(gate_up):
        return reference.silu_mul(gate_up)
    rows = dense_rows(gate_up)
    out = torch.empty(len(rows), rows.shape[1] // 2, dtype=rows.dtype)
    function("penstock_silu_mul", "npnpnn")(is_bf16(rows), rows.data_ptr(), rows.stride(0), out.data_ptr(), *out.shape)
    return out
