"""What rebalancing gains, simulated: the figures of docs/experts.md, with fewer layers."""

import numpy as np
import pytest

from penstock.sched.parallel.rebalancing import ExpertRanks
from penstock.sched.steptime import DEVICES, GEOMETRIES, StepTime
from penstock.sim.expert_load import simulate_experts, zipf

RANKS = ExpertRanks(experts=256, layers=3, ranks=64, slots=5)
TIMES = StepTime(DEVICES["h200"].parallel(1, data=64, experts=True), GEOMETRIES["deepseek-v3"])


def simulated(skew, drift=0.0, intervals=2):
    rng = np.random.default_rng(5)
    work = {"intervals": intervals, "tokens": 200_000, "work": (128, 512_000), "drift": drift}
    return simulate_experts(RANKS, zipf(3, 256, skew, rng), TIMES, rng, **work)


@pytest.mark.parametrize("skew", [0.3, 1.0])
def test_after_one_rebalance_the_busiest_rank_is_within_a_tenth_of_the_mean(skew):
    before, after = simulated(skew)
    assert before.moved == before.fixed > 1.4
    assert before.switches == 3
    assert 1 < after.moved <= after.worst < 1.1
    assert after.switches == 0, "what is even stays"
    assert after.even_ms < after.moved_ms < 1.02 * after.even_ms
    assert after.moved_ms < 0.95 * after.fixed_ms


def test_placements_follow_popularity_that_changes():
    rows = simulated(1.0, drift=0.1, intervals=6)
    assert all(row.switches for row in rows[:-1])
    assert np.mean([row.moved for row in rows[1:]]) < 0.5 * np.mean([row.fixed for row in rows[1:]])
