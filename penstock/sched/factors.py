"""What a device's steps really take, beside what its data sheet says: factors for `StepTime`, learned while it runs.

Every part has one factor while it is small enough that memory bounds it, and one for when arithmetic does; what every
step has, and the links between devices, have one each. They are fitted by recursive least squares on relative errors:
with x the shares of the predicted time and A what is known about the factors so far,

    A <- A - (1 - MEMORY) * (A x)(A x)' / (x' A x) + x x'
    f <- f + A^-1 x * (measured / predicted - 1)

so what is old is forgotten only in the direction that a new step says something about. A factor that a step hardly
depends on is not moved by it at all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from types import MappingProxyType

import numpy as np

from penstock.core.device import DeviceModel, ModelShape
from penstock.sched.steptime import Roofline, StepTime

BOUNDS = (0.2, 20.0)
OVERHEAD_BOUNDS = (0.2, 100.0)  # no data sheet names it, and a CPU's is a hundred times a GPU's
MEMORY = 0.98  # what is left of one step's weight after another like it
TRUST = 0.05  # in the factors being 1, in steps that consist of one part alone
EXCITED = 0.02  # share of a step's time from which on it says something about a factor
WARM_UP = 5  # steps after a change that say nothing: something is being compiled, captured or paged in
OUTLIER = 6.0  # mean gaps; a step that is further off is an accident
LEAST_OUTLIER = 0.5  # and so far off, as a share of its predicted time, it has to be at least
BELIEVED = 8  # accidents in a row are none
WINDOW = 256  # steps
SETTLED_STEPS, SETTLED_GAP = 64, 0.1  # steps and their mean gap from which on there is little left to learn
PARTS = ("gemm", "lm_head", "prefill_attention", "decode_attention")
NAMES = (
    "overhead",
    "collectives",
    *(f"{part}:{bound}" for part in PARTS for bound in ("compute", "memory")),
)
_INDEX = MappingProxyType({name: i for i, name in enumerate(NAMES)})
_PLACES = MappingProxyType(  # of a part's two factors
    {part: (_INDEX[f"{part}:compute"], _INDEX[f"{part}:memory"]) for part in PARTS}
)
_LOW, _HIGH = np.array([OVERHEAD_BOUNDS if name == "overhead" else BOUNDS for name in NAMES]).T


@dataclass(frozen=True, slots=True)
class Gap:
    """Predicted beside measured times of the last steps, as shares of what was predicted before each was measured.

    Attributes:
        mean: of measured - predicted; above 0, steps take longer than predicted.
        p90: of its size.
    """

    steps: int
    mean: float
    p90: float


class FactorLearner:
    """Learns from the steps of one engine.

    Args:
        device, shape: the prior; with all factors 1 it predicts what `StepTime` does.
    """

    def __init__(self, device: DeviceModel, shape: ModelShape) -> None:
        self._times = StepTime(device, shape)
        self._values = np.ones(len(NAMES))
        self._known = np.eye(len(NAMES)) * TRUST
        self._learned = np.zeros(len(NAMES), bool)
        self._gaps: deque[float] = deque(maxlen=WINDOW)
        self._mean_gap: float | None = None  # exponentially weighted, of its size; None before there was one
        self._accidents = 0  # in a row
        self._warming = WARM_UP

    @property
    def factors(self) -> dict[str, float]:
        """For `StepTime`; those that no step has depended on are left out."""
        values = zip(NAMES, self._values.tolist(), self._learned.tolist(), strict=True)
        return {name: value for name, value, learned in values if learned}

    @property
    def gap(self) -> Gap:
        """Over the last WINDOW steps, accidents included."""
        if not self._gaps:
            return Gap(0, 0.0, 0.0)
        gaps = np.array(self._gaps)
        return Gap(len(gaps), float(gaps.mean()), float(np.quantile(np.abs(gaps), 0.9)))

    @property
    def settled(self) -> bool:
        """Whether there is little left to learn: it may be shown steps less often until that changes."""
        return len(self._gaps) >= SETTLED_STEPS and self._mean_gap is not None and self._mean_gap < SETTLED_GAP

    def changed(self) -> None:
        """Something was loaded, compiled or captured anew: the next WARM_UP steps say nothing."""
        self._warming = WARM_UP

    def observe(
        self,
        prefills: Sequence[tuple[int, int]],
        decodes: int,
        kv_tokens: int,
        logit_rows: int | None,
        measured_ms: float,
    ) -> None:
        """A step that was done. Those that failed are not reported.

        Args:
            prefills, decodes, kv_tokens, logit_rows: as in `StepTime.parts`.
            measured_ms: that it took; what is not above 0, or no number, is left out.
        """
        if self._warming:
            self._warming -= 1
            return
        if not (isfinite(measured_ms) and measured_ms > 0):
            return
        times = self._shares(prefills, decodes, kv_tokens, logit_rows)
        predicted = float(times @ self._values)
        if predicted <= 0:
            return
        gap = measured_ms / predicted - 1
        self._gaps.append(gap)
        if self._is_accident(abs(gap)):
            return
        self._learn(times / predicted, gap)

    def _shares(
        self, prefills: Sequence[tuple[int, int]], decodes: int, kv_tokens: int, logit_rows: int | None
    ) -> np.ndarray:
        """[NAMES] ms that each factor is multiplied with in this step."""
        times = [0.0] * len(NAMES)
        values = self._values.tolist()
        times[_INDEX["overhead"]] = self._times.device.overhead_ms
        for name, part in self._times.parts(prefills, decodes, kv_tokens, logit_rows).items():
            if name == "collectives":
                times[_INDEX[name]] = part.ms
            else:
                index, ms = _bound(name, part, values)
                times[index] = ms
        return np.array(times)

    def _is_accident(self, gap: float) -> bool:
        mean = self._mean_gap
        if mean is not None and gap > max(LEAST_OUTLIER, OUTLIER * mean) and self._accidents < BELIEVED:
            self._accidents += 1
            return True
        self._accidents = 0
        self._mean_gap = gap if mean is None else mean + 0.1 * (gap - mean)
        return False

    def _learn(self, x: np.ndarray, error: float) -> None:
        moved = x * self._values >= EXCITED
        kept = np.where(moved, x, 0.0)
        known = self._known @ kept
        forgotten = (1 - MEMORY) / float(kept @ known)
        self._known += kept[:, None] * kept - forgotten * (known[:, None] * known)
        step = np.linalg.solve(self._known[moved][:, moved], kept[moved]) * error
        values = np.maximum(self._values[moved] + step, _LOW[moved])
        self._values[moved] = np.minimum(values, _HIGH[moved])
        self._learned |= moved


def _bound(name: str, part: Roofline, values: Sequence[float]) -> tuple[int, float]:
    """Which of a part's bounds holds with these factors, and the time that this one is multiplied with."""
    compute, memory = _PLACES[name]
    if values[compute] * part.compute_ms > values[memory] * part.memory_ms:
        return compute, part.compute_ms
    return memory, part.memory_ms
