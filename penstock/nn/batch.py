"""The rows of one step, as tensors: the input of every model and op besides activations.

They are the same for every backend; what an attention backend needs beyond them it prepares itself (`Batch.prepared`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from penstock.core.plan import BLOCK_TOKENS, Branches, SequenceStep
from penstock.nn.kv import LayerKV

Metadata = TypeVar("Metadata")

MOST_PADDED = 256  # rows of a step that is padded


def padded_rows(rows: int) -> int:
    """Rows that a step of decodes has on a CUDA device, where it is captured for a few numbers of rows."""
    return 1 << (rows - 1).bit_length() if rows <= MOST_PADDED else rows


def to_device(values: Sequence[float], device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """[values], on a CUDA device without waiting for what it computes."""
    if device.type != "cuda":
        return torch.tensor(values, dtype=dtype, device=device)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)


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
        group: of layers, whose table this is.
        packed: on a CUDA device, with one row of each sequence and no branches: all that is said of the rows, as
            `Packed` has it; else None.
        tables: the same batch for the layers of each group: what ops are given. The first is this one.
        scratch: for ops; by default the batch's own.
        halves: the same rows as two micro-batches, where they are computed by turns.
        together: attends as `ops.attention` does, with other ranks that help; returns None in layers where none does.
        media: rows and steps of sequences that have some.
        seen: rows, [seen] int64, and what stands there in place of tokens' embeddings, [seen, hidden]; None is nothing.
    """

    tokens: Tensor
    positions: Tensor
    slot_blocks: Tensor
    slot_offsets: Tensor
    group: int

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
        self.halves: tuple[Batch, Batch] | None = None
        self.together: Callable[[Tensor, LayerKV, Batch, float], Tensor | None] | None = None
        self.reach = 0
        self.scratch = scratch or Scratch()
        self.media: list[tuple[range, SequenceStep]] = []
        self.seen: tuple[Tensor, Tensor] | None = None
        for s in sequences:
            row, count = len(tokens), len(s.tokens)
            self.rows.append(range(row, row + count))
            tokens += s.tokens
            own = range(s.start, s.start + count) if s.branches is None else [s.start] * count
            positions += own
            self.reach = max(self.reach, own[-1] + 1)
            if s.media:
                self.media.append((self.rows[-1], s))
        ids = placed or [s.blocks for s in sequences]
        self.packed: Packed | None = None
        self.tables = [self, *(copy(self) for _ in range(1, groups))]
        slots = [table._place(sequences, ids, device, group, groups) for group, table in enumerate(self.tables)]
        if device.type != "cuda":
            self._hold(to_device(tokens, device), to_device(positions, device), [to_device(x, device) for x in slots])
        elif 0 < len(sequences) == len(tokens) <= MOST_PADDED and not self.branches:
            self.packed = Packed.of(tokens, positions, slots, [table.spans for table in self.tables], device)
            count = len(tokens)
            self._hold(
                self.packed.tokens[:count], self.packed.positions[:count], [x[:count] for x in self.packed.slot_blocks]
            )
        else:
            whole = to_device([*tokens, *positions, *(block for own in slots for block in own)], device)
            own_tokens, own_positions, *own_slots = whole.split(len(tokens))
            self._hold(own_tokens, own_positions, own_slots)

    @classmethod
    def over(cls, packed: Packed, reach: int) -> Batch:
        """All of its rows, those that pad it too, for ops that need no spans."""
        batch = cls.__new__(cls)
        batch.rows, batch.kept, batch.reach, batch.scratch = [], None, reach, Scratch()
        batch.halves = batch.together = None
        batch.packed, batch.media, batch.seen = packed, [], None
        batch.tables = [batch, *(copy(batch) for _ in packed.slot_blocks[1:])]
        for group, table in enumerate(batch.tables):
            table._place([], [], packed.values.device, group, len(batch.tables))
        batch._hold(packed.tokens, packed.positions, packed.slot_blocks)
        return batch

    def _hold(self, tokens: Tensor, positions: Tensor, slots: Sequence[Tensor]) -> None:
        """Where rows belong: [rows] int64 each, `slots` for each group."""
        offsets = positions % BLOCK_TOKENS
        for group, (table, blocks) in enumerate(zip(self.tables, slots, strict=True)):
            table.group, table.packed = group, self.packed
            table.tokens, table.positions, table.slot_blocks = tokens, positions, blocks
            table.slot_offsets = offsets.clone() if table.branches and group else offsets
            for span in table.branches:
                places, last = slice(span.row, span.row + span.rows), span.slots[:, -1]
                table.slot_blocks[places], table.slot_offsets[places] = last // BLOCK_TOKENS, last % BLOCK_TOKENS

    def _place(
        self,
        sequences: Sequence[SequenceStep],
        ids: Sequence[Sequence[int]],
        device: torch.device,
        group: int,
        groups: int,
    ) -> list[int]:
        """Say where the rows' sequences have the blocks of a group. Returns the block that each row belongs to."""
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
                slot_blocks += [0] * len(rows)  # see `_hold`
        return slot_blocks

    @classmethod
    def in_halves(
        cls,
        sequences: Sequence[SequenceStep],
        rows: int,
        device: torch.device,
        placed: Sequence[Sequence[int]] | None = None,
        scratch: Scratch | None = None,
        groups: int = 1,
    ) -> Batch:
        """The same batch, also as two micro-batches, the first of so many rows. Sequences have no branches."""
        batch = cls(sequences, device, placed, scratch, groups)
        steps: tuple[list[SequenceStep], list[SequenceStep]] = [], []
        where: tuple[list[Sequence[int]], list[Sequence[int]]] = [], []
        for i, (step, own) in enumerate(zip(sequences, batch.rows, strict=True)):
            count = min(max(rows - own.start, 0), len(own))
            for half, start, end in ((0, 0, count), (1, count, len(own))):
                if start < end:
                    steps[half].append(replace(step, start=step.start + start, tokens=step.tokens[start:end]))
                    where[half].append(step.blocks if placed is None else placed[i])
        first, second = [cls(steps[i], device, where[i], batch.scratch, groups) for i in range(2)]
        batch.halves = first, second
        return batch

    def keep(self, wanted: Sequence[range]) -> list[range]:
        """Of the other rows only K and V are needed: once the last layer has stored these, they are left out.

        Args:
            wanted: per sequence, some of its rows.

        Returns:
            Where these are among the rows of the result.
        """
        kept = [row for rows in wanted for row in rows]
        if len(kept) < len(self.tokens):
            self.kept = to_device(kept, self.tokens.device)
            if self.halves is not None:
                first, second = self.halves
                at = len(first.tokens)
                first.kept, second.kept = self.kept[self.kept < at], self.kept[self.kept >= at] - at
        ends = accumulate(map(len, wanted))
        return [range(end - len(rows), end) for rows, end in zip(wanted, ends, strict=True)]

    @property
    def stretch(self) -> range | None:
        """Positions of all rows, where they are those of one sequence."""
        if len(self.rows) != 1 or not self.spans:
            return None
        (span,) = self.spans
        return range(span.start, span.length)

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


@dataclass(frozen=True, slots=True)
class Packed:
    """What is said of a step of single rows in one tensor, which one copy brings to a device, or to where a graph reads
    it. Rows behind the step's own, up to `padded_rows`, are of no sequence, and belong to the block -1.

    Attributes:
        values: [values] int64, of which the others are views.
        tokens, positions: [padded rows].
        slot_blocks: for each group of layers [padded rows].
        places: for each group [padded rows, 4]: as `Batch.places` has them, of no consecutive blocks.
        ids: [ids], of all groups.
        rows: the step's own.
        longest: positions of the longest context.
    """

    values: Tensor
    tokens: Tensor
    positions: Tensor
    slot_blocks: list[Tensor]
    places: list[Tensor]
    ids: Tensor
    rows: int
    longest: int

    @classmethod
    def of(
        cls,
        tokens: Sequence[int],
        positions: Sequence[int],
        slots: Sequence[Sequence[int]],
        spans: Sequence[Sequence[Span]],
        device: torch.device,
    ) -> Packed:
        """`slots` and `spans` are of each group."""
        rows = len(tokens)
        more = padded_rows(rows) - rows
        values = [*tokens, *[0] * more, *positions, *[0] * more]
        for own in slots:
            values += [*own, *[-1] * more]
        ids: list[int] = []
        for group in spans:
            for span in group:
                values += (span.row, 1, span.start, -1 - len(ids))
                ids += span.ids
            values += [0] * (4 * more)
        whole = to_device(values + ids, device)
        return cls.over(whole, rows + more, len(slots), rows, max(positions) + 1)

    @classmethod
    def over(cls, values: Tensor, padded: int, groups: int, rows: int, longest: int) -> Packed:
        sizes = [padded, padded, *[padded] * groups, *[4 * padded] * groups]
        tokens, positions, *rest, ids = values.split([*sizes, len(values) - sum(sizes)])
        places = [x.view(padded, 4) for x in rest[groups:]]
        return cls(values, tokens, positions, rest[:groups], places, ids, rows, longest)


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
