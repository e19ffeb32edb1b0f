"""Few cases in which every two choices meet, where all of them would be too many."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import combinations, product


def pairwise(*factors: Sequence[Hashable]) -> list[tuple[Hashable, ...]]:
    """Of the product of `factors`, enough that every choice of one meets every choice of every other. Always the same
    ones; the first is the first of the product."""

    def pairs(case: tuple[Hashable, ...]) -> set[tuple[tuple[int, Hashable], ...]]:
        return set(combinations(enumerate(case), 2))

    cases = list(product(*factors))
    missing, chosen = set().union(*map(pairs, cases)), []
    while missing:
        chosen.append(max(cases, key=lambda case: len(pairs(case) & missing)))
        missing -= pairs(chosen[-1])
    return chosen
