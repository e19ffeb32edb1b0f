"""What became of the requests of a simulation: a column of each thing, for a day has millions of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from math import nan
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.sim.frontend import Record

Column = npt.NDArray[Any]


def kept(record: Record) -> bool:
    """Whether a request that is over got all it asked for, within both of its targets."""
    return not record.error and _in_time(record) and _at_pace(record)


@dataclass(frozen=True, slots=True)
class Outcomes:
    """Of all requests, in order of arrival. Every column has the shape [requests]; times are in seconds, and nan where
    there was no such thing.

    Attributes:
        placed: when it was sent to an instance or, if it never was, was over.
        ttft, tpot, latency: as its client saw them; `latency` is to its end.
        kept: whether it got all it asked for, within both of its targets.
        in_time, at_pace: whether it kept the one or the other; what failed may have.
        received: tokens that it got.
        cached: tokens of its prompt that were found in a cache.
        task, error: words; "" where there is none.
        handed_over: whether another instance generated than the one that prefilled its prompt.
        recovered: whether it was interrupted and went on elsewhere.
        regret: by stage, how much worse its place was than the best candidate, in the policy's own costs.
        targets: of each task of online requests, (TTFT, TPOT) in seconds, as its first request had them.
    """

    arrival: Column
    placed: Column
    ended: Column
    ttft: Column
    tpot: Column
    latency: Column
    kept: Column
    in_time: Column
    at_pace: Column
    offline: Column
    prompt: Column
    received: Column
    cached: Column
    task: Column
    error: Column
    handed_over: Column
    recovered: Column
    regret: dict[str, Column]
    targets: dict[str, tuple[float, float]]

    @property
    def online(self) -> Column:
        """Those online ones that are over."""
        return ~self.offline & self.over

    @property
    def over(self) -> Column:
        return ~np.isnan(self.ended)

    @property
    def good(self) -> Column:
        """Those that did not fail."""
        return self.error == ""

    def __len__(self) -> int:
        return len(self.arrival)


COLUMNS = tuple(field.name for field in fields(Outcomes) if field.name not in ("regret", "targets"))


def outcomes_of(records: Sequence[Record], since: float = 0.0) -> Outcomes:
    """
    Args:
        since: of their times; the columns' begin at 0.
    """
    ended = _times((r.ended for r in records), since)
    return Outcomes(
        arrival=_times((r.arrival for r in records), since),
        placed=_times((r.ended if r.launched is None else r.launched for r in records), since),
        ended=ended,
        ttft=_times(r.ttft for r in records),
        tpot=_times(r.tpot for r in records),
        latency=_times(None if r.ended is None else r.ended - r.arrival for r in records),
        kept=_flags(kept(r) for r in records),
        in_time=_flags(_in_time(r) for r in records),
        at_pace=_flags(_at_pace(r) for r in records),
        offline=_flags(r.offline for r in records),
        prompt=_counts(r.prompt_tokens for r in records),
        received=_counts(r.received for r in records),
        cached=_counts(r.cached_tokens for r in records),
        task=_words(r.task for r in records),
        error=_words(r.error for r in records),
        handed_over=_flags(r.decode != r.prefill for r in records),
        recovered=_flags(r.recoveries > 0 for r in records),
        regret={
            stage: _times(r.costs[stage][0] - r.costs[stage][1] if stage in r.costs else None for r in records)
            for stage in sorted({stage for r in records for stage in r.costs})
        },
        targets={r.task: (r.ttft_target, r.tpot_target) for r in reversed(records) if not r.offline},
    )


def joined(parts: Sequence[Outcomes]) -> Outcomes:
    """As if all of them had been simulated at once; each part's requests came after the last one's."""
    if len(parts) == 1:
        return parts[0]
    regret = {
        stage: np.concatenate([part.regret.get(stage, np.full(len(part), nan)) for part in parts])
        for stage in sorted({stage for part in parts for stage in part.regret})
    }
    return Outcomes(
        **{name: np.concatenate([getattr(part, name) for part in parts]) for name in COLUMNS},
        regret=regret,
        targets={task: targets for part in reversed(parts) for task, targets in part.targets.items()},
    )


def _times(seconds: Iterable[float | None], since: float = 0.0) -> Column:
    return np.array([nan if moment is None else moment for moment in seconds], dtype=np.float64) + since


def _flags(values: Iterable[bool]) -> Column:
    return np.array(list(values), dtype=bool)


def _counts(values: Iterable[int]) -> Column:
    return np.array(list(values), dtype=np.int64)


def _words(values: Iterable[str]) -> Column:
    return np.array(list(values), dtype=object)


def _in_time(record: Record) -> bool:
    return record.ttft is not None and record.ttft <= record.ttft_target


def _at_pace(record: Record) -> bool:
    return record.tpot is None or record.tpot <= record.tpot_target
