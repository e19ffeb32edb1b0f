import torch
from torch import Tensor
from torch.nn import functional

from penstock.nn.packed import PackedWeight


def packed_linear(x: Tensor, weight: PackedWeight, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    return functional.linear(x, weight.unpacked(), bias).to(dtype)


def packed_rows(weight: PackedWeight, index: Tensor) -> Tensor:
    return weight.unpacked()[index]
