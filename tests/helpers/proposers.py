"""Proposers for tests: what they guess is wrong as often as is wanted, and never matters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

from penstock.sched.local.sequence import Sequence as Running
from penstock.sched.local.speculation import Speculation
from penstock.sched.local.speculation.mtp import HeadDrafts

After = Callable[[list[int], int], list[int]]  # tokens, and how many at most -> what follows them


class Guesses:
    """Guesses from a function of all tokens so far; each guess is another token with some probability."""

    levels = 3
    agreed = 1

    def __init__(self, tokens: list[int], after: After, wrong: float, rng: Random) -> None:
        self._tokens, self._after, self._wrong, self._rng = tokens[:], after, wrong, rng
        self._proposal: list[int] | None = None

    def land(self, tokens: Sequence[int], drafts: Sequence[int] = ()) -> None:
        self._tokens += tokens
        self._proposal = None

    def propose(self, most: int) -> list[int]:
        if self._proposal is None:
            right = self._after(self._tokens, most)
            self._proposal = [self._rng.randrange(50) if self._rng.random() < self._wrong else t for t in right]
        return self._proposal[:most]


def guessing(after: After, wrong: float, most: int = 4, seed: int = 0) -> Speculation:
    """Every sequence has guesses in every step."""
    rng = Random(seed)

    def make(sequence: Running) -> Guesses:
        return Guesses(sequence.tokens, after, wrong, rng)

    return Speculation(make, most, adaptive=False)


def heads(most: int) -> Speculation:
    """As many drafts as the model's draft head makes."""
    return Speculation(lambda sequence: HeadDrafts(), most, adaptive=False, head="mtp")
