"""What is measured of what came and went."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.wire.master import Outcome
from penstock.sched.cluster import Tally
from penstock.service.flight import Flight
from penstock.service.queue import TALLIES, WINDOW, FrontendQueue, RateMeter, RateWindow
from tests.helpers.engines import make_request
from tests.helpers.policies import demand


def test_a_pace_is_measured_while_there_is_something_to_do():
    pace = RateMeter()
    assert pace.rate(5) == 0
    pace.begin(100)
    for second in range(1, 5):
        pace.count(100 + second, 30)
    pace.begin(103)  # it had begun
    assert pace.rate(104) == pytest.approx(30)
    pace.rest(104)
    assert pace.rate(5000) == pytest.approx(30), "nothing to do is not slow"
    pace.begin(5000)
    pace.count(5000.1, 1)
    assert pace.rate(5000.2) == pytest.approx(30), "too early to know better"
    for tenth in range(1, 300):
        pace.count(5000 + tenth / 10, 1)
    assert pace.rate(5030) == pytest.approx(10, rel=0.02)
    assert len(pace._done) <= 10 * WINDOW + 1


def test_what_came_and_ended_before_the_window_counts_no_longer():
    window = RateWindow()
    for now, tokens, tpot_ms in ((0.0, 1000, 50.0), (5.0, 200, 150.0)):
        asked = demand(f"r{now}", tokens, ttft=1.0, tpot=0.1)
        window.arrive(now, asked)
        window.end(now, asked, Outcome(f"r{now}", 500.0, tpot_ms, 0.0, tokens // 10))
    both, late, none = (window.rates(now) for now in (6.0, 6.0 + WINDOW - 3.0, 6.0 + WINDOW))
    assert (both.arrivals, both.completions, both.attained) == (2, 2, 1)
    assert (both.prompt_tokens, both.output_tokens) == (600, 60)
    assert (late.arrivals, late.completions, late.attained) == (1, 1, 0)
    assert (late.prompt_tokens, late.output_tokens) == (200, 20)
    assert (none.arrivals, none.completions, none.prompt_tokens, none.output_tokens) == (0, 0, 0, 0)


def test_tallies_are_of_tenths_of_a_second_and_are_given_once():
    window, done = RateWindow(), Outcome("r", 500.0, 50.0, 0.0, 7)
    for now in (1.0, 1.05, 1.09, 1.2, 9.0):
        window.arrive(now, demand(f"r{now}", 100, ttft=1.0, tpot=0.1))
    window.end(9.05, demand("r", 100, ttft=1.0, tpot=0.1), done)
    window.end(9.06, demand("r", 100, ttft=0.1, tpot=0.1), done)
    assert window.take() == [Tally(1.0, 3, 300), Tally(1.2, 1, 100), Tally(9.0, 1, 100, 2, 1)]
    assert window.take() == []
    for now in range(10_000):
        window.arrive(float(now), demand("r", 100))
    assert len(window.take()) == TALLIES, "nobody has to take them"


@given(st.lists(st.tuples(st.integers(1, 9), st.booleans(), st.sampled_from(["wait", "answer", "end", "drop"]))))
def test_a_frontends_queue_has_what_is_held_and_what_waits_for_its_first_token(sent):
    queue, flights, begun = FrontendQueue(), [], 0
    for second, (tokens, offline, becomes) in enumerate(sent):
        flight = Flight(None, replace(make_request(f"r{second}", [1] * tokens), offline=offline))
        queue.add(flight, second)
        flights.append(flight)
        if becomes in ("answer", "end"):
            flight.first = second + 0.5
            queue.leave(flight, second + 0.5)
            queue.leave(flight, second + 0.6)  # it has left
        if becomes in ("end", "drop"):
            flights.remove(flight)
            queue.end(flight, second + 0.7, whole=becomes == "end")
        queue.check(flights)
        begun += offline and becomes != "wait"
        assert queue.offline.begun == begun
    assert (queue.prefill_rate.rate(len(sent)) > 0) == any(becomes in ("answer", "end") for *_, becomes in sent)
    assert (queue.completion_rate.rate(len(sent)) > 0) == any(becomes == "end" for *_, becomes in sent)
