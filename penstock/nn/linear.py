"""Linears: projections whose weight is held by a method, whole or as one of several shards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from penstock.core.parallel import Layout
from penstock.nn import ops
from penstock.nn.formats.base import Expected, Format
from penstock.nn.formats.dense import DENSE
from penstock.nn.methods import PLAIN
from penstock.nn.methods.base import LinearMethod, Weight
from penstock.nn.packed import LANES
from penstock.nn.ranks import Ranks
from penstock.nn.streams import Stream, Turns


@dataclass(frozen=True, slots=True)
class Shard:
    """One of `size` equal parts of what is split, counted from 0, of the layers of one stage.

    Attributes:
        ranks: that have one each, and sum up what they have computed; None where that is the caller's business.
        experts: of mixtures of experts, where whole ones are spread over ranks (expert parallelism): which part of
            these is here, and the ranks that exchange what theirs have made. None splits each expert as all else.
        stream: of these exchanges. Where it is `beside` what is computed, no others have the same `ranks`.
        apart: of `experts`: whether these ranks are several groups', each of which has rows of its own.
        turns: of such ranks, where steps may be two micro-batches.
        stage: of so many `stages` of a pipeline, counted from 0.
    """

    rank: int = 0
    size: int = 1
    ranks: Ranks | None = field(default=None, compare=False, repr=False)
    experts: Shard | None = None
    stream: Stream = field(default_factory=Stream, compare=False, repr=False)
    stage: int = 0
    stages: int = 1
    apart: bool = False
    turns: Turns | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.size
        assert 0 <= self.stage < self.stages

    @property
    def name(self) -> str:
        """What weights of it are called."""
        experts = "" if self.experts is None else f" experts {self.experts.name}"
        return f"{self.rank} {self.size} {self.stage} {self.stages}{experts}"

    @property
    def is_first(self) -> bool:
        """Whether it has the embedding."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether it has the last norm and the head."""
        return self.stage == self.stages - 1

    def layers(self, count: int) -> range:
        """Of so many, its own."""
        return Layout(pipeline=self.stages).layers(self.stage, count)

    def share(self, count: int) -> range:
        """Its part of what cannot be cut, as even as it can be."""
        return range(self.rank * count // self.size, (self.rank + 1) * count // self.size)

    def of(self, width: int) -> range:
        """Its part of so many outputs, inputs or heads."""
        assert width % self.size == 0, f"{width} cannot be split by {self.size}"
        part = width // self.size
        return range(self.rank * part, (self.rank + 1) * part)

    def of_tokens(self, vocab: int) -> range:
        """Its part of a vocabulary, of which the last may be smaller than the others."""
        part = self.part_of(vocab)
        return range(min(vocab, self.rank * part), min(vocab, (self.rank + 1) * part))

    def part_of(self, vocab: int) -> int:
        """Tokens of every part but the last, in whole groups of a packed weight."""
        if self.size == 1:
            return vocab
        return -(-vocab // self.size // LANES) * LANES

    def sum(self, x: Tensor) -> Tensor:
        """Of what each rank has; x may be overwritten."""
        return x if self.ranks is None else ops.all_reduce(x, self.ranks)


WHOLE = Shard()


class Linear(nn.Module):
    """One or more projections of the same input, computed as one product.

    Attributes:
        ins, outs: widths of the input and of the projections, as a checkpoint has them.
        own_ins, own_outs: which of these are held here: all, unless a subclass splits them.
        has_bias: whether the checkpoint has one.
        format: how a checkpoint has the weight.
        method: how it is held.
        by_rows: whether it takes some of a checkpoint's rows before all are read, where the format can.
        weight: [own outs, own ins], that of one projection after the other.
        exact: whether it is left as it is where a plain checkpoint is quantised.
    """

    by_rows = True
    exact = False

    def __init__(
        self,
        ins: int,
        outs: Sequence[int],
        bias: bool = False,
        *,
        own_ins: range | None = None,
        own_outs: Sequence[range] | None = None,
    ) -> None:
        super().__init__()
        self.ins, self.outs, self.has_bias = ins, tuple(outs), bias
        self.own_ins = own_ins or range(ins)
        self.own_outs = tuple(own_outs or map(range, outs))
        self.format: Format[Any] = DENSE
        self.method: LinearMethod[Any, Any] = PLAIN
        width, defaults = sum(map(len, self.own_outs)), (torch.get_default_dtype(), torch.get_default_device())
        self.weight: Weight = PLAIN.create(width, len(self.own_ins), *defaults)
        self.bias = nn.Parameter(torch.empty(width), requires_grad=False) if bias else None
        self._waiting: dict[int | None, dict[str, Tensor]] = {}  # of each projection, for the main tensor

    def hold(self, method: LinearMethod[Any, Any], form: Format[Any] = DENSE) -> None:
        """Have the weight come in a format, and be held by a method for it. What was held is gone."""
        outs, ins = self.weight.shape
        weight = method.create(outs, ins, self.weight.dtype, self.weight.device)
        del self.weight  # torch puts no module where a parameter is
        self.method, self.format, self.weight = method, form, weight

    def prepare(self) -> None:
        """It has got its memory, and is about to be loaded."""
        self.method.prepare(self.weight)

    @property
    def weight_bytes(self) -> int:
        """That it takes in memory."""
        held = self.weight.parameters() if isinstance(self.weight, nn.Module) else (self.weight,)
        return sum(part.nbytes for part in held)

    def tensors(self, part: int | None = None) -> dict[str, Expected]:
        """What a checkpoint has of one projection, or of all of them as one. Raises ValueError as the format does."""
        width = sum(self.outs) if part is None else self.outs[part]
        return self.format.tensors(width, self.ins) | ({"bias": Expected((width,))} if self.has_bias else {})

    def load(self, name: str, tensor: Tensor, part: int | None = None, first: int = 0) -> None:
        """Take what is held here of one of `tensors`, or of its rows from `first` on. The format's main one comes last.

        Raises:
            ValueError: of a quantised weight, what cannot be.
        """
        width = sum(self.outs) if part is None else self.outs[part]
        if name == "bias":
            for place, outs in self._held(part, first, len(tensor)):
                if self.bias is not None:
                    self.bias[place : place + len(outs)] = tensor[outs.start - first : outs.stop - first]
            return
        if name != self.format.main or not (self.by_rows and self.format.by_rows):
            waiting = self._waiting.setdefault(part, {})
            tensor, whole = _gathered(waiting, name, tensor, first, self.tensors(part)[name].shape or ())
            if name != self.format.main or not whole:
                return
            first, rows = 0, width
        else:
            rows = len(tensor)
        others = self._waiting.get(part, {})
        for place, outs in self._held(part, first, rows):
            wanted = self.format.rows(tensor, others, first, outs, self.own_ins, self.ins)
            self.method.put(self.weight, place, wanted)
        if first + rows == width:
            self._waiting.pop(part, None)

    def _held(self, part: int | None, first: int, rows: int) -> Iterator[tuple[int, range]]:
        """Of outputs [first, first + rows) of one projection, or of all as one, those that are held here: their place
        here, and which they are."""
        start = 0
        for i in range(len(self.outs)) if part is None else (part,):
            own, place = self.own_outs[i], self._place(i)
            outs = range(max(first, start + own.start), min(first + rows, start + own.stop))
            if outs:
                yield place + outs.start - (start + own.start), outs
            start += self.outs[i]

    def _place(self, part: int) -> int:
        """Where a projection's first output is in the weight."""
        return sum(map(len, self.own_outs[:part]))

    def dense(self) -> Tensor:
        """The weight as [own outs, own ins], perhaps a copy."""
        return self.method.dense(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.method.apply(x, self.weight, self.bias, x.dtype)


def _gathered(
    waiting: dict[str, Tensor], name: str, tensor: Tensor, first: int, shape: tuple[int, ...]
) -> tuple[Tensor, bool]:
    """A copy of the tensor of which these are rows, as far as it was read, and whether that is all."""
    if not shape or len(tensor) == shape[0]:
        waiting[name] = tensor.clone()
        return waiting[name], True
    if first == 0:
        waiting[name] = torch.empty(shape, dtype=tensor.dtype)
    waiting[name][first : first + len(tensor)] = tensor
    return waiting[name], first + len(tensor) == shape[0]


class ColumnLinear(Linear):
    """Its outputs are split: every shard computes some of every projection's.

    Args:
        shards: one for all projections, or one for each.
    """

    def __init__(
        self, ins: int, outs: Sequence[int], bias: bool = False, shards: Shard | Sequence[Shard] = WHOLE
    ) -> None:
        each = [shards] * len(outs) if isinstance(shards, Shard) else shards
        super().__init__(ins, outs, bias, own_outs=[shard.of(width) for shard, width in zip(each, outs, strict=True)])


class RowLinear(Linear):
    """Its inputs are split: every shard computes a summand of each output, the first one with the bias."""

    def __init__(self, ins: int, outs: Sequence[int], bias: bool = False, shard: Shard = WHOLE) -> None:
        super().__init__(ins, outs, bias, own_ins=shard.of(ins))
        self.shard = shard
        if shard.rank > 0:
            self.bias = None

    def forward(self, x: Tensor) -> Tensor:
        return self.shard.sum(super().forward(x))


class Embedding(Linear):
    """Rows to be looked up; where it is the head too, also to be multiplied with.

    Args:
        scale: that rows are multiplied with, rounded to their dtype first.
        shard: of the tokens.
    """

    def __init__(self, vocab_size: int, width: int, scale: float = 1.0, shard: Shard = WHOLE) -> None:
        super().__init__(width, (vocab_size,), own_outs=(shard.of_tokens(vocab_size),))
        self.scale, self.shard = scale, shard

    def forward(self, tokens: Tensor) -> Tensor:
        rows = self._own(tokens) if self.shard.size > 1 else self.method.rows(self.weight, tokens)
        return rows if self.scale == 1.0 else rows * torch.tensor(self.scale, dtype=rows.dtype, device="cpu").item()

    def _own(self, tokens: Tensor) -> Tensor:
        """The sum of rows that each shard has, and zeros for the others."""
        (own,) = self.own_outs
        there = (tokens >= own.start) & (tokens < own.stop)
        rows = self.method.rows(self.weight, torch.where(there, tokens - own.start, 0))
        return self.shard.sum(rows.masked_fill_(~there[:, None], 0))
