"""What is to be measured for docs/scheduling.md can be, and is all that the page asks for."""

import json
from pathlib import Path

import pytest
import yaml

from penstock.cli.sim import make_tables
from penstock.sim.report import COLUMNS
from penstock.sim.scenario import parse
from tools.scheduling_claims import CLAIMS
from tools.scheduling_measure import COMPARISONS, ROOT, main, measurements
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


def figures(rates, rate):
    """A row like any other."""
    row = dict.fromkeys((*COLUMNS, "requests", "spread", "bound_rate", "missed_rate")) | {
        "attainment": 0.95,
        "mean_latency_s": 1.0,
        "instance_seconds": 100.0,
        "ttft_p95_ms": 500.0,
        "reused_tokens": 1000,
        "requests": 10,
    }
    if rates:
        return row | {"rates": [row | {"rate": rate} for rate in rates]}
    return row | {"max_rate_90": rate, "offline_tokens_per_s": rate}


def test_with_all_of_it_measured_nothing_on_the_page_is_missing(tmp_path):
    for one in measurements(tmp_path):
        document = {
            "scenario": f"scenarios/{one.of.scenario}.yaml",
            "target": 0.9,
            "vary": "offline" if one.of.scenario.startswith("colocation") else "online",
            "seeds": [0, 1, 2],
            "policies": {one.policy: figures(one.of.rates, 10.0)},
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


def test_what_there_is_can_be_listed(capsys):
    assert main(["--list", "hfx-single"]) == 0
    assert "hfx-single.search.hfx" in capsys.readouterr().out
