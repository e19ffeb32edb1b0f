"""Prompt lookup: what followed the latest tokens where they stood before is likely to follow again.

Answers repeat their prompts: edited code, quoted documents, JSON with the same keys again and again. Earlier places are
found by hash chains, as in LZ77: for each hash of two tokens the latest position behind such a pair, and for each
position the one before it in the same chain. A token is added, and the next place found, in constant time whatever the
length, and takes 12 to 16 bytes.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

PLACES = 16  # earlier places that are compared
LEAST_CHAINS = 256
SPREAD = 65599  # an odd number: pairs of one first token have chains of their own


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
        self._tokens = array("i")
        self._latest = _zeros(LEAST_CHAINS)  # hash of the tokens before -> position; 0 is none
        self._earlier = array("i")  # position - 1 -> the one before it in its chain; 0 is none
        self._place = 0  # of what is copied next
        if text:
            self._add([*text, -1])  # which is no token: nothing is copied across it
        self._add(tokens)
        if not text:
            self._find()

    def land(self, tokens: Sequence[int], drafts: Sequence[int] = ()) -> None:
        """These were drawn."""
        for token in tokens:
            if self.agreed and self._tokens[self._place] == token:
                self._place += 1
                self.agreed = min(self.agreed + 1, self._most)
            else:
                self.agreed = 0
            self._add((token,))
        if not self.agreed or self._tokens[self._place] < 0:
            self._find()

    def propose(self, most: int) -> list[int]:
        """What is likely to follow, up to so many tokens; nothing without a place to copy from."""
        if not self.agreed:
            return []
        known, place = self._tokens, self._place
        found = known[place : place + most].tolist()
        if -1 in found:
            return found[: found.index(-1)]
        for i in range(most - len(found)):  # it repeats itself without an end
            found.append(found[i])
        return found

    def _add(self, tokens: Sequence[int]) -> None:
        if len(self._tokens) + len(tokens) > len(self._latest):
            tokens = [*self._tokens, *tokens]
            self._latest = _zeros(1 << len(tokens).bit_length())
            self._tokens, self._earlier = array("i"), array("i")
        known, latest, earlier, pairs = self._tokens, self._latest, self._earlier, self._pairs
        before, mask = known[-1] if known and pairs else 0, len(latest) - 1
        for token in tokens:
            known.append(token)
            chain = (before * SPREAD + token) & mask
            earlier.append(latest[chain])
            latest[chain] = len(known)
            if pairs:
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


def _zeros(count: int) -> array[int]:
    return array("i", bytes(count * array("i").itemsize))
