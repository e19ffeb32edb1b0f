"""When requests arrive."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt


def arrival_times(count: int, rate: float, rng: np.random.Generator, cv: float = 1.0) -> npt.NDArray[np.float64]:
    """Seconds at which `count` requests arrive, ascending, the first at 0; shape [count].

    The gaps are gamma distributed with mean 1 / rate and coefficient of variation `cv`: 0 is constant spacing, 1 a
    Poisson process, more is burstier. An infinite rate means all at once.

    The same generator state gives the same gaps at every rate, scaled: two rates are compared on the same luck.
    """
    assert rate > 0, f"rate {rate} requests per second"
    assert cv >= 0, f"coefficient of variation {cv}"
    if math.isinf(rate):
        return np.zeros(count)
    count_gaps = max(count - 1, 0)
    # below a millionth the gamma's shape leaves the range of floats, and nothing to tell from constant spacing
    gaps = np.ones(count_gaps) if cv < 1e-6 else rng.gamma(cv**-2, cv**2, count_gaps)
    return np.concatenate([np.zeros(min(count, 1)), np.cumsum(gaps) / rate])
