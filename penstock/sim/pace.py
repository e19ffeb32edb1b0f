"""How long steps take on a modelled device: predicted time, a seeded noise, and how slow this instance is."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from penstock.core.plan import StepPlan
from penstock.sched.steptime import StepTime

DRAWN_AT_ONCE = 512
KEPT = 512  # draws that can be given back
ENOUGH = 1.1  # of the steps that would fit without noise and growth, so that there are rarely too few

_NUMBERS = np.arange(1.0, KEPT + DRAWN_AT_ONCE + 1)  # from 1


class Pace:
    """
    Args:
        slowdown: factor on all times.
        noise: standard deviation of a step's time, relative to it. Log-normal with mean 1: a step is never negative
            and now and then much longer, as real ones are.
        rng: of the noise. The n-th step of an instance has the n-th draw, whatever the steps are, so that two policies
            are compared on the same luck.
    """

    def __init__(self, times: StepTime, slowdown: float, noise: float, rng: np.random.Generator) -> None:
        self._times = times
        self._seconds = slowdown / 1e3  # per ms of the model
        self._noise = noise
        self._rng = rng
        self._drawn = np.empty(0)
        self._used = 0  # of those
        self._decode_ms: dict[int, float] = {}  # sequences -> a decode step's time without reading KV
        self._kv_ms = (times.step_ms(decodes=1, kv_tokens=1 << 20) - times.step_ms(decodes=1)) / (1 << 20)  # per token

    def step(self, plan: StepPlan) -> float:
        """Seconds that a step takes."""
        work = plan.work
        if not work.prefills:
            return self._noisy(self._step_ms(work.decodes) + self._kv_ms * work.kv_tokens)
        return self._noisy(self._times.step_ms(*work))

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
            shortest = (step_ms + self._kv_ms * kv_tokens) * self._seconds  # without noise
            enough = int((until - now) / shortest * ENOUGH) + 1 if shortest else most
            lucks = self._lucks(min(most - len(ends), enough))
            times = _NUMBERS[: len(lucks)] * sequences  # tokens, then ms, then seconds
            times += kv_tokens
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
