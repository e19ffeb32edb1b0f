"""A weight in few bits, in the one form that every format of quantised checkpoints is brought to, and that kernels are
made from.

    w[o, order[i]] = scales[o, i // group] * (code[o, i] - zeros[o, i // group])

Formats (nn/formats) do not know how weights are held, and methods (nn/methods) do not know where they come from.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

BITS = (2, 3, 4, 8)
SCALES = (torch.float32, torch.float16, torch.bfloat16)
TOGETHER = 8  # codes of a row that take whole bytes, in any number of bits
LAYOUT = 1  # to be counted up with whatever changes what stands where

Kind = Literal["integer", "e4m3"]


@dataclass(frozen=True, slots=True)
class Codes:
    """What a quantised weight is made of.

    Attributes:
        bits: of a code: 2, 3, 4 or 8.
        kind: "integer"s from 0 to 2**bits - 1, or the bytes of float8 "e4m3" numbers (of the fn variant, which has no
            infinities), whose zero is 0.
        group: inputs that share a scale and a zero; 0 is all of a row. The last group may be smaller.
        zeros: whether each group has its own, perhaps fractional; else it is `middle` for all.
        ordered: whether groups are of inputs in another order than the weight's (GPTQ's act-order).
        scales: dtype of scales and zeros: that of the checkpoint, so that its values are kept as they are: in groups of
            32 inputs, float32 would be a quarter of what 4 bits take. Whole zeros are exact in each.
    """

    bits: int
    kind: Kind = "integer"
    group: int = 0
    zeros: bool = False
    ordered: bool = False
    scales: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        assert self.bits in BITS
        assert self.kind == "integer" or (self.bits == 8 and not self.zeros)
        assert self.group >= 0
        assert self.scales in SCALES

    @property
    def middle(self) -> int:
        """The zero of those that have none of their own."""
        return 0 if self.kind == "e4m3" else 1 << (self.bits - 1)

    def groups(self, ins: int) -> int:
        return -(-ins // self.group) if self.group else 1

    def row_bytes(self, ins: int) -> int:
        """Of the codes of a row."""
        return -(-ins // TOGETHER) * self.bits if self.bits < 8 else ins

    def __str__(self) -> str:
        zeros, order = " with zeros" if self.zeros else "", " in an order" if self.ordered else ""
        scales = str(self.scales).removeprefix("torch.")
        return f"{self.kind} {self.bits} in groups of {self.group}{zeros}{order}, {scales} scales"


@dataclass(frozen=True, slots=True)
class Pieces:
    """Some outputs of a quantised weight.

    Attributes:
        codes: [rows, ins] uint8, one each.
        scales: [rows, groups], of any float dtype.
        zeros: the same, or None where the codes' description has none.
        order: [ins] int64: the weight's input that each column of codes is for; None where it is that column.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    order: Tensor | None = None


def pack(codes: Tensor, bits: int) -> Tensor:
    """[rows, ins] uint8 -> [rows, bytes] uint8: each row's codes as one stream of bits, the lowest first, filled up
    with zeros to a multiple of 8 codes."""
    if bits == 8:
        return codes
    rows, ins = codes.shape
    words = torch.zeros(rows, -(-ins // TOGETHER), TOGETHER, dtype=torch.int32, device=codes.device)
    words.view(rows, -1)[:, :ins] = codes
    shifts = bits * torch.arange(TOGETHER, dtype=torch.int32, device=codes.device)
    streams = (words << shifts).sum(2, dtype=torch.int32)  # the highest of 32 bits may be the sign: no matter
    octets = 8 * torch.arange(bits, dtype=torch.int32, device=codes.device)
    return ((streams[:, :, None] >> octets) & 0xFF).to(torch.uint8).view(rows, -1)


def unpack(packed: Tensor, bits: int, ins: int) -> Tensor:
    """What `pack` was given."""
    if bits == 8:
        return packed[:, :ins]
    rows = len(packed)
    if bits == 3:
        octets = packed.view(rows, -1, 3).to(torch.int32)
        streams = octets[:, :, 0] | octets[:, :, 1] << 8 | octets[:, :, 2] << 16
    else:
        streams = packed
    shifts = torch.arange(0, 24 if bits == 3 else 8, bits, dtype=streams.dtype, device=packed.device)
    codes = (streams[:, :, None] >> shifts) & ((1 << bits) - 1)
    return codes.to(torch.uint8).view(rows, -1)[:, :ins]


class QuantisedWeight(nn.Module):
    """[outs, ins]. Its products are of the dense weight of `dtype` that `dense` has.

    Attributes:
        kind: what it is made of.
        dtype: that it is computed with.
        codes: [outs, bytes] uint8, as of `pack`.
        scales: [outs, groups].
        zeros: the same, where there are any.
        order: [ins] int32, where there is one: x[:, order] is what columns of codes are multiplied with.
    """

    def __init__(
        self, outs: int, ins: int, kind: Codes, dtype: torch.dtype, device: torch.device | None = None
    ) -> None:
        super().__init__()
        self.shape = torch.Size((outs, ins))
        self.kind, self.dtype = kind, dtype
        scales = outs, kind.groups(ins)
        self.codes = _place((outs, kind.row_bytes(ins)), torch.uint8, device)
        self.scales = _place(scales, kind.scales, device)
        self.zeros = _place(scales, kind.scales, device) if kind.zeros else None
        self.order = _place((ins,), torch.int32, device) if kind.ordered else None

    @property
    def device(self) -> torch.device:
        return self.codes.device

    def prepare(self) -> None:
        """Before the first `put`: no order is known."""
        if self.order is not None:
            self.order.fill_(-1)

    def put(self, first: int, pieces: Pieces) -> None:
        """Set outputs [first, first + len(pieces.codes)).

        Raises:
            ValueError: they have their inputs in another order than those before.
        """
        rows = slice(first, first + len(pieces.codes))
        assert pieces.codes.shape[1] == self.shape[1]
        assert pieces.codes.dtype == torch.uint8
        assert 0 <= first <= rows.stop <= self.shape[0]
        assert (pieces.zeros is not None) == self.kind.zeros
        self.codes[rows] = pack(pieces.codes, self.kind.bits).to(self.device)
        self.scales[rows] = pieces.scales.to(self.device)
        if self.zeros is not None and pieces.zeros is not None:
            self.zeros[rows] = pieces.zeros.to(self.device)
        if self.order is not None:
            put_order(self.order, pieces.order)

    def part(self, first: int, outs: int) -> QuantisedWeight:
        """Outputs [first, first + outs), in the same memory."""
        part = QuantisedWeight(outs, self.shape[1], self.kind, self.dtype, torch.device("meta"))
        rows = slice(first, first + outs)
        part.codes = nn.Parameter(self.codes.detach()[rows], requires_grad=False)
        part.scales = nn.Parameter(self.scales.detach()[rows], requires_grad=False)
        part.zeros = None if self.zeros is None else nn.Parameter(self.zeros.detach()[rows], requires_grad=False)
        part.order = self.order
        return part

    def dense(self) -> Tensor:
        """A copy as [outs, ins], of `dtype`, each number rounded once."""
        weight = self.columns()
        if self.order is None:
            return weight
        dense = torch.empty_like(weight)
        dense[:, self.order.long()] = weight
        return dense

    def columns(self, index: Tensor | slice | None = None) -> Tensor:
        """The same with inputs in the order of codes; of all outputs or of some, [rows] int64."""
        codes, scales, zeros = (
            part if part is None or index is None else part[index] for part in (self.codes, self.scales, self.zeros)
        )
        assert codes is not None
        assert scales is not None
        return dequantised(unpack(codes, self.kind.bits, self.shape[1]), scales, zeros, self.kind, self.dtype)


def dequantised(codes: Tensor, scales: Tensor, zeros: Tensor | None, kind: Codes, dtype: torch.dtype) -> Tensor:
    """[rows, ins] uint8 -> [rows, ins] of `dtype`, computed in float32. `scales`, `zeros`: [rows, groups]."""
    ins = codes.shape[1]
    values = codes.view(torch.float8_e4m3fn).float() if kind.kind == "e4m3" else codes.float()
    zero = kind.middle if zeros is None else _spread(zeros.float(), kind.group, ins)
    return ((values - zero) * _spread(scales.float(), kind.group, ins)).to(dtype)


def put_order(place: Tensor, order: Tensor | None) -> None:
    """Set an order of inputs that all projections of a weight have. Raises ValueError where they differ."""
    ins = len(place)
    own = (torch.arange(ins) if order is None else order).to(place.device, place.dtype)
    if place[0] >= 0 and not torch.equal(place, own):
        raise ValueError("its projections have their inputs in different orders (g_idx)")
    place.copy_(own)


def layout() -> str:
    """Names what stands where in a `QuantisedWeight`."""
    return f"{LAYOUT} {sys.byteorder}"


def _spread(x: Tensor, group: int, ins: int) -> Tensor:
    """[rows, groups] -> what broadcasts to [rows, ins]."""
    return x if group == 0 else x.repeat_interleave(group, 1)[:, :ins]


def _place(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | None) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)
