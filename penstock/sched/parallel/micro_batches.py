"""Two micro-batches of a step: what one exchanges between ranks goes on under what the other computes (xLLM, section
4.4.1 and table 7).

Where a layer's experts are on several ranks, what they make of rows is exchanged. In a step of one batch nothing is
computed meanwhile. Of two micro-batches the first one's exchange goes on under the second's attention and experts, and
the second's under the first's attention and experts of the next layer. But weights are read twice. So it is predicted
how long a step takes either way, from steps that have run, and how the rows are best split; steps stay whole where
that is as quick. A row's values do not depend on which rows it is computed with, so no token does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from penstock.sched.parallel.units import UnitClass, allocate

SHARES = (0.375, 0.5, 0.625)  # of the computation, that the first micro-batch may have
GAIN = 0.03  # of a step, that two micro-batches have to save
LEAST_ROWS = 2
ENOUGH = 8  # steps that ran, before any is predicted
KEPT = 0.98  # of what was learned, from step to step
STEADY = 4  # layers after which every one takes as long as the one before
APART = 0.1  # of the time, that it may cost to have what exchanges and what computes on units of their own
RIDGE = 1e-4  # of what was seen: what cannot be told apart is shared out


class Part(NamedTuple):
    """Of a step.

    Attributes:
        kv: tokens of KV that its rows attend to, all together.
    """

    rows: int
    kv: int


class Costs(NamedTuple):
    """Seconds of a step, in all its layers.

    Attributes:
        batch: of computation, whatever the rows are: weights are read.
        row, kv: of computation, for each of them.
        exchange: of exchanges, whatever the rows are; `exchanged_row`: for each of them.
    """

    batch: float
    row: float
    kv: float
    exchange: float
    exchanged_row: float

    def computing(self, part: Part) -> float:
        return self.batch + self.row * part.rows + self.kv * part.kv

    def exchanging(self, rows: int) -> float:
        return self.exchange + self.exchanged_row * rows


def makespan(layers: int, computing: tuple[float, float], exchanging: tuple[float, float]) -> float:
    """Seconds that two micro-batches take, by turns, in so many layers.

    Args:
        computing, exchanging: seconds of each in all layers.
    """
    free = wire = 0.0  # when computation, and what exchanges, has done what was begun
    came = [0.0, 0.0]  # of each micro-batch, what the layer before has made
    ends = [0.0]
    for _ in range(min(layers, STEADY)):
        for i in range(2):
            free = max(free, came[i]) + computing[i] / layers
            came[i] = wire = max(wire, free) + exchanging[i] / layers
        ends.append(wire)
    return ends[-1] + max(0, layers - STEADY) * (ends[-1] - ends[-2])


def cut(parts: Sequence[Part], costs: Costs, share: float) -> int:
    """Rows of the first micro-batch, such that it has about this share of the computation.

    Args:
        parts: of each sequence, in the order of the batch. One is split where its rows are several.
    """
    wanted = share * sum([costs.row * part.rows + costs.kv * part.kv for part in parts])
    total = sum([part.rows for part in parts])
    rows = 0
    for part in parts:
        own = costs.row * part.rows + costs.kv * part.kv
        if own >= wanted:
            rows += round(part.rows * wanted / own) if own > 0 else 0
            break
        wanted -= own
        rows += part.rows
    return min(max(rows, 1), total - 1)


def halves(parts: Sequence[Part], rows: int) -> tuple[Part, Part]:
    """What the micro-batches have when the first has so many rows."""
    first_kv, left = 0, rows
    for part in parts:
        taken = min(left, part.rows)
        first_kv += part.kv * taken // part.rows
        left -= taken
    total = sum([part.kv for part in parts])
    return Part(rows, first_kv), Part(sum([part.rows for part in parts]) - rows, total - first_kv)


def best_split(parts: Sequence[Part], layers: int, costs: Costs) -> tuple[int, float, float]:
    """(rows of the first micro-batch, seconds of the two, seconds of the step as one batch)."""
    whole = Part(sum([part.rows for part in parts]), sum([part.kv for part in parts]))
    alone = costs.computing(whole) + costs.exchanging(whole.rows)
    found = []
    for share in SHARES:
        rows = cut(parts, costs, share)
        first, second = halves(parts, rows)
        computing = costs.computing(first), costs.computing(second)
        found.append((makespan(layers, computing, (costs.exchanging(first.rows), costs.exchanging(second.rows))), rows))
    took, rows = min(found)
    return rows, took, alone


def units_apart(units: int, computing: float, exchanging: float, sizes: Sequence[int]) -> int:
    """How many of a device's units exchanges have to themselves while the others compute, such that both end at about
    the same time (xLLM, equation 1); 0 where it is quicker that all share them.

    Args:
        computing, exchanging: seconds of a unit.
        sizes: how many these may be, ascending.
    """
    if units < 2 or exchanging <= 0:
        return 0
    wanted = _share(units, max(0.001, round(exchanging / (computing + exchanging), 3)))
    apart = next((size for size in sizes if size >= wanted), sizes[-1])
    if apart >= units:
        return 0
    took = max(computing / (units - apart), exchanging / apart)
    return apart if took <= (1 + APART) * (computing + exchanging) / units else 0


@lru_cache(1024)
def _share(units: int, exchanging: float) -> int:
    """Units of what has this share of the work; that of a GPU's many takes milliseconds to find."""
    ((_, found),) = allocate([UnitClass((1 - exchanging, exchanging), units)])
    return found


@dataclass(slots=True)
class _Fit:
    """Coefficients, none of them negative, of what has been seen, the later the more (least squares).

    Attributes:
        square: sums of products of features; `by`: of features and what came of them.
    """

    size: int
    square: list[list[float]] = field(init=False)
    by: list[float] = field(init=False)

    def __post_init__(self) -> None:
        self.square = [[0.0] * self.size for _ in range(self.size)]
        self.by = [0.0] * self.size

    def saw(self, features: Sequence[float], value: float) -> None:
        for i, a in enumerate(features):
            self.by[i] = KEPT * self.by[i] + a * value
            row = self.square[i]
            for j, b in enumerate(features):
                row[j] = KEPT * row[j] + a * b

    def coefficients(self) -> list[float]:
        used = [i for i in range(self.size) if self.square[i][i] > 0]
        while used:
            scale = [self.square[i][i] ** -0.5 for i in used]
            rows = [
                [self.square[i][j] * scale[a] * scale[b] + (RIDGE if a == b else 0.0) for b, j in enumerate(used)]
                + [self.by[i] * scale[a]]
                for a, i in enumerate(used)
            ]
            solved = [x * s for x, s in zip(_solved(rows), scale, strict=True)]
            worst = min(range(len(used)), key=lambda a: solved[a] / scale[a])
            if solved[worst] >= 0:
                found = dict(zip(used, solved, strict=True))
                return [found.get(i, 0.0) for i in range(self.size)]
            del used[worst]
        return [0.0] * self.size


def _solved(rows: list[list[float]]) -> list[float]:
    """Of a positive definite system, each row with its right side at the end."""
    count = len(rows)
    for i in range(count):
        for j in range(i + 1, count):
            factor = rows[j][i] / rows[i][i]
            rows[j] = [b - factor * a for a, b in zip(rows[i], rows[j], strict=True)]
    found = [0.0] * count
    for i in reversed(range(count)):
        found[i] = (rows[i][count] - sum([rows[i][j] * found[j] for j in range(i + 1, count)])) / rows[i][i]
    return found


class MicroBatches:
    """Decides for each step whether it is two micro-batches, by those that have run.

    Args:
        layers: that exchange.
    """

    def __init__(self, layers: int) -> None:
        self.layers = layers
        self.stretch = 1.0  # what two micro-batches have taken over what was predicted
        self.worked = 0.0  # seconds of a unit that exchanges of a step take, of late
        self._computed, self._exchanged = _Fit(3), _Fit(2)
        self._seen = 0

    @property
    def costs(self) -> Costs:
        batch, row, kv = self._computed.coefficients()
        return Costs(batch, row, kv, *self._exchanged.coefficients())

    def choose(self, parts: Sequence[Part]) -> int:
        """Rows of the first micro-batch; 0 where the step stays whole."""
        if self._seen < ENOUGH or sum([part.rows for part in parts]) < LEAST_ROWS:
            return 0
        rows, two, one = best_split(parts, self.layers, self.costs)
        return rows if two * max(1.0, self.stretch) < (1 - GAIN) * one else 0

    def ran(
        self, parts: Sequence[Part], split: int, took: float, waited: float, exchanging: float, worked: float = 0.0
    ) -> None:
        """A step has.

        Args:
            took: seconds; `waited`: of these, for exchanges, with nothing to compute.
            exchanging: seconds in which something was exchanged; `worked`: of a unit.
        """
        self.worked += 0.1 * (worked - self.worked)
        rows, kv = sum([part.rows for part in parts]), sum([part.kv for part in parts])
        if split and self._seen >= ENOUGH:
            first, second = halves(parts, split)
            costs = self.costs
            computing = costs.computing(first), costs.computing(second)
            exchanges = costs.exchanging(first.rows), costs.exchanging(second.rows)
            if (predicted := makespan(self.layers, computing, exchanges)) > 0:
                self.stretch += 0.2 * (min(4.0, took / predicted) - self.stretch)
        else:
            self.stretch += 0.01 * (1.0 - self.stretch)  # it may be otherwise by now, and is tried again
        batches = 2 if split else 1
        self._computed.saw((batches, rows, kv), took - waited)
        self._exchanged.saw((batches, rows), exchanging)
        self._seen += 1
