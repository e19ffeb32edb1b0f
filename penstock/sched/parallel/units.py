"""A device's compute units: which of them attend over what, and how many of them operators get.

Attention of a decoding batch is spread over units such that each has about as many tokens (xLLM, section 4.4.3, layer
3): rows longest first to the unit with the least, those that are longer than a unit's share in pieces.

Operators that run at once, of matrices on one kind of unit and of vectors on another, get units such that they end
together (`allocate`; xLLM, equation 1). With shares of units the answer is x_i = N * W_i / sum W in either class: equal
times within it, and between the classes the totals decide. With whole units, of which each operator has at least one
and all are used, it is found exactly: no operator is to end before some moment, so it gets no more units than that
allows, and within these bounds the slowest gets the next unit. Moments at which an operator can end are tried, the
latest first.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
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


@dataclass(frozen=True, slots=True)
class UnitClass:
    """Operators of one kind.

    Attributes:
        work: of each.
        units: of this kind; at least as many as operators.
        rate: work of one unit in a unit of time.
    """

    work: tuple[float, ...]
    units: int
    rate: float = 1.0

    def time(self, operator: int, units: int) -> float:
        return self.work[operator] / (self.rate * units)


def alignment_loss(classes: Sequence[UnitClass], given: Sequence[Sequence[int]]) -> tuple[float, float]:
    """(greatest difference of two operators' times, time until all have ended)."""
    times = [c.time(i, n) for c, units in zip(classes, given, strict=True) for i, n in enumerate(units)]
    return max(times) - min(times), max(times)


def allocate(classes: Sequence[UnitClass]) -> list[list[int]]:
    """Of each class the units of each operator: all units, with the least difference of times, and of those that have
    it the least time until all have ended."""
    assert all(1 <= len(c.work) <= c.units for c in classes)
    earliest = {c.time(i, n) for c in classes for i in range(len(c.work)) for n in range(1, c.units + 1)}
    evenly = [sum(c.work) / (c.rate * c.units) for c in classes]  # with shares of units all of a class end then
    best, found = (inf, inf), list[list[int]]()
    for moment in sorted(earliest, reverse=True):
        if max(evenly) - moment > best[0]:
            break  # whose operators end as early as that differ by more
        given = [_not_before(c, moment) for c in classes]
        whole = [units for units in given if units is not None]
        if len(whole) < len(given):
            continue  # an earlier moment leaves more room
        loss = alignment_loss(classes, whole)
        if loss < best:
            best, found = loss, whole
    return found


def _not_before(c: UnitClass, moment: float) -> list[int] | None:
    """All units of a class, such that the last operator ends as early as it can while none ends before the moment; None
    where there are too many units for that."""
    given = [1] * len(c.work)
    heap = [(-c.time(i, 1), i) for i in range(len(given))]
    if any(-late < moment for late, _ in heap):
        return None
    heapq.heapify(heap)
    for _ in range(c.units - len(given)):
        while heap and c.time(heap[0][1], given[heap[0][1]] + 1) < moment:
            heapq.heappop(heap)
        if not heap:
            return None
        operator = heap[0][1]
        given[operator] += 1
        heapq.heapreplace(heap, (-c.time(operator, given[operator]), operator))
    return given
