"""`penstock sim`, with a trace of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from penstock.cli.main import main
from penstock.cli.output import write

FIELDS = {
    "max_rate_90",
    "attainment",
    "ttft_p50_ms",
    "ttft_p95_ms",
    "tpot_p50_ms",
    "mean_latency_s",
    "instance_seconds",
    "offline_tokens_per_s",
    "reused_tokens",
    "share_of_bound",
}


def test_run_writes_a_result_that_is_the_same_again(scenario, tmp_path, capsys):
    outs, page = [tmp_path / "a.json", tmp_path / "b.json"], tmp_path / "page.html"
    for out in outs:
        command = ["sim", "run", str(scenario), "--traces", str(tmp_path), "--json", str(out), "--save-requests"]
        assert main([*command, "--html", str(page)]) == 0
    assert outs[0].read_bytes() == outs[1].read_bytes()
    result = json.loads(outs[0].read_text())
    assert result["attainment"] == 1.0
    assert result["requests"] == len(result["per_request"]) == 120
    assert result["output_tokens"] == sum(5 + i % 40 for i in range(120))
    assert result["rate"] == pytest.approx(20.0)
    assert set(result["timeline"]["instances"]) == {"engine-0", "engine-1"}
    columns = result["timeline"]["instances"]["engine-0"]
    assert {len(column) for column in columns.values()} == {len(result["timeline"]["at"])}
    assert "100.0%" in capsys.readouterr().out
    assert f"{scenario}: least_loaded at 20 requests/s" in page.read_text()


def test_the_result_does_not_depend_on_the_process(scenario, tmp_path):
    """Sets of strings have another order in every process."""
    outs = []
    for hash_seed in "12":
        out = tmp_path / f"{hash_seed}.json"
        command = [sys.executable, "-m", "penstock.cli.main", "sim", "run", str(scenario), "--traces", str(tmp_path)]
        command += ["--policy", "least_loaded@split", "--json", str(out), "--save-requests"]
        subprocess.run(command, env={**os.environ, "PYTHONHASHSEED": hash_seed}, check=True, capture_output=True)
        outs.append(out.read_bytes())
    assert outs[0] == outs[1]


def test_run_takes_another_trace_policy_seed_and_rate(scenario, tmp_path):
    other, out = tmp_path / "other.csv", tmp_path / "out.json"
    other.write_text("arrival_s,input_tokens,output_tokens\n0,100,3\n1,100,4\n2,100,5\n")
    flags = ["--trace", str(other), "--policy", "round_robin@split", "--seed", "7", "--rate-scale", "2"]
    assert main(["sim", "run", str(scenario), *flags, "--json", str(out)]) == 0
    result = json.loads(out.read_text())
    assert (result["requests"], result["seed"], result["policy"]) == (3, 7, "round_robin@split")
    assert result["rate"] == pytest.approx(2.0)
    assert result["handed_over"] == 3


def compare(scenario, *flags):
    return main(["sim", "compare", str(scenario), "--traces", str(scenario.parent), *flags])


@pytest.mark.slow
def test_the_bound_is_over_the_instances_that_a_policy_may_have(scenario, tmp_path):
    out = tmp_path / "out.json"
    content = scenario.read_text().replace("small.csv}", "small.csv, duration: 0.7, most-scale: 40}")
    scenario.write_text(content + "scaling: {least: 2, most: 6, start-seconds: 1}\n")
    assert compare(scenario, "--policies", "hfx,hfx_scaling", "--json", str(out)) == 0
    fixed, scaled = json.loads(out.read_text())["policies"].values()
    assert scaled["bound_rate"] == pytest.approx(3 * fixed["bound_rate"], rel=0.05)
    for row in (fixed, scaled):
        assert row["share_of_bound"] == pytest.approx(row["max_rate_90"] / row["bound_rate"])


def test_compare_finds_the_greatest_rate_of_each_policy(scenario, tmp_path, capsys):
    out, page, folder = tmp_path / "out.json", tmp_path / "out.html", tmp_path / "kept"
    flags = ["--policies", "least_loaded,round_robin@split", "--jobs", "2", "--seeds", "2"]
    assert compare(scenario, *flags, "--json", str(out), "--html", str(page), "--save", str(folder)) == 0
    document = json.loads(out.read_text())
    assert document["seeds"] == [0, 1]
    policies = document["policies"]
    assert list(policies) == ["least_loaded", "round_robin@split"]
    for row in policies.values():
        assert set(row) >= FIELDS
        assert row["attainment"] >= 0.9
        assert row["max_scale"] < row["missed_scale"] <= 1.03 * row["max_scale"]
        assert row["max_rate_90"] == pytest.approx(20 * row["max_scale"])
        assert row["spread"] == sorted(seed["max_rate_90"] for seed in row["seeds"])
        assert row["share_of_bound"] == pytest.approx(row["max_rate_90"] / row["bound_rate"])
        assert 0 < row["share_of_bound"] < 1
        for seed in row["seeds"]:
            probes = {p["scale"]: p for p in row["probes"] if p["seed"] == seed["seed"] and p["share"] == 1}
            assert probes[seed["max_scale"]]["kept"]
            assert not probes[seed["missed_scale"]]["kept"]
    assert policies["least_loaded"]["max_rate_90"] > 1.1 * policies["round_robin@split"]["max_rate_90"]
    assert "round_robin@split" in page.read_text()
    assert "round_robin@split" in capsys.readouterr().out
    for name, row in policies.items():
        kept = folder / f"{name}-seed{row['seed']}.json"
        result = json.loads(kept.read_text())
        assert (result["rate"], result["attainment"]) == (row["max_rate_90"], row["attainment"])
        assert result["timeline"]["instances"]
        assert "Time to first token" in kept.with_suffix(".html").read_text()
    assert len(list(folder.iterdir())) == 4


def test_what_compare_finds_does_not_depend_on_the_processes(scenario, tmp_path):
    outs = [tmp_path / "1.json", tmp_path / "2.json"]
    for jobs, out in zip("12", outs, strict=True):
        assert compare(scenario, "--policies", "round_robin", "--no-bound", "--jobs", jobs, "--json", str(out)) == 0
    assert outs[0].read_bytes() == outs[1].read_bytes()


def test_compare_simulates_given_rates(scenario, tmp_path):
    out = tmp_path / "out.json"
    flags = ["--policies", "least_loaded,least_loaded", "--rates", "200,5", "--json", str(out), "--save", str(tmp_path)]
    assert compare(scenario, *flags, "--html", str(tmp_path / "out.html")) == 0
    row = json.loads(out.read_text())["policies"]["least_loaded"]
    assert set(row) >= FIELDS
    assert row["max_rate_90"] is None
    assert [entry["rate"] for entry in row["rates"]] == [5, 200]
    assert row["rates"][0]["attainment"] == 1.0
    assert row["rates"][0]["instance_seconds"] > 20 * row["rates"][1]["instance_seconds"]
    assert row["rates"][1]["requests"] == 120  # to the end, however many miss
    assert (tmp_path / "least_loaded-200-seed0.html").exists()


def test_given_rates_show_what_changes_when_another_task_begins(tmp_path):
    file, out = tmp_path / "tasks.yaml", tmp_path / "out.json"
    file.write_text(
        dedent("""
        workload:
          duration: 10
          tasks:
            - {name: a, rate: 2, prompt: 100, output: 5, ttft-ms: 500, tpot-ms: 50}
            - {name: b, rate: 2, prompt: 100, output: 5, ttft-ms: 500, tpot-ms: 50, start: 5}
        engine: {max-model-len: 2048, max-num-seqs: 16}
        instances: [{count: 1}]
        """)
    )
    flags = ["--policies", "round_robin,least_loaded", "--rates", "4,8", "--seeds", "2", "--jobs", "1"]
    assert compare(file, *flags, "--json", str(out)) == 0
    rows = json.loads(out.read_text())["policies"]
    assert list(rows) == ["round_robin", "least_loaded"]
    for row in rows.values():
        assert [entry["rate"] for entry in row["rates"]] == [4, 8]
        assert all([seed["seed"] for seed in entry["seeds"]] == [0, 1] for entry in row["rates"])
        assert all(set(entry["tasks_over_time"]["tasks"]) == {"a", "b"} for entry in row["rates"])


def test_compare_varies_offline_work(tmp_path):
    """Up to where it brings no more tokens, or disturbs."""
    file, out = tmp_path / "offline.yaml", tmp_path / "out.json"
    file.write_text(
        dedent("""
        target: 0.95
        workload:
          synthetic: {requests: 60, rate: 6, prompt: 300, output: 30}
          offline: {rate: 1, prompt: 500, prompt-sd: 100, output: 20, output-sd: 5}
          vary: offline
          most-scale: 40
          max-tokens: 100
        slo: {ttft-ms: 200, tpot-ms: 30}
        engine: {max-model-len: 2048, max-num-seqs: 16}
        instances: [{count: 1}]
        """)
    )
    assert compare(file, "--policies", "least_loaded", "--json", str(out)) == 0
    row = json.loads(out.read_text())["policies"]["least_loaded"]
    assert (row["max_rate_90"], row["share_of_bound"]) == (None, None)
    assert row["attainment"] >= 0.95
    assert row["offline_tokens_per_s"] > 1000
    assert row["max_offline_rate"] == pytest.approx(row["max_scale"])
    assert max(probe["scale"] for probe in row["probes"]) <= 40 * (1 + 1e-9)


def test_a_file_is_written_whole_or_not_at_all(tmp_path):
    file = tmp_path / "a.json"
    file.write_text("before")
    with pytest.raises(UnicodeEncodeError):
        write(file, "\ud800")
    assert file.read_text() == "before"
    assert list(tmp_path.iterdir()) == [file]
    write(file, "after")
    assert file.read_text() == "after"
    write("/dev/null", "whatever")
    assert Path("/dev/null").is_char_device()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--policies", "least_loaded,best"], "policy: 'best', allowed are round_robin, least_loaded"),
        (["--policies", " , "], "--policies: ' , ', allowed is one or more names"),
        (["--policies", "least_loaded@other"], "layout: 'other', "),
        (["--seeds", "0"], "--seeds: '0', allowed is a whole number from 1"),
        (["--rates", "5,-1"], "--rates: '-1', allowed is a number above 0"),
        (["--jobs", "many"], "--jobs: 'many', allowed is a whole number from 1"),
        (["--html", "/nowhere/out.html"], "--html: /nowhere/out.html cannot be written"),
        (["--save", "/nowhere/folder"], "--save: /nowhere/folder cannot be written"),
        (["--trace", "together.csv", "--policies", "least_loaded"], "workload: all requests come at once"),
    ],
)
def test_what_cannot_be_compared_is_said_in_one_line(scenario, tmp_path, capsys, monkeypatch, flags, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "together.csv").write_text("arrival_s,input_tokens,output_tokens\n0,100,3\n0,100,4\n")
    before = sorted(tmp_path.iterdir())
    assert compare(scenario, "--json", "out.json", *flags) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert lines[-1].startswith(f"penstock: {message}")
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--traces", "/nowhere"], "/nowhere/small.csv: no such file; public originals on GitHub: "),
        (["--policy", "best"], "policy: 'best', allowed are round_robin, least_loaded"),
        (["--seed", "x"], "--seed: 'x', allowed is a whole number of at least 0"),
        (["--rate-scale", "0"], "--rate-scale: '0', allowed is a number above 0"),
        (["--json", "/nowhere/out.json"], "--json: /nowhere/out.json cannot be written"),
    ],
)
def test_what_cannot_be_had_is_said_in_one_line(scenario, tmp_path, capsys, flags, message):
    flags = flags if "--traces" in flags else ["--traces", str(tmp_path), *flags]
    assert main(["sim", "run", str(scenario), *flags]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert lines[-1].startswith(f"penstock: {message}")
