"""Whether a published result still comes out is seen, for rates and for searches."""

import json
import subprocess
import sys

import pytest

from tools import scheduling_verify
from tools.scheduling_measure import ROOT, Comparison, Measurement, run


def shorten(content):
    content["workload"]["duration"] = 5


@pytest.fixture(params=[(20.0, 40.0), ()], ids=["rates", "search"])
def measured(request, tmp_path):
    of = Comparison("hfx-single", ("round_robin",), request.param, seeds=1, changed="short", change=shorten)
    one = Measurement(of, "round_robin", tmp_path / "hfx-single.short.json")
    assert run(one, 1, None, tmp_path / "journals", again=False) == ""
    return one


def test_what_is_as_old_as_the_code_comes_out_and_what_is_older_does_not(measured):
    assert scheduling_verify.verify([measured], 1, None) == {}
    document = json.loads(measured.target.read_text())
    policy = document["policies"]["round_robin"]
    (row,) = (policy["rates"][-1] if "rates" in policy else policy)["seeds"]
    row["mean_latency_s"] *= 1.01
    measured.target.write_text(json.dumps(document))
    (unlike,) = scheduling_verify.verify([measured], 1, None)[measured.title]
    assert unlike.startswith("mean_latency_s ")


def test_what_cannot_be_simulated_is_said(measured):
    document = json.loads(measured.target.read_text())
    document["seeds"] = [-1]
    policy = document["policies"]["round_robin"]
    for entry in policy.get("rates", [policy]):
        entry["seeds"][0]["seed"] = -1
    measured.target.write_text(json.dumps(document))
    (why,) = scheduling_verify.verify([measured], 1, None)[measured.title]
    assert "--seed" in why


def test_a_search_that_found_nothing_does_not_pass_for_one_that_comes_out(tmp_path):
    of = Comparison("hfx-single", ("round_robin",), changed="short", change=shorten)
    one = Measurement(of, "round_robin", tmp_path / "hfx-single.short.json")
    policy = {"seeds": [{"seed": 0, "max_scale": None}]}
    one.target.write_text(json.dumps({"seeds": [0], "policies": {"round_robin": policy}}))
    (why,) = scheduling_verify.verify([one], 1, None)[one.title]
    assert "no load was kept" in why


def test_only_what_was_measured_is_looked_at(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(scheduling_verify, "ROOT", tmp_path)
    assert scheduling_verify.main(["hfx-single"]) == 0
    assert "0 of 0 come out as reported" in capsys.readouterr().out


def test_it_can_be_run_as_a_file():
    command = [sys.executable, "tools/scheduling_verify.py", "no-such-result"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "0 of 0" in done.stdout
