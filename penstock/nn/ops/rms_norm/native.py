import torch
from torch import Tensor

from penstock.nn.native import function
from penstock.nn.native.views import computable, dense_rows, is_bf16
from penstock.nn.ops.rms_norm import reference


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if not computable(x, weight):
        return reference.rms_norm(x, weight, eps)
    rows, weight = dense_rows(x.reshape(-1, x.shape[-1])), weight.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype)
    function("penstock_rms_norm", "npnpfpnn")(
        is_bf16(x),
        rows.data_ptr(),
        rows.stride(0),
        weight.data_ptr(),
        eps,
        out.data_ptr(),
        *rows.shape,
    )
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    if not computable(x, residual, weight):
        return reference.add_rms_norm(x, residual, weight, eps)
    x, residual, weight = x.contiguous(), residual.contiguous(), weight.contiguous()
    out, total = torch.empty_like(x), torch.empty_like(x)
    function("penstock_add_rms_norm", "npppfppnn")(
        is_bf16(x),
        x.data_ptr(),
        residual.data_ptr(),
        weight.data_ptr(),
        eps,
        out.data_ptr(),
        total.data_ptr(),
        x.numel() // x.shape[-1],
        x.shape[-1],
    )
    return out, total
