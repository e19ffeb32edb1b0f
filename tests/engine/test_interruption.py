"""Steps of offline sequences that end early for an online one: when, what is left, and that all tokens are the same."""

import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest

from penstock.core.plan import StepPlan
from penstock.engine.executor.inline import InlineExecutor
from penstock.sched.local.limits import SOON
from tests.helpers.engines import Collector, make_engine, make_request

PROMPT = [i % 290 + 1 for i in range(400)]
NATO = make_request("online", [5, 6, 7], max_tokens=4)


def offline(name, prompt, **params):
    return replace(make_request(name, prompt, **params), offline=True)


class Held:
    """A worker whose model computes on once it may; and which of its steps were ended early."""

    def __init__(self, executor):
        self.go, self.begun, self.interrupted = threading.Event(), threading.Event(), []
        self._run, self._forward = executor.worker.run, executor.worker.forward
        executor.worker.run, executor.worker.forward = self.run, self.forward

    def run(self, plan, stop=None):
        result = self._run(plan, stop)
        self.interrupted.append(result.interrupted)
        return result

    def forward(self, *step):
        self.begun.set()
        assert self.go.wait(20)
        return self._forward(*step)


def finish(collector):
    engine = collector.engine
    collector.run()
    engine.check()
    assert engine.scheduler.pool.used == 0
    return collector.tokens


def alone(model, *requests, **settings):
    return Collector(make_engine(model, budget=256, **settings)).run(*requests)


@pytest.mark.parametrize("mode", ["full", "partial", "eager"])
@pytest.mark.parametrize("address_mode", ["table", "contiguous"])
def test_an_online_request_ends_what_is_in_flight_for_offline_ones(model, mode, address_mode):
    settings = {"graph_mode": mode, "address_mode": address_mode}
    requests = [
        offline("reads", PROMPT),
        offline("decodes", [9, 8, 7], temperature=1.0),
        offline("shaped", [1, 2], max_tokens=6, logprobs=1, repetition_penalty=1.3),
    ]
    collector = Collector(engine := make_engine(model, budget=256, **settings))
    held = Held(engine.executor)
    for request in requests:
        engine.add(request)
    plans = [engine.begin(), engine.begin()]
    assert all(plans)
    assert engine.begin() is None
    assert held.begun.wait(20)
    engine.add(NATO)
    assert engine.begin() is None, "it waits for what was stopped"
    held.go.set()
    while engine.tokens_in_flight:
        step = engine.end(wait=True)
        assert (step.outputs, step.tokens) == ([], 0)
        engine.scheduler.check()
    assert held.interrupted == [True, True]
    assert engine.scheduler.counters.interruptions == 2
    assert "online" in [s.request_id for s in engine.begin().sequences]
    assert finish(collector) == alone(model, *requests, NATO, **settings)


def test_what_an_online_request_is_in_is_not_interrupted(model):
    engine = make_engine(model, budget=256)
    held = Held(engine.executor)
    engine.add(NATO)
    engine.add(offline("reads", PROMPT))
    engine.begin()
    engine.add(make_request("another", [3, 2, 1], max_tokens=2))
    engine.begin()
    held.go.set()
    finish(Collector(engine))
    assert not any(held.interrupted)


class StandingClock:
    def __init__(self, time):
        self.time = time

    def now(self):
        return self.time


def predicted(model, ms):
    """An engine all of whose steps are said to take so long, by a clock that stands."""
    engine = make_engine(model, budget=256)
    engine.scheduler.measurements._times = SimpleNamespace(
        step_ms=lambda *work: ms, factors=engine.scheduler.measurements.factors
    )
    engine._clock = StandingClock(engine._clock.now())
    held = Held(engine.executor)
    engine.add(offline("reads", PROMPT))
    assert engine.begin()
    assert held.begun.wait(20)
    return engine, held


@pytest.mark.parametrize("overdue", [False, True])
def test_what_ends_soon_by_itself_is_left_alone(model, overdue):
    """With nothing behind it: what should have ended and has not is ended early after all."""
    engine, held = predicted(model, 1e3 * SOON / 2)
    engine.add(NATO)
    assert engine.begin() is None
    assert engine.look_again_at == pytest.approx(engine._clock.time + SOON)
    if overdue:
        engine._clock.time += 1.01 * SOON
        assert engine.begin() is None
    held.go.set()
    engine.settle()
    assert held.interrupted == [overdue]


@pytest.mark.parametrize("overdue", [False, True])
def test_what_is_behind_a_step_that_ends_soon_is_not_begun(model, overdue):
    """And what should have ended and has not is ended early after all."""
    engine, held = predicted(model, 2e3 * SOON)
    engine._clock.time += 2 * SOON - SOON / 4
    assert engine.begin()
    engine.add(NATO)
    assert engine.begin() is None
    assert engine.look_again_at == pytest.approx(engine._clock.time + SOON)
    if overdue:
        engine._clock.time += 1.01 * SOON
        assert engine.begin() is None
    held.go.set()
    engine.settle()
    assert held.interrupted == [overdue, True]


def test_a_step_in_turn_is_computed_to_its_end(model):
    engine = make_engine(model, ahead=False, budget=256)
    engine.add(offline("reads", PROMPT))
    assert isinstance(engine.executor, InlineExecutor)
    plan = engine.begin()
    assert isinstance(plan, StepPlan)
    engine.add(NATO)
    assert engine.begin() is None
    assert engine.end(wait=True).tokens == plan.num_tokens
