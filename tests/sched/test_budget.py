from hypothesis import given
from hypothesis import strategies as st

from penstock.sched.local.limits import GRAIN, StepBudget


@given(st.integers(1, 300), st.integers(300, 8192), st.floats(1e-6, 1e-2), st.floats(0, 0.05))
def test_it_comes_close_to_the_limit_and_stays_there(low, high, per_token, overhead):
    budget = StepBudget(low, high, 0.1)
    sizes = []
    for _ in range(40):
        budget.ran(budget.tokens, overhead + per_token * budget.tokens)
        sizes.append(budget.tokens)
    fitting = (0.1 - overhead) / per_token
    assert low <= min(sizes)
    assert max(sizes) <= high
    assert sizes[-1] == sizes[-2]
    assert sizes[-1] <= max(low, GRAIN, fitting)
    assert sizes[-1] >= min(high, max(low, 0.75 * min(fitting, 0.1 / per_token) - 2 * GRAIN - overhead / per_token))


def test_steps_that_are_smaller_than_allowed_tell_nothing():
    budget = StepBudget(64, 1024, 0.1)
    assert not budget.ran(63, 0.001)
    assert budget.tokens == 64
    assert budget.ran(64, 0.001)
    assert budget.tokens == 128


def test_one_slow_step_is_noise_and_two_are_not():
    budget = StepBudget(64, 1024, 0.1)
    while budget.tokens < 1024:
        budget.ran(budget.tokens, 0.01)
    assert not budget.ran(1024, 5.0)
    assert not budget.ran(1024, 0.1)
    assert not budget.ran(1024, 5.0)
    assert budget.ran(1024, 0.2)
    assert budget.tokens == 512
    for _ in range(20):
        budget.ran(budget.tokens, 5.0)
    assert budget.tokens == 64
