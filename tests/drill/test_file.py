"""Drill files, and the verdict on what came of one."""

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from penstock.cli import drill_file, up
from penstock.cli.drill_file import read_drill
from penstock.core.errors import ConfigError
from penstock.drill.hosts import Hosts
from penstock.drill.outcome import Outcome, Struck
from penstock.drill.report import broken
from penstock.drill.run import Place, Result, _placed

RECIPES = Path(__file__).parents[2] / "recipes"
SMALL = """duration: 30
deployment:
  model: demo
  instances: [{count: 2}]
faults:
  - {kind: kill, every: 10, targets: engines}
"""


def drill(tmp_path, text=SMALL, **overrides):
    path = tmp_path / "small.yaml"
    path.write_text(text)
    return read_drill(str(path), overrides)


@pytest.fixture(autouse=True)
def _any_machine(monkeypatch):
    monkeypatch.setattr(drill_file, "why_not", lambda cables: "")


@pytest.mark.parametrize("recipe", ["drill-demo", "drill-paced"])
def test_these_recipes_strike_every_twenty_seconds(recipe):
    made = read_drill(str(RECIPES / f"{recipe}.yaml"))
    assert len(made.strikes) == 30
    assert {strike.target for strike in made.strikes} <= made.expected.instances
    assert (made.disks, made.secret) == (False, None)


def test_hosts_have_cables_links_and_disks(monkeypatch):
    path = str(RECIPES / "drill-hosts.yaml")
    made = read_drill(path)
    assert {strike.kind for strike in made.strikes} == {"partition", "disk-full", "unmount", "kill"}
    first, second, _ = made.deployments
    assert second == {key: value for key, value in first.items() if key != "flight-recorder"} | second
    assert made.safety.breaks["host-2"] == made.safety.breaks["host-0/host-2"] == {"second-0", "second-1"}
    assert made.safety.breaks["host-1/host-2"] == frozenset()
    assert made.meets["host-1/host-2"] == {"first-0", "first-1", "second-0", "second-1"}
    assert made.safety.breaks["kv-pool@host-1"] == {"first-0", "first-1"}
    assert made.disks
    assert made.secret
    monkeypatch.setattr(drill_file, "why_not", lambda cables: f"{cables}, you are nobody")
    with pytest.raises(
        ConfigError, match=r"hosts: .*, allowed is where root may make namespaces: True, you are nobody"
    ):
        read_drill(path)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("kind: kill", "kind: partition", "faults[0].kind: 'partition', allowed is partition where hosts are listed"),
        (
            "kind: kill",
            "kind: [kill, disk]",
            "faults[0].kind: a list, allowed is one or several of kill, freeze, slow, partition, disk-full, unmount, "
            "not 'disk'",
        ),
        ("kind: kill", "kind: [kill, disk-full]", "'engines', allowed are none, as no target suits all of these kinds"),
        (
            "kind: kill, every: 10, targets: engines",
            "kind: unmount, every: 10, targets: disk",
            "'disk', allowed are engine",
        ),
        (
            "faults:",
            "hosts: [instances: [{count: 1}]]\nfaults:",
            "hosts: instances: 'engine' of host-1, allowed is no name that another host has",
        ),
        ("faults:", "hosts: [instances: [{count: 0}]]\nfaults:", "5: hosts[0]: instances[0].count: '0', allowed is"),
        ("faults:", "hosts: [{}]\nfaults:", "hosts[0]: instances is missing"),
        ("kind: kill, ", "", "faults[0]: kind is missing"),
        (
            "targets: engines",
            "targets: [engine-0, engine-7]",
            "'engine-7', allowed are engine, engine-0, engine-1, engines, ",
        ),
        ("{count: 2}", "{count: 1}", "allowed is what leaves 1 of each group (safety.healthy)"),
        ("every: 10", "every: 0", "faults[0].every: '0', allowed is"),
        ("duration: 30", "duration: 5", "no fault fits into it"),
        ("  model: demo", "  model: demo\n  launcher: ray", "a drill only signals what it has started"),
        ("  model: demo", "  model: demo\n  ssl-certfile: tls.crt", "a drill's clients speak HTTP"),
    ],
)
def test_mistakes_are_told_with_their_place(old, new, message, tmp_path):
    assert old in SMALL
    with pytest.raises(ConfigError) as caught:
        drill(tmp_path, SMALL.replace(old, new))
    assert message in str(caught.value)
    assert str(caught.value).startswith(f"{tmp_path}/small.yaml:")


def test_settings_of_its_own_go_before_those_that_are_spelled_otherwise(tmp_path):
    made = drill(tmp_path, SMALL.replace("  model: demo", "  model: demo\n  log_format: text\n  flight_recorder: mine"))
    place = Place(folder=tmp_path, temporary=tmp_path, environment={})
    settings = _placed(made.deployments[0], 0, Hosts(1), made, place)
    deployment = up.read("a.yaml", yaml.safe_dump(settings))
    assert deployment.server["log_format"] == "json"
    assert deployment.flight_recorder == str(tmp_path / "recorder")


def result(strikes, met):
    struck = [Struck(strike, strike.at, strike.at, strike.at + 1) for strike in strikes]
    return Result(
        began=0.0, rate=1.0, capacity=None, right=[], records=[], struck=struck,
        outcome=Outcome(streams=4, completed=4, identical=4, met=met),
        states={}, memory={}, leaks=[], wrong=[], raised=[],
    )  # fmt: skip


def test_faults_that_met_nothing_prove_nothing(tmp_path):
    made = drill(tmp_path)
    strikes = made.strikes
    assert broken(made, result(strikes, [1] + [0] * (len(strikes) - 1))) == []
    assert "no fault met a stream" in broken(made, result(strikes, [0] * len(strikes)))[0]


def test_each_broken_promise_has_its_line(tmp_path):
    made = drill(tmp_path)
    bad = result(made.strikes, [1] * len(made.strikes))
    bad.outcome = replace(bad.outcome, completed=3, identical=2, unlike=1)
    bad.struck[0].back = None
    bad.leaks, bad.wrong = ["engine-0: 3 used"], ["engine-1 serves no more"]
    said = "\n".join(broken(made, bad))
    for what in ("1 of 4 streams did not", "1 streams have other", "leak: engine-0", "did not come back", "engine-1"):
        assert what in said
