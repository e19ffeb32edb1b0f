"""How long outputs are, while some still go on."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from math import ceil


class Lengths:
    """The distribution of lengths (Kaplan and Meier, 1958). Those that have ended alone are too short, as what is long
    ends late; one that goes on is known to become longer than it is, and counts as that.

    Beyond all that is known it goes on as if outputs ended at random, as often per token as they did so far.

    Args:
        ended: tokens of those that have ended, one at least.
        so_far: tokens of those that go on.
    """

    def __init__(self, ended: Iterable[int], so_far: Iterable[int]) -> None:
        # of one length, those that have ended come first
        rows = sorted([(tokens, False) for tokens in ended] + [(tokens, True) for tokens in so_far])
        self._lengths: list[int] = []
        self._shares: list[float] = []  # of all, that are no longer than this
        longer = 1.0
        for place, (tokens, goes_on) in enumerate(rows):
            if not goes_on:
                longer *= 1 - 1 / (len(rows) - place)
                self._lengths.append(tokens)
                self._shares.append(1 - longer)
        assert self._lengths, "none has ended"
        self._rest = max(1, ceil(sum(tokens for tokens, _ in rows) / len(self._lengths)))
        self._longest = rows[-1][0]

    def above(self, tokens: int, share: float) -> int:
        """A length that so great a share of those of more than `tokens` tokens does not exceed.

        Args:
            share: more than 0, and less than 1.
        """
        place = bisect_right(self._lengths, tokens)
        before = self._shares[place - 1] if place else 0.0
        found = max(place, bisect_left(self._shares, before + share * (1 - before)))
        return self._lengths[found] if found < len(self._lengths) else max(tokens, self._longest) + self._rest
