"""Steps of a modelled device: how long they take, and many equal ones at once.

A step takes its predicted time, times a seeded noise and how slow its instance is. Steps that run one after the other
without a decision between them are a stride; what of the scheduler is left out in it is in `repeat.py`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from penstock.core.plan import StepPlan
from penstock.sched.local import Scheduler
from penstock.sched.steptime import StepTime
from penstock.sim.repeat import again, repeatable

DRAWN_AT_ONCE = 512
FAR = 1 << 20  # tokens
KEPT = 512  # draws that can be given back
ENOUGH = 1.1  # of the steps that would fit without noise and growth, so that there are rarely too few

_NUMBERS = np.arange(1.0, KEPT + DRAWN_AT_ONCE + 1)  # from 1


class StepTimer:
    """
    Args:
        noise: standard deviation of a step's time, relative to it. Log-normal with mean 1: a step is never negative
            and now and then much longer, as real ones are.
        rng: of the noise. The n-th step of an instance has the n-th draw, whatever the steps are, so that two policies
            are compared on the same random sequence.
    """

    def __init__(self, times: StepTime, noise: float, rng: np.random.Generator) -> None:
        self._times = times
        self._sees = times.shape.vision is not None
        self._seconds = 1e-3  # per ms of the model
        self._noise = noise
        self._rng = rng
        self._drawn = np.empty(0)
        self._used = 0  # of those
        self._decode_ms: dict[int, float] = {}  # sequences -> a decode step's time without reading KV
        # per token that is read
        self._kv_ms = (times.step_ms(decodes=1, kv_tokens=FAR) - times.step_ms(decodes=1)) / times.seen(1, FAR)

    def slow_down(self, factor: float) -> None:
        """Steps take so many times as long from now on."""
        self._seconds *= factor

    def step(self, plan: StepPlan) -> float:
        """Seconds that a step takes."""
        work = plan.work
        images = [encode.span.length for encode in plan.encodes if not encode.made] if self._sees else []
        if images:
            ms = self._times.step_ms(*work) + self._times.encode_ms(images)
            return self._noisy(ms + self._times.copy_ms(plan.copied_tokens))
        if not work.prefills:
            read = self._times.seen(work.decodes, work.kv_tokens)
            return self._noisy(self._step_ms(work.decodes) + self._kv_ms * read)
        return self._noisy(self._times.step_ms(*work) + self._times.copy_ms(plan.copied_tokens))

    def decodes(self, now: float, until: float, sequences: int, kv_tokens: int, most: int) -> list[float]:
        """When decode steps end that run one after the other, up to the first that ends at `until` or later.

        Args:
            now: when they begin.
            sequences: that compute one token in each.
            kv_tokens: that were read in the step before them.
            most: steps.
        """
        ends: list[float] = []
        step_ms = self._step_ms(sequences)
        while now < until and len(ends) < most:
            read = self._times.seen(sequences, kv_tokens)
            shortest = (step_ms + self._kv_ms * read) * self._seconds  # without noise
            enough = int((until - now) / shortest * ENOUGH) + 1 if shortest else most
            lucks = self._lucks(min(most - len(ends), enough))
            times = _NUMBERS[: len(lucks)] * sequences  # tokens, then ms, then seconds
            times += kv_tokens
            if sights := self._times.sights:
                times = sum(share * np.minimum(times, window * sequences) for window, share in sights)
            times *= self._kv_ms
            times += step_ms
            times *= self._seconds
            times *= lucks
            times[0] += now
            np.add.accumulate(times, out=times)
            steps = min(int(times.searchsorted(until)) + 1, len(times))
            ends += times[:steps].tolist()
            self._used += steps
            now, kv_tokens = ends[-1], kv_tokens + steps * sequences
        return ends

    def give_back(self, steps: int) -> None:
        """So many of the last steps were not taken after all."""
        self._used -= steps
        assert self._used >= 0

    def _step_ms(self, sequences: int) -> float:
        """Of a step in which so many decode, without what they read: the step-time model is linear in that."""
        ms = self._decode_ms.get(sequences)
        if ms is None:
            ms = self._decode_ms[sequences] = self._times.step_ms(decodes=sequences)
        return ms

    def _noisy(self, ms: float) -> float:
        (luck,) = self._lucks(1).tolist()
        self._used += 1
        return ms * self._seconds * luck

    def _lucks(self, most: int) -> npt.NDArray[np.float64]:
        """Factors of the next steps, at least one and as many as are drawn."""
        if self._used == len(self._drawn):
            self._drawn = np.concatenate((self._drawn[-KEPT:], self._draw()))
            self._used = len(self._drawn) - DRAWN_AT_ONCE
        return self._drawn[self._used : self._used + most]

    def _draw(self) -> npt.NDArray[np.float64]:
        if not self._noise:
            return np.ones(DRAWN_AT_ONCE)
        return self._rng.lognormal(-(self._noise**2) / 2, self._noise, DRAWN_AT_ONCE)


@dataclass(slots=True)
class Stride:
    """Steps that run one after the other without a decision between them, known as far as they were computed ahead.

    Attributes:
        plan: of the first; the others are its continuation.
        began: when the first that is not recorded began, in seconds.
        ends: when each is over.
        quiet: each only brings every sequence one more token.
        recorded: how many of them the scheduler knows of.
        more: how many can follow.
        ending: a sequence ends in the last of those that can follow; only that one is not quiet.
        kv_tokens: that the last reads.
        interrupted: the step ends early, and nothing of it counts.
    """

    plan: StepPlan
    began: float
    ends: list[float]
    quiet: bool = False
    recorded: int = 0
    more: int = 0
    ending: bool = False
    kv_tokens: int = 0
    interrupted: bool = False

    @property
    def end(self) -> float:
        return self.ends[-1]

    @property
    def ends_somebody(self) -> bool:
        """Whether a sequence ends in the last step."""
        return self.ending and not self.more

    def done(self, now: float) -> int:
        """Steps that are over and not recorded."""
        return bisect_right(self.ends, now) - self.recorded

    def cut(self, now: float) -> int:
        """Something has happened: end with the step that is running. Returns how many steps are not taken."""
        steps = bisect_left(self.ends, now) + 1
        dropped = max(0, len(self.ends) - steps)
        del self.ends[steps:]
        self.ending = self.ends_somebody and not dropped
        self.more = 0
        return dropped

    def interrupt(self, at: float) -> None:
        """The one step that it is ends early."""
        assert not self.quiet
        self.ends[-1], self.interrupted = at, True

    def split(self, scheduler: Scheduler) -> Stride:
        """The last step, in which a sequence ends, by itself; those before it are recorded."""
        return Stride(again(scheduler, self.plan), self.began, self.ends[-1:])

    def go_on(self, pace: StepTimer, until: float) -> None:
        """Look ahead, as far as to a step that ends at `until` or later."""
        more = pace.decodes(self.end, until, len(self.plan.sequences), self.kv_tokens, min(KEPT, self.more))
        self.ends += more
        self.more -= len(more)
        self.kv_tokens += len(more) * len(self.plan.sequences)

    def record(self) -> tuple[float, list[float]]:
        """When those that are not recorded began, and when each ended: they are now. Not the one in which a sequence
        ends; see `split`."""
        began, over = self.began, len(self.ends) - self.ends_somebody
        ends = self.ends[self.recorded : over]
        self.began, self.recorded = self.ends[over - 1], over
        return began, ends


def begin_stride(
    now: float,
    plan: StepPlan,
    pace: StepTimer,
    scheduler: Scheduler,
    lengths: Mapping[str, int],
    until: float,
    *,
    to_end: bool,
) -> Stride:
    """Run a plan that `scheduler` has just made, and go on as long as nothing changes, until a step ends at `until` or
    later.

    Args:
        lengths: how many tokens each request will generate.
        to_end: the step in which a sequence ends may be among them.
    """
    stride = Stride(plan, now, [now + pace.step(plan)])
    if until > now:
        stride.more, stride.ending = repeatable(scheduler, plan, lengths)
        if stride.ending and not to_end:
            stride.more, stride.ending = stride.more - 1, False
        if stride.more:
            stride.quiet = True
            stride.kv_tokens = plan.work.kv_tokens
            stride.go_on(pace, until)
    return stride
