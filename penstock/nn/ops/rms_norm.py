"""Root-mean-square norm, alone and after adding a residual."""

import torch
from torch import Tensor

from penstock.nn import triton
from penstock.nn.native import computable, dense_rows, function, is_bf16, missing
from penstock.nn.ops.backends import Backend, Op


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, the mean in float32; x's shape and dtype.

    Args:
        weight: of x's dtype, and then what is normed is rounded to it before it is multiplied (Llama); or float32, and
            then only after (Gemma).
    """
    return OP[x.device.type](x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual), the sum rounded to x's dtype before it is normed."""
    return ADD_OP[x.device.type](x, residual, weight, eps)


def reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normed * weight).to(x.dtype) if weight.dtype == torch.float32 else normed.to(x.dtype) * weight


def _add_reference(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = x + residual
    return reference(total, weight, eps), total


def _computable(x: Tensor, weight: Tensor) -> bool:
    return computable(x) and weight.dtype in (x.dtype, torch.float32)


def _native(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if not _computable(x, weight):
        return reference(x, weight, eps)
    rows, weight = dense_rows(x.reshape(-1, x.shape[-1])), weight.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype)
    function("penstock_rms_norm", "npnpnfpnn")(
        is_bf16(x),
        rows.data_ptr(),
        rows.stride(0),
        weight.data_ptr(),
        weight.dtype != x.dtype,
        eps,
        out.data_ptr(),
        *rows.shape,
    )
    return out


def _add_native(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    if x.dtype != residual.dtype or not _computable(x, weight):
        return _add_reference(x, residual, weight, eps)
    x, residual, weight = x.contiguous(), residual.contiguous(), weight.contiguous()
    out, total = torch.empty_like(x), torch.empty_like(x)
    function("penstock_add_rms_norm", "npppnfppnn")(
        is_bf16(x),
        x.data_ptr(),
        residual.data_ptr(),
        weight.data_ptr(),
        weight.dtype != x.dtype,
        eps,
        out.data_ptr(),
        total.data_ptr(),
        x.numel() // x.shape[-1],
        x.shape[-1],
    )
    return out, total


def _triton(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    from penstock.nn.triton import rows

    return rows.rms_norm(x, weight.contiguous(), eps)


def _add_triton(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    from penstock.nn.triton import rows

    if x.ndim != 2 or x.dtype != residual.dtype:
        return _add_reference(x, residual, weight, eps)
    return rows.add_rms_norm(dense_rows(x), dense_rows(residual), weight.contiguous(), eps)


CPU = frozenset({"cpu"})
OP = Op(
    "rms_norm",
    Backend("native", _native, CPU, missing),
    Backend("triton", _triton, triton.DEVICES, triton.missing),
    Backend("reference", reference),
)
ADD_OP = Op(
    "add_rms_norm",
    Backend("native", _add_native, CPU, missing),
    Backend("triton", _add_triton, triton.DEVICES, triton.missing),
    Backend("reference", _add_reference),
)
