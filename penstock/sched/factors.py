"""Learned factors for `StepTime`: measured step times relative to those predicted from the data sheet.

Every part has one factor while it is small enough that memory bounds it, and one for when arithmetic does; what every
step has, and the links between devices, have one each. They are fitted by recursive least squares on relative errors:
with x the shares of the predicted time and A what is known about the factors so far,

    A <- A - (1 - MEMORY) * (A x)(A x)' / (x' A x) + x x'
    f <- f + A^-1 x * (measured / predicted - 1)

so old steps are forgotten only in the direction that a new step informs about. A factor that a step hardly
depends on is not moved by it at all.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite, sqrt

from penstock.core.device import DeviceModel, ModelShape
from penstock.sched.steptime import PARTS, StepTime

BOUNDS = (0.2, 20.0)
OVERHEAD_BOUNDS = (0.2, 100.0)  # not in data sheets; a CPU's is a hundred times a GPU's
MEMORY = 0.98  # what is left of one step's weight after another like it
TRUST = 0.05  # in the factors being 1, in steps that consist of one part alone
EXCITED = 0.02  # share of a step's time from which on it informs about a factor
WARM_UP = 5  # steps ignored after a change: something is being compiled, captured or paged in
OUTLIER = 6.0  # mean gaps; a step that is further off is an outlier
LEAST_OUTLIER = 0.5  # the least gap of an outlier, as a share of its predicted time
BELIEVED = 8  # outliers in a row that are accepted as a change
WINDOW = 256  # steps
SPREAD_AFTER, SPREAD_MEMORY = (
    32,
    0.98,
)  # steps that do not count, as they teach; what is left of one after the next
PACED, PACED_AFTER = 64, 16  # steps whose time is the speed, and at least
SETTLED_STEPS, SETTLED_GAP = 64, 0.1  # steps and their mean gap from which on there is little left to learn
NAMES = (
    "overhead",
    "collectives",
    *(f"{part}:{bound}" for part in PARTS for bound in ("compute", "memory")),
)
_OVERHEAD, _COLLECTIVES, _PARTS = 0, 1, 2  # places in NAMES; a part has two
_BOUNDS = tuple(OVERHEAD_BOUNDS if name == "overhead" else BOUNDS for name in NAMES)


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

    In plain numbers: a step depends on a handful of factors, for which arrays take several times as long, and what
    comes of sums in another order on every kind of processor would not be the same everywhere.

    Args:
        device, shape: the prior; with all factors 1 it predicts what `StepTime` does.
    """

    def __init__(self, device: DeviceModel, shape: ModelShape) -> None:
        self._times = StepTime(device, shape)
        self._values = [1.0] * len(NAMES)
        self._known = [[TRUST if i == j else 0.0 for j in range(len(NAMES))] for i in range(len(NAMES))]  # A; symmetric
        self._learned: list[int] = []  # places of factors that a step depended on; A has nothing beside these
        self._gaps: deque[float] = deque(maxlen=WINDOW)
        self._mean_gap: float | None = None  # exponentially weighted, of its size; None before there was one
        self._paces: deque[tuple[float, float]] = deque(maxlen=PACED)  # of steps, ms without factors, and as measured
        self._accidents = 0  # in a row
        self._late = 0.0  # mean square of gaps above 0, at most 1 each, and of others 0; exponentially weighted
        self._warming = WARM_UP

    @property
    def factors(self) -> dict[str, float]:
        """For `StepTime`; those that no step has depended on are left out."""
        return {NAMES[place]: self._values[place] for place in self._learned}

    @property
    def gap(self) -> Gap:
        """Over the last WINDOW steps, accidents included."""
        if not self._gaps:
            return Gap(0, 0.0, 0.0)
        import numpy as np  # not when `penstock serve` starts: it slows the start of its engine

        gaps = np.array(self._gaps)
        return Gap(len(gaps), float(gaps.mean()), float(np.quantile(np.abs(gaps), 0.9)))

    @property
    def spread(self) -> float:
        """Of steps that take longer than predicted, as a share of what was predicted: the standard deviation if as many
        took less."""
        return sqrt(2 * self._late)

    @property
    def speed(self) -> float | None:
        """Of the last steps that it was shown by `pace`, as a share of that without factors; None before there are
        enough."""
        if len(self._paces) < PACED_AFTER:
            return None
        return sum([ms for ms, _ in self._paces]) / sum([measured for _, measured in self._paces])

    @property
    def settled(self) -> bool:
        """Whether there is little left to learn: it may be shown steps less often until that changes."""
        return len(self._gaps) >= SETTLED_STEPS and self._mean_gap is not None and self._mean_gap < SETTLED_GAP

    def changed(self) -> None:
        """Something was loaded, compiled or captured: ignore the next WARM_UP steps."""
        self._warming = WARM_UP

    def pace(
        self,
        prefills: Sequence[tuple[int, int]],
        decodes: int,
        kv_tokens: int,
        logit_rows: int | None,
        measured_ms: float,
    ) -> None:
        """How long a step took. Arguments as of `observe`. Every so many steps one is shown, whatever time it took: of
        those that run at some moment, as `observe` sees them, long ones would be too many."""
        if not self._warming and isfinite(measured_ms) and measured_ms > 0:
            self._paces.append((self._times.step_ms(prefills, decodes, kv_tokens, logit_rows), measured_ms))

    def observe(
        self,
        prefills: Sequence[tuple[int, int]],
        decodes: int,
        kv_tokens: int,
        logit_rows: int | None,
        measured_ms: float,
    ) -> None:
        """Learn from a successful step.

        Args:
            prefills, decodes, kv_tokens, logit_rows: as in `StepTime.parts`.
            measured_ms: that it took; what is not above 0, or no number, is left out.
        """
        if self._warming:
            self._warming -= 1
            return
        if not (isfinite(measured_ms) and measured_ms > 0):
            return
        values = self._values
        times = self._multiplied(prefills, decodes, kv_tokens, logit_rows)
        predicted = sum([ms * values[place] for place, ms in times])
        if predicted <= 0:
            return
        gap = measured_ms / predicted - 1
        self._gaps.append(gap)
        if len(self._gaps) >= SPREAD_AFTER:
            self._late += (1 - SPREAD_MEMORY) * (min(max(gap, 0.0), 1.0) ** 2 - self._late)
        if self._is_accident(abs(gap)):
            return
        self._learn([(place, ms / predicted) for place, ms in times if ms * values[place] >= EXCITED * predicted], gap)

    def _multiplied(
        self, prefills: Sequence[tuple[int, int]], decodes: int, kv_tokens: int, logit_rows: int | None
    ) -> list[tuple[int, float]]:
        """The factors that this step's time depends on, by place, with the ms that each is multiplied with."""
        values = self._values
        bounds, link_ms = self._times.bounds(prefills, decodes, kv_tokens, logit_rows)
        times = [(_OVERHEAD, self._times.device.overhead_ms), (_COLLECTIVES, link_ms)]
        place = _PARTS
        for compute_ms, memory_ms in bounds:
            if values[place] * compute_ms > values[place + 1] * memory_ms:
                times.append((place, compute_ms))
            else:
                times.append((place + 1, memory_ms))
            place += 2
        return times

    def _is_accident(self, gap: float) -> bool:
        mean = self._mean_gap
        if mean is not None and gap > max(LEAST_OUTLIER, OUTLIER * mean) and self._accidents < BELIEVED:
            self._accidents += 1
            return True
        self._accidents = 0
        self._mean_gap = gap if mean is None else mean + 0.1 * (gap - mean)
        return False

    def _learn(self, x: Sequence[tuple[int, float]], error: float) -> None:
        """From a step with these shares, by place, of those factors that it says something about."""
        learned, rows = self._learned, self._known
        for place, _ in x:
            if place not in learned:
                insort(learned, place)
        known = []  # A x
        for place in learned:
            row, value = rows[place], 0.0
            for other, share in x:
                value += row[other] * share
            known.append((place, value))
        among = dict(known)
        forgotten = (1 - MEMORY) / sum([among[place] * share for place, share in x])
        for place, value in known:
            row, less = rows[place], forgotten * value
            for other, another in known:
                row[other] -= less * another
        matrix = []
        for place, share in x:
            row, part = rows[place], []
            for other, another in x:
                row[other] += share * another
                part.append(row[other])
            matrix.append(part)
        steps = _solve(matrix, [share for _, share in x])
        for (place, _), step in zip(x, steps, strict=True):
            low, high = _BOUNDS[place]
            self._values[place] = min(max(self._values[place] + step * error, low), high)


def _solve(matrix: list[list[float]], vector: list[float]) -> list[float]:
    """The x with matrix x = vector, both of which are used up; the matrix is symmetric and positive definite, and only
    looked at below its diagonal."""
    size = len(vector)
    for i in range(size):
        pivots, value = matrix[i], vector[i]
        pivot = pivots[i]
        for j in range(i + 1, size):
            row = matrix[j]
            ratio = row[i] / pivot
            vector[j] -= ratio * value
            for k in range(i + 1, j + 1):
                row[k] -= ratio * matrix[k][i]
    for i in range(size - 1, -1, -1):
        rest = 0.0
        for j in range(i + 1, size):
            rest += matrix[j][i] * vector[j]
        vector[i] = (vector[i] - rest) / matrix[i][i]
    return vector
