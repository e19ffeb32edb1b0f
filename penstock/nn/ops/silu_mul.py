"""The gate of a gated MLP."""

import torch
from torch import Tensor
from torch.nn import functional

from penstock.nn.native import computable, dense_rows, function, is_bf16, missing
from penstock.nn.ops.backends import Backend, Op


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of [rows, 2 * width], gate in the first half -> [rows, width]."""
    return OP[gate_up.device.type](gate_up)


def _reference(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up


def _native(gate_up: Tensor) -> Tensor:
    if not computable(gate_up):
        return _reference(gate_up)
    rows = dense_rows(gate_up)
    out = torch.empty(len(rows), rows.shape[1] // 2, dtype=rows.dtype)
    function("penstock_silu_mul", "npnpnn")(is_bf16(rows), rows.data_ptr(), rows.stride(0), out.data_ptr(), *out.shape)
    return out


OP = Op("silu_mul", Backend("native", _native, frozenset({"cpu"}), missing), Backend("reference", _reference))
