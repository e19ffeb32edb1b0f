"""Weights of products for each head by itself."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from penstock.nn import native
from penstock.nn.packed import PackedWeight


class HeadWeight(nn.Module):
    """[heads, outs, ins].

    Attributes:
        packed: whether as the CPU's kernels read each head's (nn/packed.py).
        memory: of all heads, one after the other: [heads, outs, ins], or flat where they are packed.
    """

    def __init__(
        self, heads: int, outs: int, ins: int, dtype: torch.dtype, device: torch.device | None, packed: bool
    ) -> None:
        super().__init__()
        self.shape, self.packed = torch.Size((heads, outs, ins)), packed
        shape = (heads * PackedWeight(outs, ins, dtype, torch.device("meta")).memory.numel(),) if packed else self.shape
        self.memory = nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)

    def prepare(self) -> None:
        """Before `put`: what fills up lines is zero."""
        if self.packed:
            self.memory.zero_()

    def put(self, weight: Tensor) -> None:
        """Set all of it, [heads, outs, ins] of any dtype."""
        assert weight.shape == self.shape
        if not self.packed:
            self.memory.copy_(weight)
            return
        heads, outs, ins = self.shape
        rows, size = weight.to(self.memory.dtype).contiguous(), self.memory.nbytes // heads
        pack = native.function(f"penstock_pack_{native.SUFFIX[self.memory.dtype]}", "pnnpnn")
        for head in range(heads):
            pack(self.memory.data_ptr() + head * size, outs, ins, rows[head].data_ptr(), 0, outs)

    def dense(self) -> Tensor:
        """[heads, outs, ins], perhaps a copy."""
        if not self.packed:
            return self.memory
        heads, outs, ins = self.shape
        one = PackedWeight(outs, ins, self.memory.dtype, torch.device("meta"))
        parts = []
        for lines in self.memory.view(heads, -1):
            one.memory = nn.Parameter(lines, requires_grad=False)
            parts.append(one.unpacked())
        return torch.stack(parts)


class LatentWeight(nn.Module):
    """[heads * (key + value), rank].

    Attributes:
        keys: [heads, rank, key]: from a query to what its product with a latent vector is.
        values: [heads, value, rank]: from a sum of latent vectors to one of V.
    """

    def __init__(
        self, heads: int, widths: tuple[int, int], rank: int, dtype: torch.dtype, device: torch.device, packed: bool
    ) -> None:
        super().__init__()
        key, value = widths
        self.shape = torch.Size((heads * (key + value), rank))
        self.keys = HeadWeight(heads, rank, key, dtype, device, packed)
        self.values = HeadWeight(heads, value, rank, dtype, device, packed)

    @property
    def dtype(self) -> torch.dtype:
        return self.keys.memory.dtype

    @property
    def device(self) -> torch.device:
        return self.keys.memory.device
