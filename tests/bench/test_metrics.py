from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.bench.metrics import ClientRecord, Stats, keeps, parse_limits, summarise
from penstock.core.errors import ConfigError


def of_events(events, start=0.0, end=None):
    return ClientRecord(number=0, start=start, sent=start, end=end or (events[-1][0] if events else 1.0), events=events)


def test_one_token_per_event():
    answer = of_events([(1.0, 1), (1.2, 1), (1.5, 1)], start=0.25, end=1.75)
    assert answer.output_tokens == 3
    assert answer.ttft == pytest.approx(0.75)
    assert answer.tpot == pytest.approx(0.25)
    assert answer.gaps == pytest.approx([0.2, 0.3])
    assert answer.e2e == pytest.approx(1.5)


def test_tokens_that_came_with_the_first_do_not_shorten_the_time_per_token():
    # 5 tokens, 3 of them at once at 1.0 s: the other 2 took 1 s
    assert of_events([(1.0, 3), (2.0, 2)]).tpot == pytest.approx(0.5)


def test_an_answer_in_one_event_is_bounded_by_its_whole_time():
    assert of_events([(3.0, 4)], start=1.0).tpot == pytest.approx(2.0 / 3)


def test_tokens_that_come_together_were_held_back_for_each_other():
    answer = of_events([(1.0, 4), (1.2, 1), (1.6, 2), (2.2, 3)])
    assert answer.held_back == pytest.approx([0.0, 0.2, 0.4])


def test_a_single_token_has_no_time_between_tokens():
    assert of_events([(1.0, 1)]).tpot is None
    assert of_events([]).tpot is None
    assert of_events([]).ttft is None


def test_latency_counts_from_due_not_from_sent():
    late = ClientRecord(number=0, start=1.0, sent=1.4, end=2.0, events=[(1.5, 1)])
    assert late.lag == pytest.approx(0.4)
    assert late.ttft == pytest.approx(0.5)
    assert late.e2e == pytest.approx(1.0)


def test_failure_detail_is_one_short_line():
    broken = of_events([])
    broken.fail("http 500", "a\nb " * 500)
    assert broken.error == "http 500"
    assert "\n" not in broken.detail
    assert len(broken.detail) <= 300


SECONDS = st.floats(0, 1e4, allow_nan=False)


def record(number=0, start=0.0, first=0.1, step=0.01, tokens=5, error=None, asked=None, prompt=10, sent=None):
    events = [(start + first + step * i, 1) for i in range(tokens)]
    answer = ClientRecord(
        number=number,
        start=start,
        sent=start if sent is None else sent,
        end=events[-1][0] if events else start + first,
        events=events,
        prompt_tokens=prompt,
        asked_tokens=tokens if asked is None else asked,
    )
    if error:
        answer.fail(error, "told to")
    return answer


@given(st.lists(SECONDS, min_size=1, max_size=60))
def test_stats_are_numpys(values):
    stats: Any = Stats.of([None, *values])
    ms = np.sort(values) * 1e3
    assert stats.count == len(values)
    assert stats.mean == pytest.approx(ms.mean())
    for share, got in ((0.5, stats.p50), (0.9, stats.p90), (0.99, stats.p99)):
        place = share * (len(ms) - 1)  # between which two, by hand
        low, high = ms[int(place)], ms[min(int(place) + 1, len(ms) - 1)]
        assert got == pytest.approx(low + (high - low) * (place - int(place)))
        assert got == pytest.approx(np.percentile(ms, 100 * share))


def test_stats_of_nothing():
    assert Stats.of([None]) is None


times = st.tuples(st.floats(0, 100), st.floats(0.001, 10), st.floats(0.001, 1), st.integers(1, 20))


@given(st.lists(times, min_size=1, max_size=30))
def test_summary_against_numpy(rows):
    records = [record(i, start, first, step, tokens) for i, (start, first, step, tokens) in enumerate(rows)]
    summary: Any = summarise(records)
    starts, firsts, steps, tokens = map(np.array, zip(*rows, strict=True))
    ends = starts + firsts + steps * (tokens - 1)
    duration = ends.max() - starts.min()
    assert summary.duration_s == pytest.approx(duration)
    assert summary.requests_per_s == pytest.approx(len(rows) / duration)
    assert summary.output_tokens_per_s == pytest.approx(tokens.sum() / duration)
    assert summary.total_tokens_per_s == pytest.approx((tokens.sum() + 10 * len(rows)) / duration)
    assert summary.ttft_ms.p90 == pytest.approx(np.percentile(firsts * 1e3, 90))
    assert summary.e2e_ms.p99 == pytest.approx(np.percentile((ends - starts) * 1e3, 99))
    several = tokens > 1
    if several.any():
        assert summary.tpot_ms.p50 == pytest.approx(np.percentile(steps[several] * 1e3, 50))
        assert summary.itl_ms.max == pytest.approx(steps[several].max() * 1e3)
        assert summary.held_back_ms.max == 0
        assert summary.itl_ms.count == (tokens - 1).sum()
        assert summary.itl_ms.mean == pytest.approx((steps * (tokens - 1)).sum() * 1e3 / (tokens - 1).sum())
    else:
        assert summary.tpot_ms is summary.itl_ms is None
    assert summary.peak_in_flight == max(((starts <= s) & (ends > s)).sum() for s in starts)


def test_failures_are_counted_by_kind_and_never_as_fast_or_as_throughput():
    good = [record(i, first=1.0) for i in range(2)]
    bad = [record(2, first=0.001, tokens=0, error="http 500"), record(3, first=0.002, error="connection")]
    hung = record(4, first=30.0, tokens=0, error="timeout")
    summary: Any = summarise([*good, *bad, hung], {"ttft": 2000.0})
    assert (summary.requests, summary.completed, summary.failed) == (5, 2, 3)
    assert summary.failures == {"http 500": 1, "connection": 1, "timeout": 1}
    assert summary.ttft_ms.count == 2
    assert summary.ttft_ms.p50 == pytest.approx(1000)
    assert summary.output_tokens == 10
    assert summary.duration_s == pytest.approx(30)  # the hung request took part in the run
    assert summary.requests_per_s == pytest.approx(2 / 30)
    assert summary.goodput.met == 2
    assert summary.goodput.attainment == pytest.approx(0.4)


def test_all_failed():
    summary: Any = summarise([record(error="timeout", tokens=0)], {"tpot": 1.0})
    assert summary.requests_per_s == summary.output_tokens_per_s == 0
    assert summary.ttft_ms is summary.e2e_ms is summary.tokens_per_event is None
    assert summary.goodput.attainment == 0


def test_goodput_needs_every_limit():
    records = [
        record(0, first=0.1, step=0.01),
        record(1, first=0.9, step=0.01),  # misses ttft
        record(2, first=0.1, step=0.09),  # misses tpot
        record(3, first=0.9, step=0.09),
    ]
    goodput: Any = summarise(records, {"ttft": 500.0, "tpot": 50.0}).goodput
    assert goodput.met == 1
    assert goodput.attainment == pytest.approx(0.25)
    assert goodput.attainment_by_limit == {"ttft": 0.5, "tpot": 0.5}
    assert goodput.requests_per_s == pytest.approx(1 / 1.26)


def test_keeping_a_limit():
    assert keeps(record(first=0.5), "ttft", 500.0)
    assert not keeps(record(first=0.5), "ttft", 499.0)
    assert keeps(record(tokens=1), "tpot", 0.001)
    assert not keeps(record(tokens=0), "tpot", 1e9)  # no answer keeps no promise
    assert not keeps(record(error="http 500"), "e2e", 1e9)


def test_what_else_is_counted():
    records = [record(0, start=0.0, asked=9, sent=0.05), record(1, start=0.5), record(2, start=1.0)]
    records[1].cached_tokens = 4
    summary: Any = summarise(records)
    assert summary.short_answers == 1
    assert summary.cached_tokens == 4
    assert summary.offered_per_s == pytest.approx(2.0)
    assert summary.lag_ms.p50 == 0
    assert summary.lag_ms.mean == pytest.approx(50 / 3)
    assert summary.tokens_per_event == 1.0
    assert summarise(records[:1]).offered_per_s is None


def test_limits_are_read():
    assert parse_limits(["ttft:500", "tpot:50.5", "e2e:1e4"]) == {"ttft": 500.0, "tpot": 50.5, "e2e": 10000.0}
    assert parse_limits([]) == {}


@pytest.mark.parametrize("text", ["ttft", "ttft:", "ttft:x", "ttft:0", "ttft:-1", "ttft:nan", "ttft:inf", "itl:5"])
def test_bad_limits_are_named(text):
    with pytest.raises(ConfigError, match=f"--goodput: '{text}', allowed is"):
        parse_limits([text])


def test_a_limit_given_twice_is_refused():
    with pytest.raises(ConfigError, match="ttft:6"):
        parse_limits(["ttft:5", "ttft:6"])
