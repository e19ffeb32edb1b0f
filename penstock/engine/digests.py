"""The modelled model of `core.digest` for whole steps at once, over the digests in a pool."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

import numpy as np
import numpy.typing as npt

from penstock.core import digest
from penstock.core.plan import BLOCK_TOKENS, SequenceStep
from penstock.kv.groups import WHOLE, Windows
from penstock.sched.local.sequence import blocks_for

Ints = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]


class DigestArithmetic:
    """The numbers that depend on positions and tokens alone, and how steps are computed with them.

    With g(p) = 1 + weight(p) * FEEDBACK and G(p) the product of g before p, context(p) / G(p) grows by
    weight(p) * spread(token) / G(p + 1) per token: a running sum. All modulo 2**64, where odd numbers have inverses.

    Args:
        positions: the longest sequence.
        vocab_size: token ids are below it.
        windows: of groups of layers (`kv.groups`). The first sees everything and is what contexts are of; the blocks of
            the others hold the same digests, and a window that sees different ones changes the context.
    """

    def __init__(self, positions: int, vocab_size: int, windows: Windows = WHOLE) -> None:
        assert windows[0] is None
        self._windows = windows
        blocks = blocks_for(positions)
        self._offset_weights = np.array(digest.OFFSET_WEIGHTS, dtype=np.uint64)
        self._block_weights = np.array([digest.block_weight(b) for b in range(blocks)], dtype=np.uint64)
        weights = (self._block_weights[:, None] * self._offset_weights).reshape(-1)
        growth = np.ones(len(weights) + 1, dtype=np.uint64)
        growth[1:] += weights * np.uint64(digest.FEEDBACK)
        self._product: Words = np.multiply.accumulate(growth)  # G
        self._inverse = _inverse(self._product)
        self._share = self._inverse[1:] * weights  # weight(p) / G(p + 1)
        self._spread = np.array([digest.spread(t) for t in range(vocab_size)], dtype=np.uint64)

    def run(self, sequences: Sequence[SequenceStep], digests: Words) -> list[int]:
        """Reads the digests before every sequence's new tokens, writes those of the new ones.

        Args:
            sequences: at least one, each with at least one token.
            digests: [blocks, BLOCK_TOKENS], of the whole pool.

        Returns: the context after each token behind which one is drawn (`SequenceStep.sample`), and after the last of
            those that are pooled, in order.
        """
        starts = _ints(s.start for s in sequences)
        counts = _ints(len(s.tokens) for s in sequences)
        groups = len(self._windows)
        tables = [_ints(chain.from_iterable(s.blocks[group::groups] for s in sequences)) for group in range(groups)]
        held = _ints(len(s.blocks) // groups for s in sequences)
        first_block = np.cumsum(held) - held  # where each sequence's blocks begin in each table
        contexts = self._read(digests, tables, first_block, held, starts)

        first_row = np.cumsum(counts) - counts
        positions = np.arange(counts.sum()) + np.repeat(starts - first_row, counts)
        spread = self._spread[_ints(chain.from_iterable(s.tokens for s in sequences))]
        share = self._share[positions] * spread
        total = np.cumsum(share, dtype=np.uint64)
        base = contexts * self._inverse[starts] - (total - share)[first_row]
        before = self._product[positions] * (total - share + np.repeat(base, counts))
        slots = np.repeat(first_block, counts) + positions // BLOCK_TOKENS
        for blocks in tables:
            digests[blocks[slots], positions % BLOCK_TOKENS] = before * np.uint64(digest.FEEDBACK) + spread
        drawn = _ints(s.sample or int(s.pool is not None) for s in sequences)
        first_drawn = np.cumsum(drawn) - drawn
        last = np.arange(drawn.sum()) + np.repeat(first_row + counts - drawn - first_drawn, drawn)
        after: Words = self._product[positions[last] + 1] * (total[last] + np.repeat(base, drawn))
        return after.tolist()

    def _read(self, digests: Words, tables: Sequence[Ints], first_block: Ints, held: Ints, starts: Ints) -> Words:
        """The context at `starts` of every sequence, from the digests in its blocks."""
        index = np.arange(len(tables[0])) - np.repeat(first_block, held)  # place of a block in its sequence
        valid = np.repeat(starts, held) - index * BLOCK_TOKENS  # how many of its digests are of earlier positions
        seen = whole = digests[tables[0]]
        for window, blocks in zip(self._windows[1:], tables[1:], strict=True):
            gone = 0 if window is None else valid[:, None] + 1 - window  # of its digests, those before the window
            # twice, so that of the first group's own digests an odd multiple stays
            seen = seen + np.uint64(2) * (digests[blocks] - whole) * (np.arange(BLOCK_TOKENS) >= gone)
        part = np.flatnonzero(valid < BLOCK_TOKENS)
        seen[part] *= np.arange(BLOCK_TOKENS) < valid[part, None]
        sums = (seen @ self._offset_weights) * self._block_weights[index]
        return np.add.reduceat(sums, first_block)


def _inverse(odd: Words) -> Words:
    """Modulo 2**64, by Newton's method: five bits are right at first, and each round doubles them."""
    inverse = (odd * np.uint64(3)) ^ np.uint64(2)
    for _ in range(4):
        inverse *= np.uint64(2) - odd * inverse
    return inverse


def _ints(values: Iterable[int]) -> Ints:
    return np.fromiter(values, dtype=np.int64)
