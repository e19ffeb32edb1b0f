"""What balance between groups gains, simulated: the figures of docs/experts.md, with fewer groups and steps."""

import numpy as np
import pytest

from penstock.sched.steptime import DEVICES, GEOMETRIES, StepTime
from penstock.sim.group_load import simulate_groups
from penstock.workload.lengths import Fixed, Independent, LogNormal

TIMES = StepTime(DEVICES["h200"].parallel(1, data=8, experts=True), GEOMETRIES["deepseek-v3"])
LONG = Independent(LogNormal(20_000, 1.5), LogNormal(3000, 1.0))


def simulated(lengths, **ways):
    size = {"groups": 8, "sequences": 16, "room": 3_000_000, "units": 132, "steps": 300}
    return simulate_groups(lengths, TIMES, np.random.default_rng(3), **size, **ways)


def test_each_layer_of_balance_makes_steps_shorter():
    in_turn = simulated(LONG, by_room=False, moves=False)
    by_room = simulated(LONG, by_room=True, moves=False)
    moving = simulated(LONG, by_room=True, moves=True)
    assert in_turn.apart > by_room.apart > 1.5 * moving.apart
    assert in_turn.wait_ms > by_room.wait_ms > 1.5 * moving.wait_ms
    assert by_room.step_ms > moving.step_ms
    for found in (in_turn, by_room, moving):
        assert found.in_turn > 5 * found.mean
        assert found.spread < 1.25 * found.mean
    assert in_turn.moved == by_room.moved == 0
    assert moving == simulated(LONG, by_room=True, moves=True)


@pytest.mark.parametrize("moves", [False, True])
def test_what_is_even_stays(moves):
    found = simulated(Independent(Fixed(4000), Fixed(1000)), by_room=True, moves=moves)
    assert found.moved == 0
    assert found.wait_ms < 0.05 * found.step_ms
