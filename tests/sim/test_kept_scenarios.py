"""Every scenario that is kept, simulated for a few seconds on a stand-in for its trace."""

from dataclasses import replace

import pytest

from penstock.cli.scenario_file import make_tables
from penstock.sim.scenario import parse
from tests.sim.scenarios import SCENARIOS, run
from tests.sim.stand_in import stand_in


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_a_few_seconds_of_every_scenario(path):
    scenario = parse(path.name, path.read_text(), make_tables())
    tasks = tuple(replace(task, start=task.start / 100) for task in scenario.workload.tasks)
    short = replace(scenario, workload=replace(scenario.workload, duration=3.0, rate_scale=1.0, tasks=tasks))
    scale = 8.0 if tasks and sum(task.rate for task in tasks) <= 1 else 1.0
    result, cluster = run(short, scenario.policy, scale=scale, trace=stand_in(scenario.workload))
    assert result["requests"] == sum(not record.offline for record in cluster.records) > 0
    assert result["failed"] == 0
    assert sum(result["series"]["arrivals"]) == result["requests"]
    assert sum(result["series"]["attained"]) == round(result["attainment"] * result["requests"])
    assert set(result["tasks"]) == {task.name for task in tasks}
    assert (result["offline_tokens_per_s"] is not None) == any(record.offline for record in cluster.records)
