"""A device's compute units: which of them attend over what, and how many of them operators get.

Attention of a decoding batch is spread over units such that each has about as many tokens (xLLM, section 4.4.3, layer
3): rows longest first to the unit with the least, those that are longer than a unit's share in pieces.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple


class Piece(NamedTuple):
    """Tokens of a row's KV from `start` to before `end`."""

    row: int
    start: int
    end: int


def spread_rows(lengths: Sequence[int], units: int, split: int) -> list[list[Piece]]:
    """Of each unit its pieces, in the order in which it got them; whole rows where they are not too long.

    Args:
        lengths: tokens of KV of each row.
        split: rows are cut at multiples of it.
    """
    share = -(-sum(lengths) // units)
    size = max(split, -(-share // split) * split)  # of a piece at most
    pieces = [
        Piece(row, start, min(length, start + size))
        for row, length in enumerate(lengths)
        for start in range(0, length, size)
    ]
    pieces.sort(key=lambda piece: (piece.start - piece.end, piece.row, piece.start))
    loads, found = [(0, unit) for unit in range(units)], [list[Piece]() for _ in range(units)]
    for piece in pieces:
        load, unit = loads[0]
        found[unit].append(piece)
        heapq.heapreplace(loads, (load + piece.end - piece.start, unit))
    return found


def busiest(spread: Sequence[Sequence[Piece]]) -> int:
    """Tokens of the unit that has most."""
    return max(sum([piece.end - piece.start for piece in unit]) for unit in spread)


def in_turn(lengths: Sequence[int], units: int) -> int:
    """Tokens of the unit that has most, when units get whole rows in turn."""
    return max(sum(lengths[unit::units]) for unit in range(units))
