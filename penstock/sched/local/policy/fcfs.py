"""First come, first served, by priority: every decode, then as much of the prompts as the step's limit allows. Targets
are not looked at."""

from __future__ import annotations

from collections.abc import Callable

from penstock.sched.local.policy.base import Allowance, Decodes, StepLimit
from penstock.sched.local.sequence import Sequence, WaitingQueue
from penstock.sched.steptime import StepTime


class Fcfs:
    """Turns are ranks: priority and then arrival, offline work last.

    Args:
        times: predicts steps; None without a model: then their time has no limit.
    """

    steady = True

    def __init__(self, times: StepTime | None = None, limit: StepLimit | None = None) -> None:
        self._times, self._limit = times, limit or StepLimit.asked(None)

    def predict_by(self, times: StepTime) -> None:
        self._times = times

    def join(self, sequence: Sequence) -> None:
        pass

    def leave(self, sequence: Sequence) -> None:
        pass

    def wait(self, sequence: Sequence, cached: Callable[[Sequence], int]) -> None:
        sequence.turn = sequence.rank

    def order(self, sequence: Sequence) -> str:
        return "in order of arrival"

    def begin(
        self,
        now: float,
        delay: Callable[[], float],
        decoding: list[Sequence],
        prefilling: list[Sequence],
        queue: WaitingQueue,
    ) -> Allowance:
        times = self._times
        if times is None:
            return Allowance(decoding)
        decodes = Decodes(now + delay(), decoding)
        return Allowance(decoding, times, decodes, decodes.limit_ms(times, self._limit))
