"""The interface of local policies: the order of prompts, and the share of a step for prompts and for offline work.

Every step the scheduler asks once for an `Allowance` and fills the step by it: the allowance's decoding sequences get
their one token; then online prompts, running and waiting alike, get chunks in the order of their `turn`; then what the
allowance has held back; then offline prompts. What a local policy decides changes when a token is sampled, never which.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import ClassVar, Protocol

from penstock.sched.local.sequence import Sequence, WaitingQueue
from penstock.sched.steptime import StepTime


@dataclass
class Allowance:
    """What one step may hold; this one all that the token budget holds, offline decodes beside all others.

    Attributes:
        decoding: sequences that get their next token in any case, in this order.
        bounded: whether it may be less than the token budget, and everything offline comes after everything online;
            else `chunk`, `granted` and `held_back` need not be called.
    """

    decoding: list[Sequence]
    bounded: ClassVar[bool] = False

    def chunk(self, sequence: Sequence, cached: int, most: int) -> int:
        """How many of the next `most` tokens of a prompt to compute, after `cached` ones; possibly 0."""
        return most

    def granted(self, sequence: Sequence, cached: int, tokens: int) -> None:
        """These tokens are granted."""

    def held_back(self) -> Iterable[Sequence]:
        """Offline decodes that may have their token now, as all that is online has what it can have in this step."""
        return ()


class LocalPolicy(Protocol):
    """One per scheduler. It may remember, and sees time only as `now`, in seconds of the engine's clock."""

    steady: bool  # a step in which all decode, and nothing waits, may hold all of them: then `begin` is not called

    def predict_by(self, times: StepTime) -> None:
        """Use this step-time model from now on."""
        ...

    def join(self, sequence: Sequence) -> None:
        """A sequence was added."""
        ...

    def leave(self, sequence: Sequence) -> None:
        """A sequence was removed."""
        ...

    def wait(self, sequence: Sequence, cached: Callable[[Sequence], int]) -> None:
        """It will wait, for the first time or once more: give it its turn.

        Args:
            cached: tells how many of its tokens are in the prefix cache now.
        """
        ...

    def begin(
        self,
        now: float,
        delay: Callable[[], float],
        decoding: list[Sequence],
        prefilling: list[Sequence],
        queue: WaitingQueue,
    ) -> Allowance:
        """A step is filled. Turns may be changed now, through the queue.

        Args:
            delay: tells how many seconds it will be until the step begins.
            decoding: running sequences that lack one token.
            prefilling: those that lack more.
            queue: those that wait.
        """
        ...
