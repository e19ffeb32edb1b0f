"""Arrival processes."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

DRAWN_AT_ONCE = 1024  # gaps


def arrival_times(count: int, rate: float, rng: np.random.Generator, cv: float = 1.0) -> npt.NDArray[np.float64]:
    """Seconds at which `count` requests arrive, ascending, the first at 0; shape [count].

    The gaps are gamma distributed with mean 1 / rate and coefficient of variation `cv`: 0 is constant spacing, 1 a
    Poisson process, more is burstier. An infinite rate means all at once.

    The same generator state gives the same gaps at every rate, scaled: two rates are compared on the same random
    sequence.
    """
    assert rate > 0, f"rate {rate} requests per second"
    assert cv >= 0, f"coefficient of variation {cv}"
    if math.isinf(rate):
        return np.zeros(count)
    count_gaps = max(count - 1, 0)
    # below 1e-6 the gamma's shape leaves the range of floats; the result equals constant spacing
    gaps = np.ones(count_gaps) if cv < 1e-6 else rng.gamma(cv**-2, cv**2, count_gaps)
    return np.concatenate([np.zeros(min(count, 1)), np.cumsum(gaps) / rate])


def poisson_times(rate: float, duration: float, rng: np.random.Generator) -> npt.NDArray[np.float64]:
    """Seconds in [0, duration) at which requests of a Poisson process arrive, ascending; there may be none.

    The same generator state gives the same gaps at every rate, scaled, and only their number differs.
    """
    assert 0 < rate < math.inf, f"rate {rate} requests per second"
    expected = rate * duration
    parts: list[npt.NDArray[np.float64]] = []
    last = 0.0
    while last < expected:
        parts.append(last + np.cumsum(rng.exponential(1.0, DRAWN_AT_ONCE)))
        last = float(parts[-1][-1])
    times = np.concatenate([np.empty(0), *parts]) / rate
    return times[times < duration]


def with_tide(times: npt.NDArray[np.float64], duration: float, peak_to_trough: float) -> npt.NDArray[np.float64]:
    """Arrivals in [0, duration) seconds moved so that their rate is diurnal; their number is unchanged.

    The period is `duration`: the rate is 1 - a * cos(2 pi t / duration) of what it was, so it is lowest at both ends
    and highest in the middle, by a factor of `peak_to_trough` (at least 1).
    """
    clock, come = _tide(duration, peak_to_trough)
    return np.interp(times, come, clock)


def before_tide(times: npt.NDArray[np.float64], duration: float, peak_to_trough: float) -> npt.NDArray[np.float64]:
    """The inverse of `with_tide`, up to rounding, for times in [0, duration]."""
    clock, come = _tide(duration, peak_to_trough)
    return np.interp(times, clock, come)


def _tide(duration: float, peak_to_trough: float) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """(times, the integral of the rate up to each)."""
    assert peak_to_trough >= 1, f"peak to trough {peak_to_trough}"
    swing = (peak_to_trough - 1) / (peak_to_trough + 1)
    clock = np.linspace(0.0, duration, 16_385)
    return clock, clock - swing * duration / (2 * math.pi) * np.sin(2 * math.pi * clock / duration)
