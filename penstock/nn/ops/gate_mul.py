"""The gate of a gated MLP."""

import torch
from torch import Tensor
from torch.nn import functional

from penstock.nn import triton
from penstock.nn.native import computable, dense_rows, function, is_bf16, missing
from penstock.nn.ops.backends import Backend, Op

ACTIVATIONS = ("silu", "gelu_tanh")  # in the order of native/rows.h


def gate_mul(gate_up: Tensor, activation: str = "silu") -> Tensor:
    """activation(gate) * up of [rows, 2 * width], gate in the first half -> [rows, width].

    Args:
        activation: one of `ACTIVATIONS`; its result is rounded before it is multiplied.
    """
    return OP[gate_up.device.type](gate_up, activation)


def _reference(gate_up: Tensor, activation: str) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    if activation == "gelu_tanh":
        return functional.gelu(gate, approximate="tanh") * up
    return functional.silu(gate) * up


def _native(gate_up: Tensor, activation: str) -> Tensor:
    if not computable(gate_up):
        return _reference(gate_up, activation)
    rows = dense_rows(gate_up)
    out = torch.empty(len(rows), rows.shape[1] // 2, dtype=rows.dtype)
    function("penstock_gate_mul", "nnpnpnn")(
        is_bf16(rows), ACTIVATIONS.index(activation), rows.data_ptr(), rows.stride(0), out.data_ptr(), *out.shape
    )
    return out


def _triton(gate_up: Tensor, activation: str) -> Tensor:
    from penstock.nn.triton import rows

    return rows.gate_mul(dense_rows(gate_up), activation)


OP = Op(
    "gate_mul",
    Backend("native", _native, frozenset({"cpu"}), missing),
    Backend("triton", _triton, triton.DEVICES, triton.missing),
    Backend("reference", _reference),
)
