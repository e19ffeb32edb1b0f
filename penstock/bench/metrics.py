"""What happened to each request as its client saw it, and the numbers that are reported of all of them. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from penstock.core.errors import ConfigError


@dataclass(slots=True)
class Answer:
    """The content of an answer, as far as it was received.

    Attributes:
        pieces: of its text.
        token_ids: None while the server has given none.
    """

    pieces: list[str] = field(default_factory=list)
    token_ids: list[int] | None = None

    @property
    def text(self) -> str:
        return "".join(self.pieces)


@dataclass(slots=True, kw_only=True)
class ClientRecord:
    """Times are seconds on the clock of the run.

    Attributes:
        number: the request's place in the workload.
        start: when the request was due. Latencies count from here, so a client that falls behind makes them longer,
            not invisible; without a schedule it is when the request was sent.
        sent: when it was really sent.
        end: when the answer was complete, or when the request failed.
        events: (time, tokens) of each event that brought tokens.
        prompt_tokens: as the server counted them; as sent when it did not say.
        cached_tokens: of the prompt, found in the server's prefix cache.
        asked_tokens: the most tokens the answer could have.
        finish_reason: as the server gave it.
        error: the kind of failure (`timeout`, `connection`, `http 429`, `incomplete`, ...), None for success.
        detail: one line on the failure.
        answer: its content; None when the client does not keep it.
    """

    number: int
    start: float
    sent: float
    end: float = 0.0
    events: list[tuple[float, int]] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    asked_tokens: int = 0
    finish_reason: str | None = None
    error: str | None = None
    detail: str = ""
    answer: Answer | None = None

    def fail(self, kind: str, detail: str) -> None:
        self.error, self.detail = kind, " ".join(detail.split())[:300]

    @property
    def output_tokens(self) -> int:
        return sum(tokens for _, tokens in self.events)

    @property
    def lag(self) -> float:
        """Seconds by which the client was late to send."""
        return self.sent - self.start

    @property
    def e2e(self) -> float:
        """Seconds from due to complete."""
        return self.end - self.start

    @property
    def ttft(self) -> float | None:
        """Seconds from due to the first tokens."""
        return self.events[0][0] - self.start if self.events else None

    @property
    def tpot(self) -> float | None:
        """Mean seconds per output token after the first; None below two tokens.

        (last - first) / (n - 1) when the first event brings one token. A first event of m tokens leaves n - m to the
        interval: those that came with it took no time that could be seen. When all came in one event, nothing
        between them was seen, and the whole time of the request is divided instead: an upper bound.
        """
        tokens = self.output_tokens
        if tokens < 2:
            return None
        after_first = tokens - max(1, self.events[0][1])
        if after_first <= 0:
            return (self.events[-1][0] - self.start) / (tokens - 1)
        return (self.events[-1][0] - self.events[0][0]) / after_first

    @property
    def gaps(self) -> list[float]:
        """Seconds between events that brought tokens, however many each brought."""
        times = [time for time, _ in self.events]
        return [later - earlier for earlier, later in pairwise(times)]

    @property
    def held_back(self) -> list[float]:
        """Seconds that the oldest token of each event but the first waited for the event, if tokens came evenly since
        the one before: nothing where an event brings one token, half the gap where it brings two."""
        pairs = pairwise(self.events)
        return [(later - earlier) * (tokens - 1) / max(1, tokens) for (earlier, _), (later, tokens) in pairs]


LIMITED = ("ttft", "tpot", "e2e")


@dataclass(frozen=True, slots=True)
class Stats:
    """Of a set of times, in ms. Percentiles are interpolated linearly between the two nearest values."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, seconds: Iterable[float | None]) -> Stats | None:
        """None when there is nothing to describe."""
        values = np.array([value for value in seconds if value is not None], dtype=np.float64) * 1e3
        if not len(values):
            return None
        p50, p90, p99 = np.percentile(values, (50, 90, 99))
        return cls(len(values), float(values.mean()), float(p50), float(p90), float(p99), float(values.max()))


@dataclass(frozen=True, slots=True)
class Goodput:
    """Requests that kept every limit.

    Attributes:
        limits_ms: by name: ttft, tpot, e2e.
        met: how many requests succeeded and kept all limits.
        requests_per_s: `met` over the duration.
        attainment: `met` over all requests that were sent; a failed request keeps no limit.
        attainment_by_limit: the same for each limit by itself.
    """

    limits_ms: dict[str, float]
    met: int
    requests_per_s: float
    attainment: float
    attainment_by_limit: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """One run. Token counts, rates and latencies are of completed requests alone; failures are counted beside them.

    Attributes:
        duration_s: from when the first request was due to when the last one ended, well or badly. A request that hangs
            until its timeout therefore lengthens the run.
        requests, completed, failed: counts; `failures` is by kind.
        short_answers: completed with fewer tokens than were asked, for example at the model's end of sequence.
        prompt_tokens, cached_tokens, output_tokens: sums.
        requests_per_s, output_tokens_per_s, total_tokens_per_s: over `duration_s`; total is prompt and output.
        offered_per_s: rate at which requests became due (without a schedule: were sent); None when all were at once.
        peak_in_flight: most requests that were sent and not ended at one time.
        tokens_per_event: mean output tokens in an event that brought any.
        ttft: from due to the first tokens. tpot: see `ClientRecord.tpot`. itl: between events of one answer.
        held_back: by events of several tokens, see `ClientRecord.held_back`.
        e2e: from due to complete. lag: from due to sent, which is the client's own delay.
    """

    duration_s: float
    requests: int
    completed: int
    failed: int
    failures: dict[str, int] = field(default_factory=dict)
    short_answers: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    offered_per_s: float | None
    peak_in_flight: int
    tokens_per_event: float | None
    ttft_ms: Stats | None
    tpot_ms: Stats | None
    itl_ms: Stats | None
    held_back_ms: Stats | None
    e2e_ms: Stats | None
    lag_ms: Stats | None
    goodput: Goodput | None


def summarise(records: Sequence[ClientRecord], limits_ms: Mapping[str, float] | None = None) -> Summary:
    """The summary of one run's records (at least one). `limits_ms` are by name: ttft, tpot, e2e."""
    assert records, "nothing was measured"
    done = [record for record in records if record.error is None]
    duration = max(record.end for record in records) - min(record.start for record in records)
    prompt, output = sum(r.prompt_tokens for r in done), sum(r.output_tokens for r in done)
    events = sum(len(record.events) for record in done)
    return Summary(
        duration_s=duration,
        requests=len(records),
        completed=len(done),
        failed=len(records) - len(done),
        failures=dict(Counter(record.error for record in records if record.error is not None).most_common()),
        short_answers=sum(record.output_tokens < record.asked_tokens for record in done),
        prompt_tokens=prompt,
        cached_tokens=sum(record.cached_tokens for record in done),
        output_tokens=output,
        requests_per_s=_rate(len(done), duration),
        output_tokens_per_s=_rate(output, duration),
        total_tokens_per_s=_rate(prompt + output, duration),
        offered_per_s=_offered(records),
        peak_in_flight=_peak_in_flight(records),
        tokens_per_event=output / events if events else None,
        ttft_ms=Stats.of(record.ttft for record in done),
        tpot_ms=Stats.of(record.tpot for record in done),
        itl_ms=Stats.of(gap for record in done for gap in record.gaps),
        held_back_ms=Stats.of(held for record in done for held in record.held_back),
        e2e_ms=Stats.of(record.e2e for record in done),
        lag_ms=Stats.of(record.lag for record in records),
        goodput=_goodput(records, limits_ms, duration) if limits_ms else None,
    )


def keeps(record: ClientRecord, name: str, limit_ms: float) -> bool:
    """Whether a request succeeded and kept one limit. One token has no time between tokens, so it keeps any tpot."""
    if record.error is not None:
        return False
    seconds = {"ttft": record.ttft, "tpot": record.tpot, "e2e": record.e2e}[name]
    if seconds is None:
        return name == "tpot" and record.output_tokens == 1
    return seconds * 1e3 <= limit_ms


def parse_limits(texts: Sequence[str], flag: str = "--goodput") -> dict[str, float]:
    """Limits in ms from texts such as `ttft:500`. Raises `ConfigError` naming `flag`."""
    limits: dict[str, float] = {}
    for text in texts:
        name, _, value = text.partition(":")
        try:
            limit = float(value)
        except ValueError:
            limit = 0.0
        if name not in LIMITED or not 0 < limit < float("inf") or name in limits:
            allowed = " ".join(f"{known}:MS" for known in LIMITED)
            raise ConfigError(f"{flag}: {text!r}, allowed is each of {allowed} once, in ms above 0", flag)
        limits[name] = limit
    return limits


def _goodput(records: Sequence[ClientRecord], limits_ms: Mapping[str, float], duration: float) -> Goodput:
    kept = {name: [keeps(record, name, limit) for record in records] for name, limit in limits_ms.items()}
    met = sum(all(row) for row in zip(*kept.values(), strict=True))
    return Goodput(
        limits_ms=dict(limits_ms),
        met=met,
        requests_per_s=_rate(met, duration),
        attainment=met / len(records),
        attainment_by_limit={name: sum(row) / len(records) for name, row in kept.items()},
    )


def _rate(count: float, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0


def _offered(records: Sequence[ClientRecord]) -> float | None:
    starts = [record.start for record in records]
    span = max(starts) - min(starts)
    return (len(starts) - 1) / span if span > 0 else None


def _peak_in_flight(records: Sequence[ClientRecord]) -> int:
    # at one instant, endings sort before sendings
    changes = sorted([(record.sent, 1) for record in records] + [(record.end, -1) for record in records])
    return int(np.cumsum([change for _, change in changes]).max())
