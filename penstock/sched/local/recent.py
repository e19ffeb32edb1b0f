"""What an engine measures of itself: when each of its requests came, ran and answered; what lately was, in means that a
snapshot carries to the master; and what steps take beside what was predicted."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from operator import sub

from penstock.core.device import DeviceModel, ModelShape
from penstock.core.plan import StepPlan
from penstock.core.request import Timing, TokenOutput
from penstock.sched.factors import FactorLearner
from penstock.sched.steptime import StepTime

WEIGHT = 0.1  # of the newest value in a mean
LEARN_EVERY = 0.05  # seconds between two steps that predictions are held against: that is enough, and not for nothing
CHECK_EVERY = 0.5  # the same once they are right


@dataclass(slots=True)
class _Milestones:
    """When a request arrived, first ran and first answered; and how many tokens it had when it arrived."""

    arrival: float
    started: float | None = None
    answered: float | None = None
    generated: int = 0


class Recent:
    """Times are seconds of the engine's clock; means are exponentially weighted, in milliseconds, and None before there
    is a value.

    Attributes:
        ttft_ms, tpot_ms: of its own requests.
        interval_ms: between the ends of two steps with decodes.
        factors: see `StepTime`.
        times: predicts its steps with them; None when nothing is known to begin with.
    """

    def __init__(self) -> None:
        self.ttft_ms: float | None = None
        self.tpot_ms: float | None = None
        self.interval_ms: float | None = None
        self.factors: dict[str, float] = {}
        self.learner: FactorLearner | None = None
        self._times: StepTime | None = None
        self._learn_at = -inf
        self._last_step: float | None = None
        self._milestones: dict[str, _Milestones] = {}
        self._idle: set[str] = set()  # those that have not run yet

    def __len__(self) -> int:
        """Requests that are here."""
        return len(self._milestones)

    def learn(self, device: DeviceModel | None, shape: ModelShape | None) -> StepTime | None:
        """From now on measured steps are held against those of such a device. Returns what predicts them at first;
        None when nothing is known to begin with."""
        if device is not None and shape is not None:
            self.learner, self._times = FactorLearner(device, shape), StepTime(device, shape)
        return self._times

    @property
    def times(self) -> StepTime | None:
        times = self._times
        if times is not None and times.factors is not self.factors:
            times = self._times = StepTime(times.device, times.shape, self.factors)
        return times

    # --- requests

    def arrived(self, request_id: str, now: float, generated: int = 0) -> None:
        """With tokens that were generated elsewhere, its time to first token is nothing to measure."""
        self._milestones[request_id] = _Milestones(now, generated=generated)
        self._idle.add(request_id)

    def adopted(self, request_id: str, now: float, queue: float, prefill: float, generated: int = 0) -> None:
        """It has come from another engine, where it waited and read its prompt for so many seconds."""
        self._milestones[request_id] = _Milestones(now - prefill - queue, now - prefill, now, generated)

    def spent(self, request_id: str) -> tuple[float, float]:
        """Seconds that a request that has answered waited, and read its prompt."""
        m = self._milestones[request_id]
        assert m.started is not None
        assert m.answered is not None
        return m.started - m.arrival, m.answered - m.started

    def forget(self, request_id: str) -> None:
        """It is no longer here."""
        self._milestones.pop(request_id, None)
        self._idle.discard(request_id)

    def stamp(self, output: TokenOutput, now: float) -> None:
        """A request has got something; when it ends, the output says where its time went, if all of it was here."""
        milestones = self._milestones[output.request_id]
        if milestones.answered is None:
            milestones.answered = now
            if not milestones.generated:
                self.ttft_ms = _mean(self.ttft_ms, (now - milestones.arrival) * 1e3)
        if output.finish is None:
            return
        del self._milestones[output.request_id]
        assert milestones.started is not None
        decode, before = now - milestones.answered, milestones.generated
        if not before:
            queue, prefill = milestones.started - milestones.arrival, milestones.answered - milestones.started
            output.timing = Timing(queue=queue, prefill=prefill, decode=decode)
        if output.start > before:  # tokens after the first
            self.tpot_ms = _mean(self.tpot_ms, decode / (output.start - before) * 1e3)

    # --- steps

    def started(self, plan: StepPlan, now: float) -> None:
        """A step begins."""
        if not self._idle:
            return
        for s in plan.sequences:
            if s.request_id in self._idle:
                self._idle.remove(s.request_id)
                self._milestones[s.request_id].started = now

    def ran(self, plan: StepPlan, began: float, ends: Sequence[float], after: int = 0) -> bool:
        """A step has run, or several that only decode, one right after the other.

        Args:
            plan: of the first.
            ends: of each.
            after: steps of that plan that were recorded before.

        Returns:
            Whether `times` has changed.
        """
        learner, start, learned = self.learner, 0, False
        prefills, decodes, kv_tokens, rows = plan.work
        while start < len(ends):
            learn = len(ends) if learner is None else bisect_left(ends, self._learn_at, start)
            stop = min(learn + 1, len(ends))
            if decodes:
                self._note_intervals(began, ends[start:stop])
            last_began, began = ends[stop - 2] if stop - start > 1 else began, ends[stop - 1]
            self._last_step = began
            if learner is not None and learn < len(ends):
                self._learn_at = began + (CHECK_EVERY if learner.settled else LEARN_EVERY)
                kv_tokens_then = kv_tokens + (after + learn) * decodes
                learner.observe(prefills, decodes, kv_tokens_then, rows, (began - last_began) * 1e3)
                learned = True
            start = stop
        if learner is not None and learned:
            self.factors = learner.factors
        return learned

    def _note_intervals(self, began: float, ends: Sequence[float]) -> None:
        """From the end of one step to the end of the next, or twice what the step took where there was a pause."""
        last, mean = self._last_step, self.interval_ms
        if last is not None:
            mean = _mean(mean, min(ends[0] - last, 2 * (ends[0] - began)) * 1e3)
        gaps = map(sub, ends[1:], ends)
        if mean is None and len(ends) > 1:
            mean = next(gaps) * 1e3
        for gap in gaps:
            mean += WEIGHT * (gap * 1e3 - mean)
        self.interval_ms = mean


def _mean(before: float | None, value: float) -> float:
    return value if before is None else before + WEIGHT * (value - before)
