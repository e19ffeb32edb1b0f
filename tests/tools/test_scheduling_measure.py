"""What is to be measured for docs/scheduling.md can be, and is all that the page asks for."""

import json
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from penstock.cli.sim import make_tables
from penstock.sim import seeds
from penstock.sim.report import COLUMNS
from penstock.sim.scenario import parse
from tools.scheduling_claims import CLAIMS
from tools.scheduling_measure import COMPARISONS, ROOT, main, measure, measurements
from tools.scheduling_results import Results

TABLES = make_tables()


@pytest.mark.parametrize("of", COMPARISONS, ids=lambda of: f"{of.scenario}-{of.changed or len(of.policies)}")
def test_every_comparison_can_be_simulated(of):
    content = yaml.safe_load((ROOT / "scenarios" / f"{of.scenario}.yaml").read_text())
    of.change(content)
    scenario = parse("changed.yaml", yaml.safe_dump(content), TABLES)
    for variant in of.policies:
        _, groups = scenario.choose(variant)
        assert sum(group.count for group in groups) >= 2


def figures(of, rate, count=3):
    """A policy of a document with so many seeds, like any other."""
    row = dict.fromkeys((*COLUMNS, "requests", "bound_rate", "missed_rate")) | {
        "attainment": 0.95,
        "mean_latency_s": 1.0,
        "instance_seconds": 100.0,
        "ttft_p95_ms": 500.0,
        "reused_tokens": 1000,
        "requests": 10,
    }
    if of.rates:
        return row | {"rates": [seeds.at_rate(each, dict.fromkeys(range(count), row)) for each in of.rates]}
    row |= {"max_rate_90": rate, "offline_tokens_per_s": rate}
    return seeds.searched(dict.fromkeys(range(count), row), "max_rate_90")


def test_with_all_of_it_measured_nothing_on_the_page_is_missing(tmp_path):
    for one in measurements(tmp_path):
        document = {
            "scenario": f"scenarios/{one.of.scenario}.yaml",
            "target": 0.9,
            "vary": "offline" if one.of.scenario.startswith("colocation") else "online",
            "seeds": [0, 1, 2],
            "policies": {one.policy: figures(one.of, 10.0)},
        }
        one.target.write_text(json.dumps(document | ({"rates": list(one.of.rates)} if one.of.rates else {})))
    results = Results.read(tmp_path, ROOT / "scenarios")
    missing = [each.what for claim in CLAIMS for each in claim.comparisons if each.here(results) is None]
    assert not missing
    assert {measured.changed for measured in results.measured} == {of.changed for of in COMPARISONS}
    for claim in CLAIMS:
        assert all(results.search(scenario) is not None for scenario in claim.scenarios)


def test_files_are_told_apart_and_what_is_wanted_can_be_named():
    folder = Path("results")
    everything = list(measurements(folder))
    assert len({one.target for one in everything}) == len(everything)
    some = list(measurements(folder, ["hfx-4", "roles-azure-code"]))
    assert {one.of.scenario for one in some} == {"hfx-4task", "roles-azure-code"}


class Calls(list):
    """With whether each found a journal."""

    def __init__(self):
        self.on_journal = []


@pytest.fixture
def simulated(monkeypatch):
    """Calls of `penstock sim compare`, as (policy, seeds, whether it goes on with a result)."""
    calls = Calls()

    def compare(command, **_):
        given = dict(pair for pair in pairwise(command) if pair[0].startswith("--"))
        calls.append((given["--policies"], int(given["--seeds"]), "--resume" in given))
        calls.on_journal.append(Path(given["--journal"]).exists())
        Path(given["--journal"]).touch()
        if given["--policies"] == "hfx":
            return subprocess.CompletedProcess(command, 2, stderr="one\npenstock: no\n")
        seeds = list(range(int(given["--seeds"])))
        Path(given["--json"]).write_text(json.dumps({"scenario": command[5], "seeds": seeds}))
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", compare)
    return calls


def test_everything_gets_a_seed_before_anything_gets_the_next(simulated, tmp_path, capsys):
    every = list(measurements(tmp_path, ["hfx-priority.search"]))
    assert measure(every, 1, 1, None, tmp_path / "journals") == 1
    assert simulated == [("round_robin", 1, False), ("hfx", 1, False), ("unified", 1, False)]
    assert "hfx-priority.search.hfx: penstock: no" in capsys.readouterr().err
    journals = tmp_path / "journals"
    assert [path.name for path in journals.iterdir()] == ["hfx-priority.search.hfx.jsonl"]  # of what is not whole
    simulated.clear()
    every[0].target.unlink()
    assert measure(every, 3, 1, None, tmp_path / "journals") == 1  # what failed is tried once
    more = [(policy, count, True) for count in (2, 3) for policy in ("round_robin", "unified")]
    assert simulated == [("round_robin", 1, False), ("hfx", 1, False), *more]
    assert [one.seeds() for one in every] == [3, 0, 3]
    simulated.clear()
    assert simulated.on_journal == [False] * 3 + [False, True] + [False] * 4, "of hfx, which failed"
    simulated.on_journal.clear()
    assert measure(every, 3, 1, None, tmp_path / "journals", again=True) == 1
    assert len(simulated) == 7
    assert not any(simulated.on_journal), "decisions may have changed"


def test_no_result_tells_where_a_changed_scenario_was_for_the_time_being(simulated, tmp_path):
    (one,) = measurements(tmp_path, ["roles-azure-code.half-speed.rates.xllm"])
    assert measure([one], 1, 1, None, tmp_path / "journals") == 0
    assert json.loads(one.target.read_text())["scenario"] == "roles-azure-code.half-speed.yaml"


def test_what_there_is_can_be_listed(capsys):
    assert main(["--list", "hfx-single"]) == 0
    assert "hfx-single.search.hfx" in capsys.readouterr().out
