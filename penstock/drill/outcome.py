"""What the clients of a deployment saw while it was disturbed, beside what they see when it is not. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf

from penstock.bench.metrics import ClientRecord, Stats
from penstock.bench.verify import compare
from penstock.core.request import FinishReason
from penstock.drill.faults import Strike

SHOWN = 10  # streams that are described
GROUP_BY_FRONTEND = "frontend-"


@dataclass(slots=True)
class Struck:
    """A strike as it came about. Times are those of the clients' records.

    Attributes:
        began: None for one that could not be done.
        ended: when the fault was undone, or another process had taken the place of one that had ended.
        back: when its target served again, as far as that can be seen; None when it never did.
        why: it could not be done, or nothing.
    """

    strike: Strike
    began: float | None = None
    ended: float | None = None
    back: float | None = None
    why: str = ""


@dataclass(frozen=True, slots=True)
class Hit:
    """A stream that a fault met.

    Attributes:
        stream: its number.
        struck: number of the strike.
        at: when the longest gap during the fault began.
        gap: seconds without a token; to the first one, they count from when the request was sent.
    """

    stream: int
    struck: int
    at: float
    gap: float


@dataclass(slots=True, kw_only=True)
class Outcome:
    """
    Attributes:
        streams: requests that were sent.
        completed: of them, in full.
        identical: completed ones with the tokens and the text of the undisturbed run.
        excused: failed ones of a frontend that was broken meanwhile: nobody can go on for it.
        errors: kind -> how many failed by it.
        wrong: one line on each stream, complete or not, that is not what it has to be; the first `SHOWN`.
        failed: one line on each stream that failed and is not excused; the first `SHOWN`.
        hits: the completed streams that each fault met.
        met: how many each fault met, completed or not.
        unlike: streams that are wrong.
    """

    streams: int
    completed: int = 0
    identical: int = 0
    excused: int = 0
    unlike: int = 0
    errors: dict[str, int] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    hits: list[Hit] = field(default_factory=list)
    met: list[int] = field(default_factory=list)

    @property
    def lost(self) -> int:
        """Streams that had to complete and did not."""
        return self.streams - self.completed - self.excused

    @property
    def recovery(self) -> Stats | None:
        """Of the gaps of all that were hit, in ms; None when none was."""
        return Stats.of(hit.gap for hit in self.hits)


def judge(
    records: Sequence[ClientRecord],
    right: Sequence[ClientRecord],
    struck: Sequence[Struck],
    routes: Mapping[int, Collection[str]],
    breaks: Mapping[str, frozenset[str]],
    frontends: int = 1,
) -> Outcome:
    """
    Args:
        records: of the disturbed run.
        right: the same requests in the same order, when nothing disturbed them; all complete.
        routes: stream -> instances that had it, as far as is known.
        breaks: target -> instances that it takes away.
        frontends: stream i was sent to number i modulo so many.
    """
    outcome = Outcome(streams=len(records))
    failures = Counter(record.error for record in records if record.error is not None)
    outcome.errors = dict(failures.most_common())
    for record, known in zip(records, right, strict=True):
        assert known.answer is not None
        assert known.finish_reason is not None
        what = None
        if record.error is None or (record.answer is not None and record.answer.pieces):
            tokens, text = known.answer.token_ids or [], known.answer.text
            what = compare(record, tokens, text, FinishReason(known.finish_reason))
        if record.error is None:
            outcome.completed += 1
            outcome.identical += what is None
        elif _excused(record, struck, frontends):
            outcome.excused += 1
        elif len(outcome.failed) < SHOWN:
            outcome.failed.append(f"stream {record.number}: {record.error}: {record.detail}")
        if what is not None:
            outcome.unlike += 1
            if len(outcome.wrong) < SHOWN:
                outcome.wrong.append(f"stream {record.number}: {what}")
    for number, each in enumerate(struck):
        met = _met(records, each, routes, breaks[each.strike.target], frontends)
        outcome.met.append(len(met))
        for record in met:
            if record.error is None:
                begin, end = longest_gap(record, each)
                outcome.hits.append(Hit(record.number, number, begin, end - begin))
    return outcome


def frontend_of(stream: int, frontends: int) -> str:
    return f"{GROUP_BY_FRONTEND}{stream % frontends}"


def _excused(record: ClientRecord, struck: Sequence[Struck], frontends: int) -> bool:
    """Whether its frontend was broken while it ran."""
    own = frontend_of(record.number, frontends)
    return any(each.strike.target == own and _overlaps(record.sent, record.end, each, each.back) for each in struck)


def _overlaps(begin: float, end: float, struck: Struck, until: float | None) -> bool:
    """Whether a span of time meets that from the fault until then; None is for ever."""
    return struck.began is not None and begin < (inf if until is None else until) and end > struck.began


def _met(
    records: Sequence[ClientRecord],
    struck: Struck,
    routes: Mapping[int, Collection[str]],
    taken: frozenset[str],
    frontends: int,
) -> list[ClientRecord]:
    """Streams that ran while their frontend was broken, or an instance that had them at any time. What was sent to the
    process that came in its place did not meet the fault."""
    target, found = struck.strike.target, []
    for record in records:
        if _overlaps(record.sent, record.end, struck, struck.ended):
            if target.startswith(GROUP_BY_FRONTEND):
                hit = target == frontend_of(record.number, frontends)
            else:  # what takes no instance away, such as the master, may meet every stream
                hit = not taken or not taken.isdisjoint(routes.get(record.number, ()))
            if hit:
                found.append(record)
    return found


def longest_gap(record: ClientRecord, struck: Struck) -> tuple[float, float]:
    """The longest time without a token that a fault had a part in; for a stream that ran then."""
    times = [record.sent, *(time for time, _ in record.events)]
    gaps = [gap for gap in pairwise([*times, max(record.end, times[-1])]) if _overlaps(*gap, struck, struck.ended)]
    return max(gaps, key=lambda gap: gap[1] - gap[0], default=(record.sent, record.sent))


def longest_waits(record: ClientRecord, least: float, *, first: bool = False) -> list[tuple[float, float]]:
    """(begin, end) of all times of at least so many seconds between two tokens.

    Args:
        first: count also the time until the first one, or until the end where there is none.
    """
    times = [time for time, _ in record.events]
    if first:
        times = [record.sent, *(times or [record.end])]
    return [gap for gap in pairwise(times) if gap[1] - gap[0] >= least]
