"""`penstock sim`, with a trace of its own."""

import json
import os
import subprocess
import sys
from textwrap import dedent

import pytest

from penstock.cli.main import main


@pytest.fixture
def scenario(tmp_path):
    rows = [f"{i * 0.05:.2f},300,{5 + i % 40}" for i in range(200)]
    (tmp_path / "small.csv").write_text("\n".join(["arrival_s,input_tokens,output_tokens", *rows]))
    file = tmp_path / "scenario.yaml"
    file.write_text(
        dedent("""
        workload: {trace: small.csv}
        slo: {ttft-ms: 100, tpot-ms: 20}
        engine: {max-model-len: 2048, max-num-seqs: 16}
        instances: [{count: 2}]
        layouts: {split: [{pool: prefill}, {pool: decode}]}
        """)
    )
    return file


def test_run_writes_a_result_that_is_the_same_again(scenario, tmp_path, capsys):
    outs = [tmp_path / "a.json", tmp_path / "b.json"]
    for out in outs:
        command = ["sim", "run", str(scenario), "--traces", str(tmp_path), "--json", str(out), "--save-requests"]
        assert main(command) == 0
    assert outs[0].read_bytes() == outs[1].read_bytes()
    result = json.loads(outs[0].read_text())
    assert result["attainment"] == 1.0
    assert result["requests"] == len(result["per_request"]) == 200
    assert result["output_tokens"] == sum(5 + i % 40 for i in range(200))
    assert result["rate"] == pytest.approx(20.0)
    assert set(result["timeline"]["instances"]) == {"engine-0", "engine-1"}
    columns = result["timeline"]["instances"]["engine-0"]
    assert {len(column) for column in columns.values()} == {len(result["timeline"]["at"])}
    assert "100.0%" in capsys.readouterr().out


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


def test_compare_finds_the_greatest_rate_of_each_policy(scenario, tmp_path):
    out = tmp_path / "out.json"
    flags = ["--traces", str(tmp_path), "--policies", "least_loaded,round_robin@split", "--jobs", "2"]
    assert main(["sim", "compare", str(scenario), *flags, "--json", str(out)]) == 0
    policies = json.loads(out.read_text())["policies"]
    assert list(policies) == ["least_loaded", "round_robin@split"]
    for row in policies.values():
        assert row["attainment"] >= 0.9
        assert row["max_scale_90"] < row["missed_scale"] <= 1.03 * row["max_scale_90"]
        assert row["max_rate_90"] == pytest.approx(20 * row["max_scale_90"])
        for probe in row["probes"]:
            assert probe["kept"] == (probe["scale"] <= row["max_scale_90"])
    assert policies["least_loaded"]["max_rate_90"] > 1.1 * policies["round_robin@split"]["max_rate_90"]


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
