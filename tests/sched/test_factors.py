"""What the factors learn from steps whose true factors are known."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.plan import SequenceStep, StepPlan
from penstock.core.sampling import SamplingParams
from penstock.sched.factors import BELIEVED, BOUNDS, NAMES, OVERHEAD_BOUNDS, WARM_UP, FactorLearner
from penstock.sched.local.steps import Measurements
from penstock.sched.steptime import DEVICES, GEOMETRIES, MARGIN, StepTime

DEVICE, SHAPE = DEVICES["h200"], GEOMETRIES["llama-3.1-8b"]
factors = st.dictionaries(st.sampled_from(NAMES), st.floats(0.7, 2.5))
seeds = st.integers(0, 2**32)


def any_step(rng):
    """Decodes alone, prompts alone, and both."""
    decodes = rng.randrange(1, 128)
    kv_tokens = decodes * rng.randrange(50, 4000)
    kind = rng.random()
    if kind < 0.5:
        return (), decodes, kv_tokens, decodes
    if kind < 0.6:
        return [(rng.randrange(64, 8192), rng.randrange(16_000))], 0, 0, rng.randrange(2)
    return [(rng.randrange(64, 2048), rng.randrange(8000))], decodes, kv_tokens, None


def decode_step(rng):
    """So few sequences that memory bounds them whatever the factors are."""
    decodes = rng.randrange(1, 16)
    return (), decodes, decodes * rng.randrange(50, 4000), None


def teach(learner, truth, rng, steps, kind=any_step, noise=0.1):
    for _ in range(steps):
        step = kind(rng)
        learner.observe(*step, truth.step_ms(*step) * rng.lognormvariate(-(noise**2) / 2, noise))


def mean_error(learner, truth):
    times, rng = StepTime(DEVICE, SHAPE, learner.factors), Random(7)
    steps = [any_step(rng) for _ in range(200)]
    return sum(abs(times.step_ms(*s) / truth.step_ms(*s) - 1) for s in steps) / len(steps)


@settings(max_examples=20)
@given(factors, seeds)
def test_true_factors_are_found_in_noisy_steps(factors, seed):
    truth, learner = StepTime(DEVICE, SHAPE, factors), FactorLearner(DEVICE, SHAPE)
    teach(learner, truth, Random(seed), 800)
    assert mean_error(learner, truth) < 0.05  # with noise of 10 %
    # what is most of some steps, and so is found by itself
    for name in ("gemm:compute", "decode_attention:memory"):
        assert learner.factors[name] == pytest.approx(factors.get(name, 1.0), rel=0.2)
    assert abs(learner.gap.mean) < 0.05
    assert 0.1 < learner.gap.p90 < 0.25


@pytest.mark.parametrize(("noise", "margin"), [(0.02, MARGIN), (0.25, 1 / 1.5)])
def test_the_less_steps_are_as_predicted_the_more_room_they_get(noise, margin):
    learner = FactorLearner(DEVICE, SHAPE)
    teach(learner, StepTime(DEVICE, SHAPE, {"gemm": 2.0}), Random(1), 1000, noise=noise)
    assert learner.spread == pytest.approx(noise, rel=0.4)
    assert StepTime(DEVICE, SHAPE, learner.factors, learner.spread).margin == pytest.approx(margin, rel=0.15)


@settings(max_examples=15)
@given(st.sampled_from([0.7, 1.3]), st.sampled_from([0, 2000]), seeds)
def test_an_error_of_30_percent_is_corrected_within_some_hundred_steps(factor, before, seed):
    """Also after a long time in which all was well."""
    rng, learner = Random(seed), FactorLearner(DEVICE, SHAPE)
    teach(learner, StepTime(DEVICE, SHAPE), rng, before, noise=0.05)
    truth = StepTime(DEVICE.slowed(factor), SHAPE)
    assert mean_error(learner, truth) > 0.2
    teach(learner, truth, rng, 300, noise=0.05)
    assert mean_error(learner, truth) < 0.06


@settings(max_examples=25)
@given(st.lists(st.floats(1e-6, 1e9), min_size=1, max_size=100), seeds)
def test_factors_stay_within_bounds(measured, seed):
    rng, learner = Random(seed), FactorLearner(DEVICE, SHAPE)
    for _ in range(WARM_UP + 2):
        for ms in measured:
            learner.observe(*any_step(rng), ms)
    for name, value in learner.factors.items():
        low, high = OVERHEAD_BOUNDS if name == "overhead" else BOUNDS
        assert low <= value <= high


@settings(max_examples=15)
@given(factors, st.floats(0.7, 1.5), seeds)
def test_factors_that_nothing_depends_on_do_not_drift(factors, slower, seed):
    rng, learner = Random(seed), FactorLearner(DEVICE, SHAPE)
    teach(learner, StepTime(DEVICE, SHAPE, factors), rng, 300)
    before = learner.factors
    # for long there are only decodes, and the device changes
    teach(learner, StepTime(DEVICE.slowed(slower), SHAPE), rng, 2000, decode_step)
    after = learner.factors
    for name in ("gemm:compute", "prefill_attention:compute"):
        assert after[name] == before[name]
    assert after["gemm:memory"] != before["gemm:memory"]


def test_the_prediction_that_is_held_against_a_step_is_that_of_step_time():
    rng, learner = Random(1), FactorLearner(DEVICE, SHAPE)
    teach(learner, StepTime(DEVICE.slowed(1.4), SHAPE), rng, 500)
    times, other = StepTime(DEVICE, SHAPE, learner.factors), FactorLearner(DEVICE, SHAPE)
    other._values, other._warming = learner._values, 0
    step = any_step(rng)
    other.observe(*step, times.step_ms(*step))
    assert other.gap.mean == pytest.approx(0, abs=1e-12)


def test_nothing_is_learned_while_warming_up_or_from_no_time_at_all():
    learner, step = FactorLearner(DEVICE, SHAPE), ((), 8, 40_000, None)
    for _ in range(WARM_UP):
        learner.observe(*step, 500.0)
    for measured in (0.0, -1.0, float("nan"), float("inf")):
        learner.observe(*step, measured)
    assert learner.factors == {}
    assert learner.gap.steps == 0
    learner.observe(*step, 6.0)
    assert learner.gap.steps == 1
    learned = learner.factors
    assert learned.keys() >= {"gemm:memory", "overhead"}
    learner.changed()
    for _ in range(WARM_UP):
        learner.observe(*step, 500.0)
    assert learner.factors == learned


def test_an_accident_moves_nothing_and_a_change_does():
    rng, learner = Random(5), FactorLearner(DEVICE, SHAPE)
    teach(learner, StepTime(DEVICE, SHAPE), rng, 300)
    step = decode_step(rng)
    usual = StepTime(DEVICE, SHAPE).step_ms(*step)
    learned = learner.factors
    for _ in range(BELIEVED):
        learner.observe(*step, 20 * usual)
        assert learner.factors == learned
    assert learner.gap.mean > 0.3  # but nothing is hidden
    learner.observe(*step, 20 * usual)
    assert learner.factors != learned


@pytest.mark.parametrize("share", [1.0, 0.5, 0.3])
def test_speed_is_the_share_of_the_time_in_which_it_runs(share):
    """An engine that is stopped for the rest of each 200 ms, whichever steps meet that."""
    measurements, step = Measurements(), SequenceStep("r", 0, [0], tuple(range(20)), 1200, SamplingParams(), 0)
    measurements.learn(DEVICE, SHAPE)
    plan = StepPlan((step,) * 8, ())
    ms = StepTime(DEVICE, SHAPE).step_ms(*plan.work)
    assert measurements.speed is None

    def end_of(begin):
        """Of a step that begins then; it runs in the first part of each cycle."""
        left, at = ms, begin
        while (runs := max(0.0, 200 * share - at % 200)) < left:
            left, at = left - runs, at - at % 200 + 200
        return at + left

    now = 0.0
    for _ in range(2000):
        end = end_of(now)
        measurements.ran(plan, now / 1e3, [end / 1e3])
        now = end
    assert measurements.speed == pytest.approx(share, rel=0.2)
    measurements.learner.changed()
    before = measurements.speed
    measurements.learner.pace(*plan.work, 1e6)
    assert measurements.speed == before, "something is compiled"


def test_collectives_are_learned_where_there_are_some():
    four = DEVICES["l40s"].parallel(4)
    learner = FactorLearner(four, SHAPE)
    teach(learner, StepTime(four, SHAPE, {"collectives": 2.0}), Random(2), 1500)
    assert learner.factors["collectives"] == pytest.approx(2.0, rel=0.25)
