"""`penstock plan`, with a trace of its own."""

import json

import pytest

from penstock.cli.deployment import TABLES
from penstock.cli.main import main
from penstock.service.deployment_file import parse


@pytest.fixture
def trace(tmp_path):
    rows = [f"{i * 0.05:.2f},{200 + 37 * i % 900},{1 + i % 60}" for i in range(400)]
    file = tmp_path / "small.csv"
    file.write_text("\n".join(["arrival_s,input_tokens,output_tokens", *rows]))
    return file


def flags(file, **more):
    given = {"trace": file, "geometry": "llama-3.1-8b", "devices": "l4:12", "ttft-ms": 600, "tpot-ms": 80}
    given |= {"rate": 10, "duration": 10, "tries": 6, "jobs": 1, "max-model-len": 4096} | more
    return ["plan", *(f"--{name}={value}" for name, value in given.items() if value is not None)]


def test_the_cheapest_deployment_is_found_shown_and_can_be_run(trace, tmp_path, capsys):
    out, file = tmp_path / "out.json", tmp_path / "deployment.yaml"
    assert main([*flags(trace), f"--json={out}", f"--write={file}"]) == 0
    found = json.loads(out.read_text())
    assert found["rate"] == pytest.approx(10.0)
    by_title = {row["candidate"]: row for row in found["candidates"]}
    winner = by_title[found["winner"]]
    assert winner["kept"]
    assert winner["attainment"] >= 0.9
    assert winner["attainment"] <= winner["bound"] + 1e-9
    assert winner["cost_per_hour"] == pytest.approx(0.5 * winner["devices"]["l4"])
    assert all(not row["kept"] for row in by_title.values() if row["cost_per_hour"] < winner["cost_per_hour"])
    simulated = [row for row in by_title.values() if row["simulated"]]
    assert 1 <= len(simulated) <= 6
    for row in simulated:
        assert row["ttft_p50_ms"] <= row["ttft_p90_ms"]
    shown = " ".join(capsys.readouterr().out.split())
    assert f"Cheapest: {found['winner']}" in shown

    deployment = parse(str(file), file.read_text(), TABLES)
    assert sum(group.count for group in deployment.groups) == sum(part["count"] for part in winner["instances"])
    assert {group.device for group in deployment.groups} == {"modelled:l4"}
    assert deployment.policy == winner["policy"]


def test_prices_decide(trace, tmp_path):
    def winner(*more):
        out = tmp_path / "out.json"
        assert main([*flags(trace, devices="h200:1,l4:12", tries=4), f"--json={out}", *more]) == 0
        found = json.loads(out.read_text())
        return next(row for row in found["candidates"] if row["candidate"] == found["winner"])

    assert winner("--price=h200=0.1")["devices"] == {"h200": 1}
    assert "h200" not in winner("--price=h200=1000")["devices"]


def test_a_scenario_brings_its_workload_and_targets(trace, tmp_path):
    scenario, out = tmp_path / "scenario.yaml", tmp_path / "out.json"
    scenario.write_text(
        "workload: {synthetic: {requests: 200, rate: 20, prompt: 400, output: 20}}\n"
        "slo: {ttft-ms: 500, tpot-ms: 50}\n"
        "engine: {device: modelled:l4, kv-blocks: 100, max-model-len: 4096, host-cache-memory: 2G}\n"
        "instances: [{count: 2}]\nfailures: [{instance: engine-1, at: 1}]\n"
    )
    file = tmp_path / "deployment.yaml"
    command = ["plan", f"--scenario={scenario}", "--devices=h200:2", "--duration=5", "--jobs=1", f"--json={out}"]
    assert main([*command, f"--write={file}"]) == 0
    found = json.loads(out.read_text())
    assert found["winner"] == "1 x h200"
    (group,) = parse(str(file), file.read_text(), TABLES).groups
    assert group.options["host_cache_memory"] == 2 << 30, "what was simulated had such a tier"
    assert found["rate"] == pytest.approx(20.0, rel=0.3)


def test_what_no_device_can_do_is_an_answer(trace, tmp_path, capsys):
    assert main(flags(trace, devices="l4:2", rate=500)) == 1
    assert "No candidate was found that keeps 90%" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"devices": "h201:2"}, "--devices: 'h201:2': 'h201', allowed is a100, "),
        ({"devices": "h200:none"}, "--devices: 'h200:none': 'none', allowed is a whole number from 1 to 1024"),
        ({"devices": ","}, "--devices: ',', allowed is a list such as h200:16,l4:8"),
        ({"price": "h100=2"}, "--price: 'h100=2', allowed is NAME=NUMBER of l4"),
        ({"price": "l4=-1"}, "--price: 'l4=-1': '-1', allowed is a number above 0"),
        ({"target": "1.5"}, "--target: '1.5', allowed is a number above 0 and at most 1"),
        ({"policy": "best"}, "--policy: 'best', allowed is round_robin, "),
        ({"rate": "fast"}, "--rate: 'fast', allowed is a number above 0"),
        ({"geometry": "gpt-5"}, "--geometry: 'gpt-5', allowed is qwen3-0.6b"),
        ({"ttft-ms": None}, "--ttft-ms: needed with --trace"),
        ({"trace": None}, "--trace: one of --trace and --scenario is needed, and not both"),
        ({"trace": "/nowhere.csv"}, "/nowhere.csv: no such file"),
        ({"geometry": "llama-2-70b", "devices": "l4:1"}, "--devices: none can be an instance; 1 x l4: "),
        ({"json": "/nowhere/out.json"}, "--json: /nowhere/out.json cannot be written"),
        ({"write": "/nowhere/out.yaml"}, "--write: /nowhere/out.yaml cannot be written"),
        ({"scenario": "/nowhere.yaml", "trace": None}, "--scenario: /nowhere.yaml cannot be read"),
    ],
)
def test_what_cannot_be_had_is_said_in_one_line(trace, capsys, more, message):
    assert main(flags(trace, **more)) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith(f"penstock: {message}")
