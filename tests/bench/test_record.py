import pytest

from penstock.bench.record import RequestRecord


def record(events, start=0.0, end=None):
    return RequestRecord(
        number=0, start=start, sent=start, end=end or (events[-1][0] if events else 1.0), events=events
    )


def test_one_token_per_event():
    answer = record([(1.0, 1), (1.2, 1), (1.5, 1)], start=0.25, end=1.75)
    assert answer.output_tokens == 3
    assert answer.ttft == pytest.approx(0.75)
    assert answer.tpot == pytest.approx(0.25)
    assert answer.gaps == pytest.approx([0.2, 0.3])
    assert answer.e2e == pytest.approx(1.5)


def test_tokens_that_came_with_the_first_do_not_shorten_the_time_per_token():
    # 5 tokens, 3 of them at once at 1.0 s: the other 2 took 1 s
    assert record([(1.0, 3), (2.0, 2)]).tpot == pytest.approx(0.5)


def test_an_answer_in_one_event_is_bounded_by_its_whole_time():
    assert record([(3.0, 4)], start=1.0).tpot == pytest.approx(2.0 / 3)


def test_tokens_that_come_together_were_held_back_for_each_other():
    answer = record([(1.0, 4), (1.2, 1), (1.6, 2), (2.2, 3)])
    assert answer.held_back == pytest.approx([0.0, 0.2, 0.4])


def test_a_single_token_has_no_time_between_tokens():
    assert record([(1.0, 1)]).tpot is None
    assert record([]).tpot is None
    assert record([]).ttft is None


def test_latency_counts_from_due_not_from_sent():
    late = RequestRecord(number=0, start=1.0, sent=1.4, end=2.0, events=[(1.5, 1)])
    assert late.lag == pytest.approx(0.4)
    assert late.ttft == pytest.approx(0.5)
    assert late.e2e == pytest.approx(1.0)


def test_failure_detail_is_one_short_line():
    broken = record([])
    broken.fail("http 500", "a\nb " * 500)
    assert broken.error == "http 500"
    assert "\n" not in broken.detail
    assert len(broken.detail) <= 300
