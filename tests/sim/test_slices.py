"""A simulation in slices comes to what the whole comes to."""

import json
import multiprocessing
import os
import random
from concurrent.futures import ProcessPoolExecutor
from itertools import pairwise
from math import inf
from textwrap import dedent

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cli.main import main
from penstock.cli.output import lost_processes
from penstock.core.errors import PenstockError
from penstock.sim.simulate import result_of, simulate_slice
from penstock.sim.workload import cut
from tests.sim.scenarios import COLOCATED, REQUESTS, SPLIT, WORKLOAD, read, run

SHAPES = {"colocated": COLOCATED, "split": SPLIT, "shared": SPLIT + "transport: {kind: shared}\n"}


def in_slices(scenario, count, warm_up, *, scale=1.0, seed=1, variant="least_loaded"):
    parts = cut(REQUESTS / 60 / scale, count, warm_up)
    done = [simulate_slice(scenario, variant, None, random.Random(seed), p, seed=seed, scale=scale) for p in parts]
    return result_of(done, variant, seed=seed, scale=scale)


@given(st.floats(0.1, 1e6), st.integers(1, 50), st.floats(0, 1e6))
def test_slices_follow_one_another(seconds, count, warm_up):
    parts = list(cut(seconds, count, warm_up))
    assert (parts[0].since, parts[0].begin) == (0.0, 0.0)
    assert (parts[-1].end, parts[-1].until) == (inf, inf)
    for before, after in pairwise(parts):
        assert before.begin < before.end == after.begin
    for part in parts:
        assert 0 <= part.since <= part.begin < part.end <= part.until
        assert part.begin - part.since == pytest.approx(min(warm_up, part.begin), abs=1e-6)


@pytest.mark.parametrize("shape", SHAPES)
def test_one_slice_is_the_whole_to_the_byte(shape):
    scenario = read(WORKLOAD, SHAPES[shape])
    assert json.dumps(in_slices(scenario, 1, 3.0)) == json.dumps(run(scenario)[0])


@pytest.mark.parametrize("shape", SHAPES)
def test_slices_come_to_what_the_whole_comes_to(shape):
    scenario = read(WORKLOAD, SHAPES[shape])
    whole, _ = run(scenario, scale=0.5)
    sliced = in_slices(scenario, 4, 3.0, scale=0.5)
    for name in ("requests", "failed", "output_tokens", "prompt_tokens", "handed_over", "rate", "cut", "complete"):
        assert sliced[name] == whole[name]
    assert sum(sliced["series"]["arrivals"]) == sum(whole["series"]["arrivals"]) == REQUESTS
    assert sliced["attainment"] == pytest.approx(whole["attainment"], abs=0.02)
    assert sliced["reused_tokens"] == pytest.approx(whole["reused_tokens"], rel=0.1)
    for name in ("ttft_p50_ms", "tpot_p50_ms", "latency_mean_s"):
        assert sliced[name] == pytest.approx(whole[name], rel=0.1)
    for name in ("duration", "instance_seconds"):
        assert sliced[name] == pytest.approx(whole[name], rel=0.02)
    for name, row in sliced["instances"].items():
        assert row["lives"] == 1
        assert row["steps"] == pytest.approx(whole["instances"][name]["steps"], rel=0.2)
        assert row["busy_share"] == pytest.approx(whole["instances"][name]["busy_share"], rel=0.2)
    at = sliced["timeline"]["at"]
    assert at == sorted(at)
    assert max(after - before for before, after in pairwise(at)) < 0.2
    assert shape != "split" or in_slices(scenario, 4, 3.0, scale=0.5) == sliced


def test_without_a_warm_up_a_slice_knows_nothing():
    """Or the warm-up would have nothing to do, and the tests above nothing to show."""
    scenario = read(WORKLOAD, COLOCATED)
    warm, cold = (in_slices(scenario, 6, seconds) for seconds in (3.0, 0.0))
    assert cold["reused_tokens"] < 0.95 * warm["reused_tokens"]


def test_a_slice_in_which_nobody_comes_is_paid_for_all_the_same():
    tasks = dedent("""
    workload:
      duration: 8
      tasks:
        - {name: early, rate: 20, prompt: 100, output: 10, ttft-ms: 500, tpot-ms: 50, duration: 1}
        - {name: late, rate: 20, prompt: 100, output: 10, ttft-ms: 500, tpot-ms: 50, start: 7}
    engine: {max-model-len: 4096}
    """)
    scenario = read(tasks, COLOCATED)
    whole, _ = run(scenario)
    parts = list(cut(8.0, 4, 0.5))
    done = [simulate_slice(scenario, "least_loaded", None, random.Random(1), p, seed=1, scale=1.0) for p in parts]
    sliced = result_of(done, "least_loaded", seed=1, scale=1.0)
    assert [len(each.account.outcomes) for each in done][1:3] == [0, 0]
    assert [each.account.instance_seconds for each in done][:3] == pytest.approx([6.0] * 3)
    assert sliced["requests"] == whole["requests"]
    assert sliced["instance_seconds"] == pytest.approx(whole["instance_seconds"], rel=0.01)
    assert sliced["tasks_over_time"]["tasks"] == whole["tasks_over_time"]["tasks"]


# --- the command


def sim_run(scenario, *flags):
    return main(["sim", "run", str(scenario), "--traces", str(scenario.parent), *flags])


def test_the_number_of_processes_does_not_show(scenario, tmp_path, capsys):
    outs = [tmp_path / f"{jobs}.json" for jobs in "12"]
    for jobs, out in zip("12", outs, strict=True):
        page = out.with_suffix(".html")
        flags = ["--slices", "3", "--warm-up", "2", "--jobs", jobs, "--json", str(out), "--html", str(page)]
        assert sim_run(scenario, *flags) == 0
    assert outs[0].read_bytes() == outs[1].read_bytes()
    result = json.loads(outs[0].read_text())
    assert result["requests"] == 120
    assert result["slices"] == {"count": 3, "warm_up": 2.0}
    assert "120 requests" in page.read_text()
    assert "in 3 slices that began 2 s early" in page.read_text()
    assert "100.0% of 120 requests" in capsys.readouterr().out


def test_a_process_that_is_killed_is_said_in_a_line():
    @lost_processes()
    def work():
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            pool.submit(os._exit, 1).result()

    with pytest.raises(PenstockError, match="was killed"):
        work()


@pytest.mark.parametrize(
    ("flags", "extra", "words"),
    [
        (["--slices", "0"], "", "--slices: '0', allowed is a whole number from 1 to 100000"),
        (["--slices", "2", "--warm-up", "-1"], "", "--warm-up: '-1'"),
        (["--slices", "2", "--jobs", "x"], "", "--jobs: 'x'"),
        (["--slices", "2", "--save-requests"], "", "--save-requests: not with --slices"),
        (["--warm-up", "5"], "", "--warm-up: only with --slices"),
        (["--jobs", "5"], "", "--jobs: only with --slices"),
        (["--slices", "2"], "failures: [{instance: engine-0, at: 1}]\n", "--slices: not with failures"),
        (["--slices", "2"], "workload.offline: {backlog: 3}\n", "--slices: not with workload.offline"),
        (["--slices", "2", "--trace", "at_once.csv"], "", "--slices: all requests come at once"),
    ],
)
def test_what_cannot_be_cut_is_said_in_a_line(scenario, capsys, monkeypatch, flags, extra, words):
    monkeypatch.chdir(scenario.parent)
    (scenario.parent / "at_once.csv").write_text("arrival_s,input_tokens,output_tokens\n0,100,3\n0,100,4\n")
    content = scenario.read_text()
    if extra.startswith("workload."):
        content, extra = content.replace("small.csv}", "small.csv, offline: {backlog: 3}}"), ""
    scenario.write_text(content + extra)
    assert sim_run(scenario, *flags) == 2
    said = capsys.readouterr().err
    assert words in said
    assert len(said.splitlines()) == 1
