"""The rows of one step, as tensors: what every model and op is told about a step besides its activations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from penstock.core.plan import BLOCK_TOKENS, SequenceStep


@dataclass(slots=True)
class Span:
    """The rows of one sequence.

    Attributes:
        row, rows: they are rows [row, row + rows) of the batch.
        start: position of the first of them; the context is positions [0, start + rows).
        blocks: [blocks] ids of the blocks that hold the context, in order, int64.
    """

    row: int
    rows: int
    start: int
    blocks: Tensor


@dataclass(slots=True)
class DecodeGroup:
    """Sequences with one row each whose contexts are padded to the same length.

    The padded length, a power of two of blocks, is a function of a sequence's own length, so that which others are in
    its group changes nothing for it.

    Attributes:
        rows: [group] rows of the batch, int64.
        blocks: [group, blocks] block ids, padded by the sequence's own first block, int64.
        lengths: [group] context lengths with the row itself, int64.
    """

    rows: Tensor
    blocks: Tensor
    lengths: Tensor
    _masks: dict[int | None, Tensor] = field(default_factory=dict)

    def mask(self, window: int | None) -> Tensor:
        """[group, 1, 1, tokens] bool: what a row may see, at most `window` positions back with itself."""
        mask = self._masks.get(window)
        if mask is None:
            position = torch.arange(self.blocks.shape[1] * BLOCK_TOKENS, device=self.blocks.device)
            mask = position < self.lengths[:, None]
            if window is not None:
                mask &= position >= self.lengths[:, None] - window
            mask = self._masks[window] = mask[:, None, None]
        return mask


class Batch:
    """Rows of all sequences of a step, one sequence after the other.

    Attributes:
        tokens, positions: [rows] int64.
        slot_blocks, slot_offsets: [rows] int64: the block, and the place in it, where a row's K and V belong.
        spans: one per sequence, in the order of the batch.
    """

    def __init__(self, sequences: Sequence[SequenceStep], device: torch.device) -> None:
        tokens: list[int] = []
        positions: list[int] = []
        slot_blocks: list[int] = []
        self.spans: list[Span] = []
        self._decoding: dict[int, list[tuple[int, SequenceStep]]] = {}
        self._device = device
        for s in sequences:
            end = s.start + len(s.tokens)
            span = Span(len(tokens), len(s.tokens), s.start, torch.tensor(s.blocks, dtype=torch.int64, device=device))
            self.spans.append(span)
            if len(s.tokens) == 1:
                padded = 1 << (len(s.blocks) - 1).bit_length()
                self._decoding.setdefault(padded, []).append((span.row, s))
            tokens += s.tokens
            positions += range(s.start, end)
            slot_blocks += [s.blocks[p // BLOCK_TOKENS] for p in range(s.start, end)]
        self.tokens = torch.tensor(tokens, dtype=torch.int64, device=device)
        self.positions = torch.tensor(positions, dtype=torch.int64, device=device)
        self.slot_blocks = torch.tensor(slot_blocks, dtype=torch.int64, device=device)
        self.slot_offsets = self.positions % BLOCK_TOKENS

    @cached_property
    def decode_groups(self) -> list[DecodeGroup]:
        """Every sequence that has one row in this step."""
        groups = []
        for padded, members in sorted(self._decoding.items()):
            blocks = [[*s.blocks, *[s.blocks[0]] * (padded - len(s.blocks))] for _, s in members]
            groups.append(
                DecodeGroup(
                    torch.tensor([row for row, _ in members], device=self._device),
                    torch.tensor(blocks, device=self._device),
                    torch.tensor([s.start + 1 for _, s in members], device=self._device),
                )
            )
        return groups

    @property
    def prefills(self) -> list[Span]:
        """Every sequence that has several rows in this step."""
        return [span for span in self.spans if span.rows > 1]
