"""Weights as checkpoints have them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from penstock.nn import ops
from penstock.nn.methods.base import LinearMethod
from penstock.nn.packed import Weight


class Plain(LinearMethod):
    """A parameter [outs, ins], on any device and of any dtype."""

    name = "plain"

    def missing(self, device: torch.device, dtype: torch.dtype) -> str | None:
        return None

    def create(self, outs: int, ins: int, dtype: torch.dtype, device: torch.device) -> Weight:
        return nn.Parameter(torch.empty(outs, ins, dtype=dtype, device=device), requires_grad=False)

    def prepare(self, weight: Weight) -> None:
        pass

    def load(self, weight: Weight, name: str, tensor: Tensor, first: int, outs: range, ins: range) -> None:
        self.dense(weight)[first : first + len(outs)] = tensor[outs.start : outs.stop, ins.start : ins.stop]

    def apply(self, x: Tensor, weight: Weight, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        return ops.linear(x, self.dense(weight), bias).to(dtype)

    def rows(self, weight: Weight, index: Tensor) -> Tensor:
        return self.dense(weight)[index]

    def dense(self, weight: Weight) -> Tensor:
        assert isinstance(weight, nn.Parameter)
        return weight
