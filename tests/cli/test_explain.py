"""`penstock explain`, over a recording of a hand-made afternoon."""

import json

import pytest

from penstock.cli.main import main
from penstock.core.clock import ManualClock
from penstock.sched.cluster import ClusterView
from penstock.service.recorder import FlightRecorder
from penstock.service.recorder_file import RecorderFile
from tests.helpers.recordings import an_afternoon, decision, demand, load, outcome


@pytest.fixture
def recording(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.delenv("PENSTOCK_FLIGHT_RECORDER", raising=False)
    return write(tmp_path / "recording", an_afternoon)


def write(path, tell):
    recorder = FlightRecorder()
    file = RecorderFile(path, recorder, ManualClock(0.0), wall=lambda: 1_790_000_000.0)
    tell(recorder)
    file.close()
    return str(path)


def as_json(capsys, *argv):
    assert main(["explain", *argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("request_id", ["one", "chatcmpl-one", "one-0badc0de"])
def test_a_request_by_any_of_its_names(recording, capsys, request_id):
    (sequence,) = as_json(capsys, request_id, "--file", recording)["sequences"]
    assert sequence["id"] == "one-0badc0de"
    assert sequence["demand"]["prompt_tokens"] == 1000
    assert (sequence["demand"]["ttft_ms"], sequence["demand"]["tpot_ms"]) == (500, None)
    (placement,) = sequence["placements"]
    assert placement["at"] == "2026-09-21T14:13:30.000Z"
    assert (placement["prefill"], placement["decode"]) == ("busy", None)
    assert placement["waited_ms"] == pytest.approx(10)
    chosen, other = placement["stages"]["prefill"]
    assert (chosen["instance"], chosen["chosen"], chosen["cost"], chosen["margin_ms"]) == ("busy", True, 1.0, 0)
    assert (other["instance"], other["chosen"], other["cost"]) == ("free", False, 2.0)
    assert chosen["ms"] + other["margin_ms"] == pytest.approx(other["ms"])
    assert chosen["free_in_ms"] == pytest.approx(300)
    assert chosen["requests"] == 4
    assert sequence["outcome"]["predicted_minus_actual_ttft_ms"] == pytest.approx(50)
    assert sequence["moves"] == []  # it was over before one moved


@pytest.mark.parametrize("request_id", ["on", "one-0", "one-0badc0d", "wo-0", "o.*"])
def test_what_only_looks_like_it_is_not_it(recording, capsys, request_id):
    assert main(["explain", request_id, "--file", recording]) == 2
    assert "is not among the 4 decisions" in capsys.readouterr().err


def test_outputs_that_waited_and_were_handed_over(recording, capsys):
    first, second = as_json(capsys, "two", "--file", recording)["sequences"]
    assert [s["id"] for s in (first, second)] == ["two-0-12345678-0", "two-0-12345678-1"]
    (held,), (placement,) = second["held"], second["placements"]
    assert held["asked_again_after_ms"] == pytest.approx(50)
    assert placement["in_queue_ms"] == pytest.approx(100)
    assert (placement["placed_meanwhile"], placement["waiting"]) == (1, 0)
    assert first["placements"][0]["waiting"] == 1
    assert placement["moves"][0]["instance"] == "free"
    assert placement["predicted_by"] == "step times"
    assert [row["instance"] for row in placement["stages"]["decode"]] == ["busy"]
    assert placement["stages"]["prefill"][0]["cached_tokens"] == 640
    assert [move["reason"] for move in second["moves"]] == ["it decodes"]
    assert not first["relocated"]
    went = [(one["from"], one["to"], one["reason"]) for one in second["relocated"]]
    assert went == [("busy", "busy", "stays"), ("busy", "free", "slow: it [is]")]
    assert second["outcome"]["tokens"] == 100


def test_for_people(recording, capsys):
    assert main(["explain", "two", "--file", recording, "--policy", "least_loaded"]) == 0
    out = capsys.readouterr().out
    for words in (
        "two-0-12345678-1",
        "1,000 prompt tokens",
        "to be asked again after 50.0 ms",
        "free > busy by least-loaded: hand-off",
        "100.0 ms of it in the master's queue while 1 of the others got a place",
        "moved for it: move free to prefill: it is needed there",
        "+109.3",
        "least_loaded would have chosen",
        "from busy it stays: stays",
        "from busy it goes on at free: slow: it [is]",
        "move busy to decode: it decodes",
        "it ended with 100 tokens, TTFT 50.0 ms",
        "predicted minus actual TTFT",
    ):
        assert words in out
    assert main(["explain", "three", "--file", recording]) == 0
    out = capsys.readouterr().out
    assert "offline, through g; not to busy" in out
    assert "it ended without an answer" in out


def test_a_narrow_terminal_loses_nothing(recording, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    assert main(["explain", "two", "--file", recording]) == 0
    out = capsys.readouterr().out
    assert ">  free" in out
    assert "+109.3" in out
    assert "640" in out


def test_what_is_loaded_is_told_where_there_is_any(tmp_path, recording, capsys):
    def tell(recorder):
        asked = demand("x-00000000", hits={"below": 960, "device": 960}, loads={"below": {"host": 320, "disk": 512}})
        view = ClusterView(now=1.0, instances=[load("below"), load("device")], queue=[asked])
        chosen = decision(asked, "below", costs={"below": 2.0, "device": 1.0})
        recorder.decided(1.0, view, asked, "x-00000000", "f", chosen)

    file = write(tmp_path / "r", tell)
    (sequence,) = as_json(capsys, "x", "--file", file)["sequences"]
    assert sequence["demand"]["loaded_tokens"] == {"below": {"host": 320, "disk": 512}}
    below, device = sequence["placements"][0]["stages"]["prefill"]
    assert (below["cached_tokens"], below["loaded_tokens"], device["loaded_tokens"]) == (960, 832, 0)
    assert below["ms"] > device["ms"]
    assert main(["explain", "x", "--file", file]) == 0
    out = capsys.readouterr().out
    assert " cached  loaded" in out
    assert " 960     832" in out
    assert main(["explain", "two", "--file", recording]) == 0
    assert " loaded " not in capsys.readouterr().out


def test_a_request_that_is_still_going_on_and_one_that_was_placed_again(tmp_path, capsys):
    def tell(recorder):
        asked = demand("x-00000000")
        view = ClusterView(now=1.0, instances=[load("a[b]"), load("b")], queue=[asked])
        recorder.decided(1.0, view, asked, "x-00000000", "f", decision(asked, "a[b]"))
        recorder.ended(2.0, "x-00000000", "f", None)
        recorder.decided(2.0, view, asked, "x-00000000", "f", decision(asked, "b"))

    file = write(tmp_path / "r", tell)
    assert main(["explain", "x", "--file", file]) == 0
    out = capsys.readouterr().out
    assert "a[b] by least-loaded" in out
    assert "It had not ended" in out
    (sequence,) = as_json(capsys, "x", "--file", file)["sequences"]
    assert [placement["prefill"] for placement in sequence["placements"]] == ["a[b]", "b"]
    assert sequence["outcome"] is None


def test_the_end_of_one_that_began_before_the_recording(tmp_path, capsys):
    file = write(tmp_path / "r", lambda recorder: recorder.ended(2.0, "x-00000000", "f", outcome("x-00000000")))
    assert main(["explain", "x", "--file", file]) == 0
    assert "before this recording" in capsys.readouterr().out


def test_a_recording_in_short(recording, capsys):
    content = as_json(capsys, "--file", recording)
    assert content["decisions"] == 4
    assert {(row["reason"], row["decisions"]) for row in content["reasons"]} == {("colocated", 2), ("hand-off", 2)}
    assert content["predicted_minus_actual_ttft_ms"]["requests"] == 3
    assert content["latest"][-1]["id"] == "three-aaaaaaaa"
    assert main(["explain", "--file", recording]) == 0
    assert "4 decisions" in capsys.readouterr().out


def test_a_recording_decided_again(recording, capsys):
    content = as_json(capsys, "--file", recording, "--policy", "least_loaded")
    assert content["recorded"] == {"least-loaded": 4}
    assert content["decisions"] == 4
    assert content["agreement"] == 0.75
    assert content["regret_ms"]["recorded"]["p95"] == pytest.approx(300, abs=1)
    assert content["regret_ms"]["replayed"]["mean"] == 0
    assert as_json(capsys, "--file", recording, "--policy", "least_loaded") == content
    assert main(["explain", "--file", recording, "--policy", "least_loaded"]) == 0
    assert "75.0% of 4 decisions are the same" in capsys.readouterr().out


def test_where_the_recording_is(recording, capsys, monkeypatch):
    assert main(["explain"]) == 2
    assert "REQUEST: missing, allowed only with a recording: --file FILE or PENSTOCK_F" in capsys.readouterr().err
    monkeypatch.setenv("PENSTOCK_FLIGHT_RECORDER", recording)
    assert as_json(capsys)["decisions"] == 4


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--policy", "x"], "--policy: 'x', allowed is"),
        (["--seed", "x"], "--seed: 'x', allowed is"),
        (["--file", "/nowhere"], "--file: /nowhere cannot be read"),
    ],
)
def test_mistakes(recording, capsys, argv, says):
    assert main(["explain", "--file", recording, *argv]) == 2
    assert says in capsys.readouterr().err
