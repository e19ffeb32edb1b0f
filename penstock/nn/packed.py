"""A weight as the CPU's kernels read it. It is packed while it is loaded, and held in no other form."""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn

from penstock.core.mappings import prefer_large
from penstock.nn import native

LANES = 16
LINE = 64  # bytes
LAYOUT = 1  # to be counted up with whatever changes what stands where


def layout() -> str:
    """Names how weights are packed here, which depends on the instruction set."""
    chosen = native.isa()
    assert chosen is not None
    return f"{LAYOUT} {chosen.name} {native.panel_groups()} {sys.byteorder}"


class PackedWeight(nn.Module):
    """[outs, ins], in the layout that `native/gemm.h` describes.

    Attributes:
        memory: all lines, flat.
    """

    def __init__(self, outs: int, ins: int, dtype: torch.dtype, device: torch.device | None = None) -> None:
        super().__init__()
        self.shape = torch.Size((outs, ins))
        self.in_word = 4 // dtype.itemsize
        self.steps = -(-ins // self.in_word)
        self.groups = -(-outs // LANES)
        elements = self.groups * self.steps * LANES * self.in_word
        self.memory = nn.Parameter(torch.empty(elements, dtype=dtype, device=device), requires_grad=False)

    @classmethod
    def of(cls, weight: Tensor) -> PackedWeight:
        outs, ins = weight.shape
        packed = cls(outs, ins, weight.dtype, weight.device)
        packed.prepare()
        packed.put(0, weight)
        return packed

    @property
    def dtype(self) -> torch.dtype:
        return self.memory.dtype

    @property
    def device(self) -> torch.device:
        return self.memory.device

    def prepare(self) -> None:
        """Before the first `put`: what fills up lines is zero."""
        assert self.memory.is_contiguous()
        assert self.memory.data_ptr() % LINE == 0
        prefer_large(self.memory.data_ptr(), self.memory.nbytes)
        if self.shape != (self.groups * LANES, self.steps * self.in_word):
            self.memory.zero_()

    def put(self, first: int, rows: Tensor) -> None:
        """Set rows [first, first + len(rows)); `rows` is [rows, ins] of any dtype."""
        assert rows.shape[1] == self.shape[1]
        assert 0 <= first <= self.shape[0] - len(rows)
        rows = rows.to(self.dtype).contiguous()
        pack = native.function(f"penstock_pack_{native.SUFFIX[self.dtype]}", "pnnpnn")
        pack(self.memory.data_ptr(), *self.shape, rows.data_ptr(), first, len(rows))

    def part(self, first: int, outs: int) -> PackedWeight:
        """Outputs [first, first + outs), whole panels, in the same memory."""
        line = self.steps * self.in_word
        part = PackedWeight(outs, self.shape[1], self.dtype, torch.device("meta"))
        memory = self.memory.detach()[first * line : (first + outs) * line]
        part.memory = nn.Parameter(memory, requires_grad=False)
        return part

    def unpacked(self) -> Tensor:
        """A copy as [outs, ins]."""
        panel = native.panel_groups()
        whole = self.groups // panel * panel
        split = whole * self.steps * LANES * self.in_word
        rows = []
        for part, groups in ((self.memory[:split], panel), (self.memory[split:], self.groups - whole)):
            if len(part):
                lines = part.view(-1, self.steps, groups, LANES, self.in_word)
                rows.append(lines.permute(0, 2, 3, 1, 4).reshape(-1, self.steps * self.in_word))
        return torch.cat(rows)[: self.shape[0], : self.shape[1]]
