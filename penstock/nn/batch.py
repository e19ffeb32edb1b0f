"""The rows of one step, as tensors: the input of every model and op besides activations.

They are the same for every backend; what an attention backend needs beyond them it prepares itself (`Batch.prepared`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from penstock.core.plan import BLOCK_TOKENS, Branches, SequenceStep

Metadata = TypeVar("Metadata")


class Scratch:
    """Memory for what an op computes on the way, kept from call to call.

    On a CPU, large temporaries that come and go cost more in page faults than in arithmetic. What `take` returned is
    overwritten by the next `take` of the same name.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[str, torch.dtype], Tensor] = {}

    def take(self, name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Not cleared."""
        if device.type != "cpu":
            return torch.empty(shape, dtype=dtype, device=device)
        size = torch.Size(shape).numel()
        kept = self._kept.get((name, dtype))
        if kept is None or len(kept) < size:
            kept = self._kept[name, dtype] = torch.empty(size, dtype=dtype)
        return kept[:size].view(shape)


@dataclass
class Span:
    """The rows of one sequence.

    Attributes:
        row, rows: they are rows [row, row + rows) of the batch.
        start: position of the first of them; the context is positions [0, start + rows).
        ids: of the blocks that hold the context, in order; a `range` when they are consecutive in the cache.
    """

    row: int
    rows: int
    start: int
    ids: Sequence[int]
    device: torch.device

    @property
    def length(self) -> int:
        """Of the context."""
        return self.start + self.rows

    @cached_property
    def blocks(self) -> Tensor:
        """[blocks] int64."""
        return torch.tensor(self.ids, dtype=torch.int64, device=self.device)


@dataclass
class BranchSpan:
    """The rows of one beam search after its prompt, all at one position.

    Attributes:
        prompt: the prompt as the rows see it: `length` positions in its blocks, of none of which a row is here.
        row, rows: they are rows [row, row + rows) of the batch.
        slots: [rows, positions] int64: where K and V of each row's positions after the prompt lie, its own the last, as
            block * BLOCK_TOKENS + offset.
    """

    prompt: Span
    row: int
    rows: int
    slots: Tensor

    @property
    def length(self) -> int:
        """Of each row's context."""
        return self.prompt.length + self.slots.shape[1]


class Batch:
    """Rows of all sequences of a step, one sequence after the other.

    Args:
        placed: per sequence, where its blocks are in the cache that the ops are given, a `range` where they are
            consecutive; None when that is what the sequences' own ids say.
        groups: of layers, each of which has blocks of its own.

    Attributes:
        tokens, positions: [rows] int64.
        reach: behind the last position.
        slot_blocks, slot_offsets: [rows] int64: the block, and the place in it, where a row's K and V belong, in layers
            of the first group.
        rows: per sequence, its rows of the batch.
        kept: [kept] int64, rising: the rows whose result is wanted; None when those are all.
        spans: of the sequences whose context is one stretch of positions, in the order of the batch; with the blocks of
            the first group.
        branches: of the others.
        tables: the same batch for the layers of each group: what ops are given. The first is this one.
        scratch: for ops; by default the batch's own.
    """

    def __init__(
        self,
        sequences: Sequence[SequenceStep],
        device: torch.device,
        placed: Sequence[Sequence[int]] | None = None,
        scratch: Scratch | None = None,
        groups: int = 1,
    ) -> None:
        tokens: list[int] = []
        positions: list[int] = []
        self.rows: list[range] = []
        self.kept: Tensor | None = None
        self.reach = 0
        self.scratch = scratch or Scratch()
        for s in sequences:
            row, count = len(tokens), len(s.tokens)
            self.rows.append(range(row, row + count))
            tokens += s.tokens
            own = range(s.start, s.start + count) if s.branches is None else [s.start] * count
            positions += own
            self.reach = max(self.reach, own[-1] + 1)
        self.tokens = torch.tensor(tokens, dtype=torch.int64, device=device)
        self.positions = torch.tensor(positions, dtype=torch.int64, device=device)
        ids = placed or [s.blocks for s in sequences]
        self.tables = [self, *(copy(self) for _ in range(1, groups))]
        for group, table in enumerate(self.tables):
            table._place(sequences, ids, device, group, groups)

    def _place(
        self,
        sequences: Sequence[SequenceStep],
        ids: Sequence[Sequence[int]],
        device: torch.device,
        group: int,
        groups: int,
    ) -> None:
        """Say where the rows' sequences have the blocks of a group."""
        self._prepared: dict[Callable[[Batch], Any], Any] = {}
        self.spans: list[Span] = []
        self.branches: list[BranchSpan] = []
        slot_blocks: list[int] = []
        for s, rows, all_of_them in zip(sequences, self.rows, ids, strict=True):
            own = tuple(all_of_them[group::groups]) if groups > 1 else all_of_them  # and in no range of their own
            if s.branches is None:
                self.spans.append(Span(rows.start, len(rows), s.start, own, device))
                slot_blocks += [own[p // BLOCK_TOKENS] for p in range(s.start, s.start + len(rows))]
            else:
                blocks = s.branches.blocks[group::groups]
                self.branches.append(_branch_span(s, s.branches, blocks, rows.start, own, device))
                slot_blocks += [0] * len(rows)  # see below
        self.slot_blocks = torch.tensor(slot_blocks, dtype=torch.int64, device=device)
        self.slot_offsets = self.positions % BLOCK_TOKENS
        for span in self.branches:
            places, last = slice(span.row, span.row + span.rows), span.slots[:, -1]
            self.slot_blocks[places], self.slot_offsets[places] = last // BLOCK_TOKENS, last % BLOCK_TOKENS

    def keep(self, wanted: Sequence[range]) -> list[range]:
        """Of the other rows only K and V are needed: once the last layer has stored these, they are left out.

        Args:
            wanted: per sequence, some of its rows.

        Returns:
            Where these are among the rows of the result.
        """
        kept = [row for rows in wanted for row in rows]
        if len(kept) < len(self.tokens):
            self.kept = torch.tensor(kept, dtype=torch.int64, device=self.tokens.device)
        ends = accumulate(map(len, wanted))
        return [range(end - len(rows), end) for rows, end in zip(wanted, ends, strict=True)]

    def prepared(self, prepare: Callable[[Batch], Metadata]) -> Metadata:
        """What an attention backend makes of the rows, once for all layers of the step."""
        found = self._prepared.get(prepare)
        if found is None:
            found = self._prepared[prepare] = prepare(self)
        return cast(Metadata, found)

    @cached_property
    def places(self) -> tuple[Tensor, Tensor]:
        """([sequences, 4], [ids]) int64: first row, rows, start, and where a sequence's blocks are.

        The latter is its first block where they are consecutive, and otherwise -1 - (its first place among the ids).
        """
        ids: list[int] = []
        spans: list[tuple[int, int, int, int]] = []
        for span in self.spans:
            consecutive = isinstance(span.ids, range)
            spans.append((span.row, span.rows, span.start, span.ids[0] if consecutive else -1 - len(ids)))
            if not consecutive:
                ids += span.ids
        device = self.tokens.device
        return torch.tensor(spans, device=device), torch.tensor(ids, dtype=torch.int64, device=device)


def _branch_span(
    step: SequenceStep,
    branches: Branches,
    region: Sequence[int],
    row: int,
    ids: Sequence[int],
    device: torch.device,
) -> BranchSpan:
    rows, before = len(step.tokens), len(branches.rows[0])
    # the row of each position, [rows, positions]; their own are 0, 1, ...
    chosen = torch.tensor([[*past, i] for i, past in enumerate(branches.rows)], dtype=torch.int64)
    places = torch.arange(before + 1) * branches.width + chosen
    blocks = torch.tensor(region, dtype=torch.int64)
    slots = blocks[places // BLOCK_TOKENS] * BLOCK_TOKENS + places % BLOCK_TOKENS
    return BranchSpan(Span(row, 0, step.start - before, ids, device), row, rows, slots.to(device))
