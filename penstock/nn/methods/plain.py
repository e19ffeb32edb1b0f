"""Weights as checkpoints have them."""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn

from penstock.nn import ops
from penstock.nn.methods.base import LinearMethod


class Plain(LinearMethod[nn.Parameter, Tensor]):
    """A parameter [outs, ins], on any device and of any dtype."""

    name = "plain"

    def missing(self, device: torch.device, dtype: torch.dtype) -> str | None:
        return None

    def create(self, outs: int, ins: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
        return nn.Parameter(torch.empty(outs, ins, dtype=dtype, device=device), requires_grad=False)

    def prepare(self, weight: nn.Parameter) -> None:
        pass

    def put(self, weight: nn.Parameter, first: int, rows: Tensor) -> None:
        weight[first : first + len(rows)] = rows

    def apply(self, x: Tensor, weight: nn.Parameter, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        return ops.linear(x, weight, bias).to(dtype)

    def rows(self, weight: nn.Parameter, index: Tensor) -> Tensor:
        return weight.index_select(0, index)

    def dense(self, weight: nn.Parameter) -> Tensor:
        return weight

    def part(self, weight: nn.Parameter, first: int, outs: int) -> nn.Parameter:
        return nn.Parameter(weight.detach()[first : first + outs], requires_grad=False)

    def layout(self) -> str:
        return f"{self.name} {sys.byteorder}"
