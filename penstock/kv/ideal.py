"""What a cache without end that all instances share would have found of the prompts: the most that any cache can.

Everything that a prompt had, or that an instance has told of, would be found again; a prompt counts from the moment
that it comes. A prefix key names all before it, so who has seen a block has seen those: how much of a prompt is known
is found by bisection. Keys are kept as 64 of their bits, sorted, in many short arrays. When there are too many, the
older half is forgotten, and what is found is a lower bound from then on.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence

from penstock.core.plan import BLOCK_TOKENS

MOST = 1 << 24  # keys: some 140 MiB, and a thousand million tokens
SHARD_BITS = 12
_EMPTY = array("Q")


class _Keys:
    """A set of 64-bit numbers, at some 9 bytes each."""

    def __init__(self) -> None:
        self.count = 0
        self._shards: dict[int, array[int]] = {}  # by the first bits

    def __contains__(self, number: int) -> bool:
        shard = self._shards.get(number >> 64 - SHARD_BITS, _EMPTY)
        at = bisect_left(shard, number)
        return at < len(shard) and shard[at] == number

    def add(self, number: int) -> None:
        """One that is not in it."""
        bits = number >> 64 - SHARD_BITS
        if bits not in self._shards:
            self._shards[bits] = array("Q")
        insort(self._shards[bits], number)
        self.count += 1


class IdealCache:
    """
    Args:
        most: keys that are remembered at most; at least half of them always are.

    Attributes:
        prompt_tokens: of all prompts so far.
        found_tokens: of them, those in full blocks that were known before.
        complete: whether nothing was ever forgotten, or is kept that was never told; else `found_tokens` is a lower
            bound.
    """

    def __init__(self, most: int = MOST) -> None:
        self.prompt_tokens = self.found_tokens = 0
        self.complete = True
        self._half = max(1, most // 2)
        self._new, self._old = _Keys(), _Keys()

    def ask(self, keys: Sequence[bytes], prompt_tokens: int) -> int:
        """A prompt comes: how many of its leading tokens are found. Its last token is always computed.

        Args:
            keys: of its full blocks.
        """
        numbers = [int.from_bytes(key[:8]) for key in keys]
        known = bisect_left(numbers, 1, key=lambda number: number not in self._new and number not in self._old)
        found = max(0, min(known, (prompt_tokens - 1) // BLOCK_TOKENS)) * BLOCK_TOKENS
        self.prompt_tokens += prompt_tokens
        self.found_tokens += found
        self._note(numbers)
        return found

    def learn(self, keys: Iterable[bytes]) -> None:
        """These blocks were computed, as part of a prompt or of what was generated."""
        self._note([int.from_bytes(key[:8]) for key in keys])

    def _note(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            if number not in self._new:
                if self._new.count >= self._half:
                    self.complete = self.complete and not self._old.count
                    self._new, self._old = _Keys(), self._new
                self._new.add(number)
