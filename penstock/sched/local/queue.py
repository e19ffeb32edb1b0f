"""Sequences that wait, in the order of their turns."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from operator import attrgetter

from penstock.sched.local.sequence import Sequence

_turn = attrgetter("turn")


class Queue:
    """Whoever waits holds no block. Turns are unique, and change only through `move`."""

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []  # the next is the first: of some thousands, that is taken in no time

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    @property
    def head(self) -> Sequence:
        return self._sequences[0]

    def add(self, sequence: Sequence) -> None:
        insort(self._sequences, sequence, key=_turn)

    def remove(self, sequence: Sequence) -> None:
        place = bisect_left(self._sequences, sequence.turn, key=_turn)
        assert self._sequences[place] is sequence
        del self._sequences[place]

    def move(self, sequence: Sequence, turn: tuple[float, ...]) -> None:
        """Give a sequence another turn, whether it waits or is being read."""
        waits = not sequence.blocks
        if waits:
            self.remove(sequence)
        sequence.turn = turn
        if waits:
            self.add(sequence)

    def check(self) -> None:
        turns = [s.turn for s in self._sequences]
        assert turns == sorted(set(turns)), "the queue is out of order"
        for s in self._sequences:
            assert not s.blocks
            assert not s.transferring
            assert s.computed == 0
