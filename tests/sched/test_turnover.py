"""What prefilling costs those who look for something in a cache (`unified`)."""

import pytest

from penstock.sched.cluster import ClusterView
from penstock.sched.cluster.turnover import FAR, HORIZON, WEIGHT, Turnover
from penstock.sched.cluster.unified import Unified
from tests.helpers.policies import demand, instance


def test_it_costs_nothing_where_nothing_is_found():
    turnover = Turnover()
    for number in range(10):
        turnover.note(float(number), "a", 1000, 1000)
    assert turnover.cost("a", 2) == 0.0


def test_it_costs_more_where_more_was_prefilled():
    turnover = Turnover()
    for _ in range(3):
        turnover.note(0.0, "a", 1000, 750)
    turnover.note(0.0, "b", 1000, 750)
    a, b = turnover.cost("a", 2), turnover.cost("b", 2)
    assert a == pytest.approx(3 * b)
    assert (a + b) / 2 == pytest.approx(WEIGHT * 0.25)
    assert turnover.cost("new", 3) == 0.0


@pytest.mark.parametrize("later", [HORIZON, 3 * HORIZON, 2 * FAR * HORIZON, 1e9])
def test_what_was_prefilled_long_ago_counts_less(later):
    turnover = Turnover()
    turnover.note(5.0, "a", 1000, 500)
    turnover.note(5.0 + later, "b", 1000, 500)
    assert turnover.cost("a", 2) < turnover.cost("b", 2) / 2
    assert turnover.cost("a", 2) + turnover.cost("b", 2) == pytest.approx(WEIGHT)


def test_no_instance_is_spared_new_prompts():
    """Although one of them is the first of equals each time."""
    policy, names = Unified(), ["a", "b", "c"]
    loads = [instance(name) for name in names]
    prefill = dict.fromkeys(names, 0)
    for number in range(60):
        found = {"a": 9_984} if number % 2 else {}
        wanted = demand(f"{number}", prompt_tokens=10_000, arrived=1.0 + number, ttft=10.0, hits=found)
        view = ClusterView(now=1.0 + number, instances=[*loads], queue=(wanted,))
        decision = policy.decide(view, None)
        if not found:
            prefill[decision.prefill] += 1
        else:
            assert decision.prefill == "a"
    assert min(prefill.values()) > 5, prefill
