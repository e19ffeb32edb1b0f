"""First come, first served, by priority: every decode, then as much of the prompts as the token budget allows."""

from __future__ import annotations

from collections.abc import Callable

from penstock.sched.local.policy.base import Allowance
from penstock.sched.local.sequence import Sequence, WaitingQueue
from penstock.sched.steptime import StepTime


class Fcfs:
    """Turns are ranks: priority and then arrival, offline work last."""

    steady = True

    def predict_by(self, times: StepTime) -> None:
        pass

    def join(self, sequence: Sequence) -> None:
        pass

    def leave(self, sequence: Sequence) -> None:
        pass

    def wait(self, sequence: Sequence, cached: Callable[[Sequence], int]) -> None:
        sequence.turn = sequence.rank

    def begin(
        self,
        now: float,
        delay: Callable[[], float],
        decoding: list[Sequence],
        prefilling: list[Sequence],
        queue: WaitingQueue,
    ) -> Allowance:
        return Allowance(decoding)
