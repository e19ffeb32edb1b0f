"""The greatest load at which a service keeps its limits, found by measuring it at chosen loads."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

Measure = Callable[[float], Awaitable[float]]


@dataclass(frozen=True, slots=True)
class Probe:
    """One measurement: `load` in requests/s or concurrent requests, `attainment` from 0 to 1."""

    load: float
    attainment: float
    kept: bool


@dataclass(frozen=True, slots=True)
class SearchResult:
    """Where the edge was found.

    Attributes:
        best: the greatest load that was measured to keep the target; it is below every load that was measured to miss
            it. None when even the least load missed.
        missed: the least load that was measured to miss the target; None when even the greatest load kept it.
        probes: every measurement, in order.
    """

    best: float | None
    missed: float | None
    probes: tuple[Probe, ...]


async def find_greatest_load(
    measure: Measure,
    *,
    start: float,
    low: float,
    high: float,
    target: float = 0.9,
    tolerance: float = 0.05,
    whole: bool = False,
    progress: Callable[[Probe], None] | None = None,
) -> SearchResult:
    """Brackets the edge by doubling from `start` (halving when `start` already misses), then bisects.

    Attainment is taken to fall with load. Where noise makes it rise again the answer errs to the low side: loads above
    the least one that missed are not looked at.

    Args:
        measure: load -> share of requests that kept their limits.
        start: the first load that is tried.
        low, high: bounds of the loads that are tried, both tried when the edge is not inside; finite.
        target: least share that counts as keeping them.
        tolerance: ends when the bracket is narrower than this share of its lower end.
        whole: loads are whole numbers, and a bracket of 1 also ends the search.
    """
    assert 0 < low <= start <= high < math.inf, (low, start, high)
    probes: list[Probe] = []

    async def keeps(load: float) -> bool:
        attainment = await measure(load)
        probes.append(Probe(load, attainment, attainment >= target))
        if progress:
            progress(probes[-1])
        return probes[-1].kept

    kept, missed = await _bracket(keeps, start, low, high, whole)
    while kept is not None and missed is not None:
        middle = (kept + missed) / 2
        middle = math.floor(middle) if whole else middle
        if missed - kept <= tolerance * kept or middle in (kept, missed):
            break
        if await keeps(middle):
            kept = middle
        else:
            missed = middle
    return SearchResult(kept, missed, tuple(probes))


async def _bracket(
    keeps: Callable[[float], Awaitable[bool]], start: float, low: float, high: float, whole: bool
) -> tuple[float | None, float | None]:
    """(a load that keeps the target, a load that misses it), either None when the bounds have none."""
    if await keeps(start):
        kept = start
        while kept < high:
            load = min(kept * 2, high)
            if not await keeps(load):
                return kept, load
            kept = load
        return kept, None
    missed = start
    while missed > low:
        half = missed / 2
        load = max(math.floor(half) if whole else half, low)
        if await keeps(load):
            return load, missed
        missed = load
    return None, missed
