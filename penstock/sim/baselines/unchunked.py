"""Engines that prefill whole prompts, in steps of their own, before any decode: what they did before chunked prefill
(vLLM, Kwon et al., SOSP 2023), and so what HFX and others were compared with. Neither a step's time nor targets matter,
and offline work is like any other."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from penstock.sched.local.policy.base import Allowance, StepLimit
from penstock.sched.local.sequence import Sequence, WaitingQueue
from penstock.sched.steptime import StepTime


class _Apart(Allowance):
    """A step of prompts, or of decodes where no prompt can be in it."""

    def __init__(self, decoding: list[Sequence]) -> None:
        super().__init__([])
        self.bounded = True
        self._decodes, self._prompts = decoding, False

    def chunk(self, sequence: Sequence, cached: int, most: int) -> int:
        """All of it; as much as the step holds of one that is longer than that."""
        whole = cached + most == len(sequence.tokens)
        return most if whole or not self._prompts else 0

    def granted(self, sequence: Sequence, cached: int, tokens: int) -> None:
        self._prompts = True

    def held_back(self) -> Iterable[Sequence]:
        return () if self._prompts else self._decodes


class Unchunked:
    """First come, first served, whatever a request's priority, targets or kind."""

    steady = True

    def __init__(self, times: StepTime | None = None, limit: StepLimit | None = None) -> None:
        pass

    def predict_by(self, times: StepTime) -> None:
        pass

    def join(self, sequence: Sequence) -> None:
        pass

    def leave(self, sequence: Sequence) -> None:
        pass

    def wait(self, sequence: Sequence, cached: Callable[[Sequence], int]) -> None:
        sequence.turn = (0, sequence.rank[-1])

    def order(self, sequence: Sequence) -> str:
        return "in order of arrival, prompts as a whole"

    def begin(
        self,
        now: float,
        delay: Callable[[], float],
        decoding: list[Sequence],
        prefilling: list[Sequence],
        queue: WaitingQueue,
    ) -> Allowance:
        return _Apart(decoding)
