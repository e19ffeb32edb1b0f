"""The greatest scale of a workload that a policy keeps up with, found in few simulations, and in short ones if they do.

Scales are rungs of a ladder, each a few per cent above the last. A rough search on the beginning of the workload tells
where to look; the answer is always of whole simulations: a rung that is kept, and the next one, which is missed. Share
kept is taken to fall with load; where noise makes it rise again the answer errs to the low side.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from math import ceil, inf, log
from statistics import median
from typing import Any, Protocol

STEP = 1.025  # from a rung to the next
DOUBLING = 28  # rungs, about a factor of two
LOWEST, HIGHEST = -8 * DOUBLING, 12 * DOUBLING  # rungs from the start, at most
ROUGH = 4  # rungs between which the rough search leaves the edge
ALIKE = DOUBLING // 2  # rungs over which more load must bring more, or there is no more to be had
GAIN = 1.1  # by which, at least


@dataclass(frozen=True, slots=True)
class Trial:
    """Of one simulation.

    Attributes:
        kept: whether it kept the target.
        attainment: the share that did; roughly, when it was given up.
        worth: what is to be made great, as requests/s; grows with the scale until there is no more to be had.
    """

    kept: bool
    attainment: float
    worth: float


class Lab(Protocol):
    """Simulates. The share is how much of the workload, from its beginning, from above 0 to 1."""

    def measure(self, scale: float, share: float) -> Awaitable[Trial]: ...

    def guess(self, scale: float, share: float) -> None:
        """A hint that this may be asked for next."""
        ...


@dataclass(frozen=True, slots=True)
class SearchStep:
    """One simulation of the search."""

    scale: float
    share: float
    outcome: Trial


@dataclass(frozen=True, slots=True)
class Found:
    """Of whole simulations.

    Attributes:
        best: the greatest scale that is kept; None when the least is missed.
        missed: the next greater that is missed; None when even the greatest is kept, or more load brings no more.
        rung: of `best`, or of the least that was missed: where another seed may begin to look.
        probes: in the order in which they were asked for.
    """

    best: float | None
    missed: float | None
    rung: int
    probes: tuple[SearchStep, ...]


@dataclass(slots=True)
class Ladder:
    """
    Args:
        start: the scale of rung 0.
        target: share that is to be kept.
        most: beyond which no scale is tried.
        told: called after each probe.
    """

    lab: Lab
    start: float
    target: float
    most: float = inf
    told: Callable[[SearchStep], None] = lambda probe: None
    probes: list[SearchStep] = field(default_factory=list)

    def __post_init__(self) -> None:
        assert 0 < self.start <= self.most, (self.start, self.most)

    def scale(self, rung: int) -> float:
        return self.start * STEP**rung

    @property
    def highest(self) -> int:
        """The last rung."""
        if self.most >= self.scale(HIGHEST):
            return HIGHEST
        return int(log(self.most / self.start) / log(STEP) + 1e-9)

    async def search(self, short: float, near: int | None = None) -> Found:
        """
        Args:
            short: share of the workload that the rough search sees; 1 does without one.
            near: a rung that is likely to be near, from another seed.
        """
        if near is not None or short >= 1:
            edge = await _Edge(self, 1.0, first=DOUBLING if near is None else 1).find(near or 0)
        else:
            rough = await _Edge(self, short, first=DOUBLING, width=ROUGH).find(0)
            begin = rough.missed if rough.kept is None else rough.kept
            assert begin is not None
            edge = await _Edge(self, 1.0, first=2).find(begin)
        rung = edge.missed if edge.kept is None else edge.kept
        assert rung is not None
        return Found(
            best=None if edge.kept is None else self.scale(edge.kept),
            missed=None if edge.missed is None else self.scale(edge.missed),
            rung=rung,
            probes=tuple(self.probes),
        )


@dataclass(slots=True)
class _Edge:
    """Looks for a rung that is kept and one at most `width` above it that is missed, with one share of the workload.

    Where the next one is tried goes by the attainment of the last two, as on a straight line.

    Attributes:
        first: rungs of the first stride away from the beginning.
        outcomes: by rung, in the order in which they were tried.
    """

    ladder: Ladder
    share: float
    first: int
    width: int = 1
    kept: int | None = None
    missed: int | None = None
    outcomes: dict[int, Trial] = field(default_factory=dict)

    async def find(self, begin: int) -> _Edge:
        stride, highest = self.first, self.ladder.highest
        self._guess(begin + stride, begin - stride)
        if await self._try(begin):
            while self.missed is None and self.kept is not None and self.kept < highest:
                if await self._try(min(self.kept + stride, highest)) and self._saturated():
                    return self
                stride = self._stride(stride)
        else:
            while self.kept is None and self.missed is not None and self.missed > LOWEST:
                await self._try(max(self.missed - stride, LOWEST))
                stride = self._stride(stride)
        await self._narrow()
        return self

    def _stride(self, last: int) -> int:
        """The next one away from the beginning: to the target, if it can be estimated; twice the last if not."""
        (rung0, before), (rung1, after) = list(self.outcomes.items())[-2:]
        slope = (after.attainment - before.attainment) / (rung1 - rung0)
        wanted = 2.0 * last if slope >= 0 else abs(after.attainment - self.ladder.target) / -slope
        return max(1, ceil(min(wanted, 4 * last, DOUBLING)))

    async def _narrow(self) -> None:
        halve = False
        while self.kept is not None and self.missed is not None and self.missed - self.kept > self.width:
            kept, missed = self.kept, self.missed
            rung = (kept + missed) // 2 if halve else self._between(kept, missed)
            self._guess(*(near for near in (rung - 1, rung + 1) if kept < near < missed))
            await self._try(rung)
            halve = 2 * (self.missed - self.kept) > missed - kept

    def _between(self, kept: int, missed: int) -> int:
        high, low = self.outcomes[kept].attainment, self.outcomes[missed].attainment
        part = (high - self.ladder.target) / (high - low) if high > low else 0.5
        return min(max(kept + round(part * (missed - kept)), kept + 1), missed - 1)

    async def _try(self, rung: int) -> bool:
        scale = self.ladder.scale(rung)
        outcome = await self.ladder.lab.measure(scale, self.share)
        probe = SearchStep(scale, self.share, outcome)
        self.ladder.probes.append(probe)
        self.ladder.told(probe)
        self.outcomes[rung] = outcome
        if outcome.kept:
            self.kept = rung
        else:
            self.missed = rung
        return outcome.kept

    def _guess(self, *rungs: int) -> None:
        for rung in rungs:
            if rung not in self.outcomes and LOWEST <= rung <= self.ladder.highest:
                self.ladder.lab.guess(self.ladder.scale(rung), self.share)

    def _saturated(self) -> bool:
        assert self.kept is not None
        earlier = [outcome.worth for rung, outcome in self.outcomes.items() if rung <= self.kept - ALIKE]
        return bool(earlier) and self.outcomes[self.kept].worth < GAIN * max(earlier)


Row = Mapping[str, Any]


def searched(rows: Mapping[int, Row], figure: str) -> dict[str, Any]:
    """The row of the seed in the middle, and how far the others are from it.

    Args:
        rows: seed -> what its search came to; one at least.
        figure: the field that was made great.
    """
    ranked = sorted(rows, key=lambda seed: (rows[seed][figure] or 0.0, seed))
    middle = ranked[(len(ranked) - 1) // 2]
    figures = [rows[seed][figure] for seed in ranked]
    return {
        **rows[middle],
        "seed": middle,
        "spread": None if None in figures else [figures[0], figures[-1]],
        "seeds": _listed(rows),
    }


def at_rate(rate: float, rows: Mapping[int, Row]) -> dict[str, Any]:
    """Medians over the seeds, and from where to where attainment goes.

    Args:
        rows: seed -> what it came to at that rate; one at least, all with the same fields.
    """
    columns = {name: [row[name] for row in rows.values()] for name in next(iter(rows.values()))}
    known = {name: [value for value in values if value is not None] for name, values in columns.items()}
    kept = known["attainment"]
    return {
        "rate": rate,
        **{name: median(values) if values else None for name, values in known.items()},
        "spread": [min(kept), max(kept)] if kept else None,
        "seeds": _listed(rows),
    }


def _listed(rows: Mapping[int, Row]) -> list[dict[str, Any]]:
    return [{"seed": seed, **row} for seed, row in rows.items()]
