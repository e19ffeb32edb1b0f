"""Prompt lookup: what followed the latest tokens where they stood before is likely to follow again.

Answers repeat their prompts: edited code, quoted documents, JSON with the same keys again and again. Earlier places are
found by a hash chain, as in LZ77: the latest of all positions behind each pair of tokens, and for each position the one
before it behind the same pair. A token is added, and the next place found, in constant time whatever the length.
"""

from __future__ import annotations

from collections.abc import Sequence

PLACES = 16  # earlier places that are compared


class PromptLookup:
    """
    Args:
        tokens: of the sequence so far.
        text: to copy from besides, from its beginning.
        least, most: tokens that must agree before the place that is copied from; more than `most` count no more.

    Attributes:
        agreed: tokens before the place that is copied from which agree; 0 without a place.
    """

    def __init__(self, tokens: Sequence[int], text: Sequence[int] = (), *, least: int = 2, most: int = 8) -> None:
        assert 1 <= least <= most
        self.levels = most + 1
        self.agreed = most if text else 0
        self._least, self._most = least, most
        self._pairs = least > 1  # else single tokens
        self._tokens: list[int] = []
        self._latest: dict[int, int] = {}  # behind which tokens -> position
        self._earlier: list[int] = []  # position -> the one before it behind the same tokens; 0 is none
        self._place = 0  # of what is copied next
        if text:
            self._add([*text, -1])  # which is no token: nothing is copied across it
        self._add(tokens)
        if not text:
            self._find()

    def land(self, tokens: Sequence[int]) -> None:
        """These were drawn."""
        known = self._tokens
        for token in tokens:
            if self.agreed and known[self._place] == token:
                self._place += 1
                self.agreed = min(self.agreed + 1, self._most)
            else:
                self.agreed = 0
            self._add((token,))
        if not self.agreed or known[self._place] < 0:
            self._find()

    def propose(self, most: int) -> list[int]:
        """What is likely to follow, up to so many tokens; nothing without a place to copy from."""
        if not self.agreed:
            return []
        known, place = self._tokens, self._place
        found = known[place : place + most]
        if -1 in found:
            return found[: found.index(-1)]
        for i in range(most - len(found)):  # it repeats itself without an end
            found.append(found[i])
        return found

    def _add(self, tokens: Sequence[int]) -> None:
        known, latest, earlier, pairs = self._tokens, self._latest, self._earlier, self._pairs
        before = known[-1] if known else -1
        for token in tokens:
            known.append(token)
            key = (before << 32) ^ token if pairs else token
            earlier.append(latest.get(key, 0))
            latest[key] = len(known)
            before = token

    def _find(self) -> None:
        """The place before which most agrees, of equal ones the latest."""
        known, earlier, least, most = self._tokens, self._earlier, self._least, self._most
        end = len(known)
        self.agreed, place = 0, earlier[-1] if earlier else 0
        for _ in range(PLACES):
            if not place:
                return
            agreed, reach = 0, min(most, place)
            while agreed < reach and known[place - 1 - agreed] == known[end - 1 - agreed]:
                agreed += 1
            if agreed >= least and agreed > self.agreed and known[place] >= 0:
                self._place, self.agreed = place, agreed
                if agreed == most:
                    return
            place = earlier[place - 1]
