"""A weight in few bits as the CPU's kernels read it."""

from __future__ import annotations

import ctypes
import sys

import torch
from torch import Tensor, nn

from penstock.core.mappings import prefer_large
from penstock.nn import native
from penstock.nn.packed import LANES, LINE
from penstock.nn.quantised import Codes, Pieces, put_order

RUN = 128  # see native/quantised.h
LAYOUT = 1  # to be counted up with whatever changes what stands where
TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}  # of scales


def layout() -> str:
    """Names how weights are packed here, which depends on the instruction set."""
    return f"{LAYOUT} {native.value('penstock_quantised_groups')()} {sys.byteorder}"


def panel_outs() -> int:
    """Outputs that a panel has."""
    return native.value("penstock_quantised_groups")() * LANES


class Quantised(ctypes.Structure):
    """`penstock::Quantised` (quantised.h)."""

    _fields_ = (
        ("lines", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("outs", "ins", "group", "bits", "scales", "has_zeros", "zero")),
        ("order", ctypes.c_void_p),
    )


class PackedQuantisedWeight(nn.Module):
    """[outs, ins], in the layout that `native/quantised.h` describes.

    Attributes:
        kind: what it is made of.
        dtype: of rows that it is multiplied with, and of its own.
        memory: all lines, flat bytes.
        order: [ins] int32, where there is one: x[:, order] is what columns of codes are multiplied with.
    """

    def __init__(
        self, outs: int, ins: int, kind: Codes, dtype: torch.dtype, device: torch.device | None = None
    ) -> None:
        super().__init__()
        self.shape = torch.Size((outs, ins))
        self.kind, self.dtype = kind, dtype
        self._view = Quantised(
            None,
            outs,
            ins,
            kind.group,
            0 if kind.kind == "e4m3" else kind.bits,
            TYPES[kind.scales],
            kind.zeros,
            0 if kind.zeros else kind.middle,
            None,
        )
        size = native.value("penstock_quantised_bytes", "p")(ctypes.addressof(self._view))
        self.memory = nn.Parameter(torch.empty(size, dtype=torch.uint8, device=device), requires_grad=False)
        order = torch.empty(ins, dtype=torch.int32, device=device) if kind.ordered else None
        self.order = None if order is None else nn.Parameter(order, requires_grad=False)

    @property
    def device(self) -> torch.device:
        return self.memory.device

    def view(self) -> int:
        """Where kernels find what it is. That stays true until its memory moves."""
        self._view.lines = self.memory.data_ptr()
        self._view.order = None if self.order is None else self.order.data_ptr()
        return ctypes.addressof(self._view)

    def prepare(self) -> None:
        """Before the first `put`: what fills up lines is zero, and no order is known."""
        assert self.memory.is_contiguous()
        assert self.memory.data_ptr() % LINE == 0
        prefer_large(self.memory.data_ptr(), self.memory.nbytes)
        self.memory.zero_()
        if self.order is not None:
            self.order.fill_(-1)

    def put(self, first: int, pieces: Pieces) -> None:
        """Set outputs [first, first + len(pieces.codes)).

        Raises:
            ValueError: they have their inputs in another order than those before.
        """
        count, ins = pieces.codes.shape
        assert ins == self.shape[1]
        assert pieces.codes.dtype == torch.uint8
        assert 0 <= first <= self.shape[0] - count
        assert (pieces.zeros is not None) == self.kind.zeros
        codes = pieces.codes.contiguous()
        scales, zeros = (
            None if part is None else part.to(self.kind.scales).contiguous() for part in (pieces.scales, pieces.zeros)
        )
        assert scales is not None
        assert scales.shape == (count, self.kind.groups(ins))
        if self.order is not None:
            put_order(self.order, pieces.order)
        native.function("penstock_quantised_put", "pnnppp")(
            self.view(), first, count, codes.data_ptr(), scales.data_ptr(), None if zeros is None else zeros.data_ptr()
        )

    def part(self, first: int, outs: int) -> PackedQuantisedWeight:
        """Outputs [first, first + outs), whole panels, in the same memory."""
        part = PackedQuantisedWeight(outs, self.shape[1], self.kind, self.dtype, torch.device("meta"))
        start = first * part.memory.nbytes // outs  # panels are of one size
        memory = self.memory.detach()[start : start + part.memory.nbytes]
        part.memory, part.order = nn.Parameter(memory, requires_grad=False), self.order
        return part

    def rows(self, index: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """weight[index], each number rounded once. index: [rows] int64."""
        index = index.contiguous()
        out = torch.empty(len(index), self.shape[1], dtype=dtype or self.dtype)
        gather = native.function(f"penstock_quantised_gather_{native.SUFFIX[out.dtype]}", "ppnp")
        gather(self.view(), index.data_ptr(), len(index), out.data_ptr())
        return out

    def unpacked(self, dtype: torch.dtype | None = None) -> Tensor:
        """A copy as [outs, ins]."""
        return self.rows(torch.arange(self.shape[0]), dtype)

    def rounded(self, x: Tensor) -> Tensor:
        """[rows, ins] in float32, as its codes are multiplied with them: whole ones with whole numbers from -127 to 127
        times a scale for each run of a row's inputs."""
        x = x.float() if self.order is None else x[:, self.order].float()
        if self.kind.kind == "integer":
            ins, group = self.shape[1], self.kind.group or self.shape[1]
            for begin in range(0, ins, group):
                end = min(ins, begin + group)
                for first in range(begin, end, RUN):
                    run = x[:, first : min(end, first + RUN)]
                    most = run.abs().amax(1, keepdim=True)
                    inverse = torch.where(most < 1e-30, 0.0, torch.full_like(most, 127.0) / most)
                    run.copy_((run * inverse).round() * (most / 127.0))
        if self.order is None:
            return x
        placed = torch.empty_like(x)
        placed[:, self.order.long()] = x
        return placed
