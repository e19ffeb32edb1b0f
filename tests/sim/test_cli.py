"""`penstock sim`, with a trace of its own."""

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from textwrap import dedent

import pytest

from penstock.cli.main import main
from penstock.cli.sim import write
from penstock.cli.sim_journal import Journal
from penstock.cli.sim_workers import Run, Workers

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


def compare(scenario, *flags):
    return main(["sim", "compare", str(scenario), "--traces", str(scenario.parent), *flags])


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
    assert row["rates"][1]["requests"] == 200  # to the end, however many miss
    assert (tmp_path / "least_loaded-200-seed0.html").exists()


@pytest.mark.parametrize("flags", [[], ["--rates", "30,200"]], ids=["search", "rates"])
def test_compare_goes_on_with_an_earlier_result_to_the_same_byte(scenario, tmp_path, monkeypatch, flags):
    once, first, then = (tmp_path / f"{name}.json" for name in ("once", "first", "then"))
    flags = ["--policies", "round_robin", "--jobs", "1", *flags]
    assert compare(scenario, *flags, "--seeds", "2", "--json", str(once)) == 0
    assert compare(scenario, *flags, "--json", str(first)) == 0
    asked = []
    monkeypatch.setattr(Workers, "run", lambda self, run, run_it=Workers.run: asked.append(run) or run_it(self, run))
    assert compare(scenario, *flags, "--seeds", "2", "--resume", str(first), "--json", str(then)) == 0
    assert {run.seed for run in asked} == {1}
    assert then.read_bytes() == once.read_bytes()
    asked.clear()
    assert compare(scenario, *flags, "--resume", str(then), "--json", str(then)) == 0
    assert not asked
    assert then.read_bytes() == first.read_bytes()


@pytest.mark.parametrize("flags", [[], ["--rates", "30,200"]], ids=["search", "rates"])
def test_compare_that_was_stopped_goes_on_with_its_journal_to_the_same_byte(scenario, tmp_path, monkeypatch, flags):
    once, then, journal = (tmp_path / name for name in ("once.json", "then.json", "journal.jsonl"))
    flags = ["--policies", "round_robin", "--jobs", "1", "--seeds", "2", *flags]
    assert compare(scenario, *flags, "--journal", str(journal), "--json", str(once)) == 0
    head, *lines = journal.read_bytes().splitlines(keepends=True)
    assert len(lines) >= 3
    done, last = b"".join(lines[:-2]), lines[-2]
    journal.write_bytes(head + done + last[:-9])  # killed while it wrote the last but one
    simulated = []
    submit = Workers._submit

    def watch(self, function, *arguments):
        simulated.extend(argument for argument in arguments if isinstance(argument, Run))
        return submit(self, function, *arguments)

    monkeypatch.setattr(Workers, "_submit", watch)
    assert compare(scenario, *flags, "--journal", str(journal), "--json", str(then)) == 0
    assert then.read_bytes() == once.read_bytes()
    assert [asdict(run) for run in simulated] == [json.loads(line)["run"] for line in lines[-2:]]
    assert journal.read_bytes() == head + b"".join(lines)


def test_the_journal_may_be_of_the_same_scenario_elsewhere(scenario, tmp_path):
    journal, other = tmp_path / "journal.jsonl", tmp_path / "there" / scenario.name
    flags = ["--policies", "round_robin", "--rates", "30", "--traces", str(tmp_path), "--journal", str(journal)]
    assert main(["sim", "compare", str(scenario), *flags]) == 0
    before = journal.read_bytes()
    other.parent.mkdir()
    other.write_bytes(scenario.read_bytes())
    assert main(["sim", "compare", str(other), *flags]) == 0
    assert journal.read_bytes() == before


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda text: "no journal\n", "was not written by `penstock sim compare --journal`"),
        (lambda text: "no line", "was not written by `penstock sim compare --journal`"),
        (lambda text: text + '{"run": {}}\n', "was not written by `penstock sim compare --journal`"),
        (lambda text: text.replace("scenario.yaml", "b.yaml"), "has scenario 'b.yaml', and this 'scenario.yaml'"),
        (lambda text: text.replace('"version": "', '"version": "0.'), "has version '0."),
        (lambda text: text.replace('"content": "', '"content": "0'), "has content '0"),
    ],
)
def test_a_journal_of_something_else_is_left_as_it_is(scenario, tmp_path, capsys, spoil, message):
    journal = tmp_path / "journal.jsonl"
    flags = ["--policies", "round_robin", "--rates", "30", "--jobs", "1", "--journal", str(journal)]
    assert compare(scenario, *flags) == 0
    spoiled = spoil(journal.read_text())
    journal.write_text(spoiled)
    assert compare(scenario, *flags) == 2
    assert f"penstock: --journal: {journal} {message}" in capsys.readouterr().err
    assert journal.read_text() == spoiled


def test_two_comparisons_do_not_share_a_journal(scenario, tmp_path, capsys):
    journal = tmp_path / "journal.jsonl"
    flags = ["--policies", "round_robin", "--rates", "30", "--jobs", "1", "--journal", str(journal)]
    with Journal(str(journal), {}):
        before = journal.read_bytes()
        assert compare(scenario, *flags) == 2
    assert f"penstock: --journal: {journal} is written by another process" in capsys.readouterr().err
    assert journal.read_bytes() == before


def test_what_an_earlier_result_lacks_is_simulated(tmp_path):
    file, earlier, out = (tmp_path / name for name in ("tasks.yaml", "earlier.json", "out.json"))
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
    flags = ["--jobs", "1", "--json"]
    assert compare(file, "--policies", "least_loaded", "--rates", "4", *flags, str(earlier)) == 0
    more = ["--policies", "round_robin,least_loaded", "--rates", "4,8", "--seeds", "2"]
    assert compare(file, *more, "--resume", str(earlier), *flags, str(out)) == 0
    before, after = (json.loads(path.read_text())["policies"] for path in (earlier, out))
    assert list(after) == ["round_robin", "least_loaded"]
    for row in after.values():
        assert [entry["rate"] for entry in row["rates"]] == [4, 8]
        assert all([seed["seed"] for seed in entry["seeds"]] == [0, 1] for entry in row["rates"])
        assert all(set(entry["tasks_over_time"]["tasks"]) == {"a", "b"} for entry in row["rates"])
    old, new = before["least_loaded"]["rates"][0], after["least_loaded"]["rates"][0]
    assert new["seeds"][0] == old["seeds"][0]
    assert new["tasks_over_time"] == old["tasks_over_time"]


def spoiled(document, **changes):
    return json.dumps({**document, **changes})


@pytest.mark.parametrize(
    ("spoil", "flags", "message"),
    [
        (lambda d: None, [], "cannot be read (No such file or directory)"),
        (lambda d: "{", [], "was not written by `penstock sim compare --json`"),
        (lambda d: json.dumps({"ttft": 1}), [], "was not written by `penstock sim compare --json`"),
        (lambda d: spoiled(d, scenario="a/other.yaml"), [], "has scenario 'other.yaml', and this 'scenario.yaml'"),
        (lambda d: spoiled(d, target=0.95), [], "has target 0.95, and this 0.9"),
        (lambda d: spoiled(d, vary="offline"), [], "has vary 'offline', and this 'online'"),
        (lambda d: spoiled(d, tolerance=0.05), [], "has tolerance 0.05, and this 0.025"),
        (lambda d: spoiled(d, policies={"hfx": d["policies"]["round_robin"]}), [], "has hfx, and none of round_robin"),
        (
            lambda d: json.dumps(d).replace("reused_tokens", "old"),
            [],
            "was written by another version, which reported other figures",
        ),
        (json.dumps, ["--seed", "4"], "has the first seed 0, and this 4"),
        (lambda d: spoiled(d, rates=[]), [], "has a search True, and this False"),
    ],
)
def test_a_result_of_something_else_is_not_gone_on_with(scenario, tmp_path, capsys, spoil, flags, message):
    earlier = tmp_path / "earlier.json"
    common = ["--policies", "round_robin", "--rates", "30", "--jobs", "1"]
    assert compare(scenario, *common, "--json", str(earlier)) == 0
    text = spoil(json.loads(earlier.read_text()))
    earlier.unlink() if text is None else earlier.write_text(text)
    assert compare(scenario, *common, "--resume", str(earlier), *flags) == 2
    assert capsys.readouterr().err.strip().splitlines()[-1] == f"penstock: --resume: {earlier} {message}"


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


def test_run_writes_a_page(scenario, tmp_path):
    page = tmp_path / "page.html"
    assert main(["sim", "run", str(scenario), "--traces", str(tmp_path), "--html", str(page)]) == 0
    assert f"{scenario}: least_loaded at 20 requests/s" in page.read_text()


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
        (["--journal", "/nowhere/file"], "--journal: /nowhere/file cannot be written (No such file or directory)"),
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
