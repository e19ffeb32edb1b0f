"""Weights that a checkpoint has dense, quantised while they are loaded. An output's codes depend on it alone."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.nn.formats.base import Expected, Format, check_cut
from penstock.nn.quantised import Codes, Pieces

AT_ONCE = 1 << 20  # numbers that are worked at: they stay in caches
LARGEST_E4M3 = 448.0
STRETCHES = (1.0, 0.95, 0.9, 0.85, 0.8)  # of a group's range: what lies outside is clipped
LP_NORM, BETA, KAPPA, ITERATIONS = 0.7, 10.0, 1.01, 20  # of HQQ, as published
NARROW = 1e-4  # range of a group that HQQ leaves as it is


@dataclass(frozen=True)
class AtLoad(Format[Pieces]):
    codes: Codes

    def tensors(self, outs: int, ins: int) -> dict[str, Expected]:
        return {"weight": Expected((outs, ins))}

    def rows(
        self, main: Tensor, others: Mapping[str, Tensor], first: int, outs: range, ins: range, width: int
    ) -> Pieces:
        rows = main[outs.start - first : outs.stop - first]
        if group := self.codes.group:
            check_cut(group, ins, width)
            rows = rows[:, ins.start : ins.stop]
        done = [self._pieces(part.float()) for part in rows.split(max(1, AT_ONCE // rows.shape[1]))]
        codes = torch.cat([pieces.codes for pieces in done])
        zeros = torch.cat([pieces.zeros for pieces in done if pieces.zeros is not None]) if self.codes.zeros else None
        if not group:
            codes = codes[:, ins.start : ins.stop]
        return Pieces(codes, torch.cat([pieces.scales for pieces in done]), zeros)

    def _pieces(self, rows: Tensor) -> Pieces:
        """Of rows in float32. Raises ValueError."""
        if not bool(rows.isfinite().all()):
            raise ValueError("numbers that are not finite cannot be quantised")
        outs, ins = rows.shape
        size = self.codes.group or ins
        groups = torch.nn.functional.pad(rows, (0, -ins % size)).view(outs, -1, size)
        codes, scales, zeros = self.quantised(groups)
        zeros = None if zeros is None else zeros.view(outs, -1)
        return Pieces(codes.view(outs, -1)[:, :ins], scales.view(outs, -1), zeros)

    @abstractmethod
    def quantised(self, groups: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """[outs, groups, group] -> codes uint8, and scales and perhaps zeros [outs, groups, 1]."""


@dataclass(frozen=True)
class Nearest(AtLoad):
    """The nearest code, of integers without zeros: up to a group's largest number; in 4 bits and less up to as much of
    it as leaves the least squares of errors."""

    def quantised(self, groups: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        middle = self.codes.middle
        low, high = groups.aminmax(dim=2, keepdim=True)
        if self.codes.bits == 8:
            return *_nearest(groups, torch.maximum(-low, high) / (middle - 1), self.codes), None
        # codes reach one further below the middle: that is for the side of the largest number
        far = torch.where(high > -low, high, low) / -middle
        best, least = far, torch.full_like(far, torch.inf)
        for stretch in STRETCHES:
            codes, scales = _nearest(groups, far * stretch, self.codes)
            error = ((codes.float() - middle) * scales - groups).square_().sum(2, keepdim=True)
            best = torch.where(error < least, scales, best)
            least = torch.minimum(error, least)
        return *_nearest(groups, best, self.codes), None


@dataclass(frozen=True)
class Float8(AtLoad):
    """The nearest e4m3 number, of rows scaled to their range."""

    def quantised(self, groups: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        scales = (groups.abs().amax(2, keepdim=True) / LARGEST_E4M3).to(self.codes.scales).float()
        values = groups / scales.masked_fill(scales == 0, 1.0)
        return values.clamp(-LARGEST_E4M3, LARGEST_E4M3).to(torch.float8_e4m3fn).view(torch.uint8), scales, None


@dataclass(frozen=True)
class HalfQuadratic(AtLoad):
    """HQQ (Badri and Shaji, "Half-Quadratic Quantization of Large Machine Learning Models", 2023): zeros that leave the
    least |error|**p. Each group by itself goes on for as long as its error shrinks."""

    def quantised(self, groups: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        dtype, most = self.codes.scales, (1 << self.codes.bits) - 1
        low, high = groups.aminmax(dim=2, keepdim=True)
        scales = ((high - low) / most).to(dtype).float()
        scales = torch.where(high - low <= NARROW, NARROW, scales).to(dtype).float()
        zero, best, least = -low / scales, -low / scales, torch.full_like(scales, torch.inf)
        beta, scaled = BETA, groups / scales
        active = torch.ones_like(scales, dtype=torch.bool)
        for _ in range(ITERATIONS):
            codes = (scaled + zero).round_().clamp_(0, most)
            left = groups - (codes - zero) * scales
            error = left.abs().mean(2, keepdim=True)
            active = active & (error < least)
            if not bool(active.any()):
                break
            best, least = torch.where(active, zero, best), torch.where(active, error, least)
            size = left.abs()
            shrunk = left.sign() * (size - size.clamp_min(1e-12).pow(LP_NORM - 1) / beta).clamp_min(0)
            zero = (codes - (groups - shrunk) / scales).mean(2, keepdim=True)
            beta *= KAPPA
        best = best.to(dtype).float()
        return (scaled + best).round_().clamp_(0, most).to(torch.uint8), scales, best


def _nearest(groups: Tensor, scales: Tensor, codes: Codes) -> tuple[Tensor, Tensor]:
    """Codes, and scales as they are kept."""
    scales = scales.to(codes.scales).float()
    values = (groups / scales.masked_fill(scales == 0, 1.0)).round_() + codes.middle
    least = 1 if codes.bits == 8 else 0  # so that 8 bits are the same on either side
    return values.clamp_(least, (1 << codes.bits) - 1).to(torch.uint8), scales


HALF = torch.float16
INT8 = Nearest(Codes(8))
AT_LOAD: Mapping[str, AtLoad] = {
    "int8": INT8,
    "int4": Nearest(Codes(4, group=32, scales=HALF)),
    "fp8": Float8(Codes(8, "e4m3")),
    **{f"hqq{bits}": HalfQuadratic(Codes(bits, group=64, zeros=True, scales=HALF)) for bits in (4, 3, 2)},
}
HEAD = {"fp8": AT_LOAD["fp8"]}  # of the head, where it is not INT8: few bits cost most there
