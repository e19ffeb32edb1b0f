"""The slice that servers and simulator get, how their figures are compared, and one comparison from end to end."""

import json

import pytest

from penstock.workload.requests import WorkRequest, offered_rate
from penstock.workload.traces import read_trace
from tools import fidelity
from tools.fidelity import compare, main, measured_figures, simulated_figures, take_slice, write_slice


def every(seconds, count, prompt=1000, output=200):
    return [WorkRequest(number=i, at=i * seconds, prompt_tokens=prompt, output_tokens=output + i) for i in range(count)]


def test_a_slice_is_as_fast_as_asked_for_and_keeps_its_bursts():
    trace = [*every(0.5, 100), *(WorkRequest(number=0, at=50.0, prompt_tokens=9, output_tokens=9) for _ in range(5))]
    rate = offered_rate(trace)
    found = take_slice(trace, start=10.0, seconds=20.5, rate=2 * rate, length_scale=0.1)
    assert [r.number for r in found] == list(range(len(found)))
    assert found[0].at == 0.0
    assert found[1].at == pytest.approx(0.25)  # twice as fast
    assert found[-6].at < found[-1].at == found[-5].at == pytest.approx(20.0)  # the burst, 40 s of the trace later
    assert {r.prompt_tokens for r in found[:-5]} == {100}
    assert [r.output_tokens for r in found[:2]] == [22, 22]  # of 220 and 221


def test_a_slice_fits_the_model_and_always_has_a_second_token():
    found = take_slice(every(1.0, 50, prompt=9000, output=1), start=0.0, seconds=10.0, rate=1.0, length_scale=1.0)
    assert all(r.prompt_tokens + r.output_tokens <= fidelity.MAX_MODEL_LEN for r in found)
    assert min(r.output_tokens for r in found) >= 1
    assert found[0].prompt_tokens > 4000
    short = take_slice(every(1.0, 50, prompt=3, output=1), start=0.0, seconds=10.0, rate=1.0, length_scale=0.1)
    assert {r.prompt_tokens for r in short} == {2}
    assert min(r.output_tokens for r in short) == 2


def test_a_slice_with_nothing_in_it_is_an_error():
    with pytest.raises(SystemExit, match="no request of the trace"):
        take_slice(every(1.0, 50), start=60.0, seconds=10.0, rate=1.0, length_scale=1.0)


def test_what_is_written_is_what_both_read(tmp_path):
    requests = take_slice(every(0.7, 40), start=3.0, seconds=9.0, rate=3.0, length_scale=0.5)
    write_slice(requests, tmp_path / "slice.csv")
    for read, meant in zip(read_trace(tmp_path / "slice.csv"), requests, strict=True):
        assert read.at == pytest.approx(meant.at, abs=2e-6)
        assert (read.prompt_tokens, read.output_tokens) == (meant.prompt_tokens, meant.output_tokens)


def test_the_stand_in_is_like_the_trace():
    requests = fidelity.stand_in()
    assert offered_rate(requests) == pytest.approx(5.5, rel=0.05)
    assert sum(r.prompt_tokens for r in requests) / len(requests) == pytest.approx(1155, rel=0.05)
    assert sum(r.output_tokens for r in requests) / len(requests) == pytest.approx(211, rel=0.05)


SUMMARY = {"requests": 3, "failed": 0, "ttft_ms": {"p50": 200.0, "p90": 280.0}, "tpot_ms": {"p50": 10.0}}
MEASURED = {"summary": {**SUMMARY, "output_tokens_per_s": 30.0}}
# the first is a probe; of the others 30 tokens in 1 s
ROWS = [(0, 0.0, 9.0, 9.5, 2), (1, 5.0, 5.1, 5.19, 10), (2, 5.1, 5.3, 5.39, 10), (3, 5.61, 5.91, 6.0, 10)]
NAMES = ("number", "arrival", "first", "ended", "output_tokens")
SIMULATED = {"failed": 0, "per_request": [dict(zip(NAMES, row, strict=True)) for row in ROWS]}


def test_the_figures_of_both_documents():
    assert list(measured_figures(MEASURED)) == list(simulated_figures(SIMULATED, 1)) == list(fidelity.FIGURES)
    assert simulated_figures(SIMULATED, 1) == pytest.approx(measured_figures(MEASURED))


def test_a_request_that_failed_ends_it():
    failed = {"summary": {**SUMMARY, "failed": 1, "failures": {"http 500": 1}}}
    with pytest.raises(SystemExit, match=r"1 of 3 requests failed: .*http 500"):
        measured_figures(failed)
    with pytest.raises(SystemExit, match=r"1 simulated requests failed: .*no place"):
        simulated_figures({"failed": 1, "errors": {"no place": 1}})


def test_medians_are_compared_and_the_spread_is_told():
    def run(ttft):
        return {"ttft_p50_ms": ttft, "ttft_p90_ms": 2 * ttft, "tpot_p50_ms": 10.0, "output_tokens_per_s": 100.0}

    rows = compare([run(100.0), run(90.0), run(400.0)], [run(88.0), run(89.0), run(87.0)], 0.1)
    assert rows["ttft_p50_ms"] == {
        "measured": 100.0,
        "measured_range": [90.0, 400.0],
        "simulated": 88.0,
        "simulated_range": [87.0, 89.0],
        "gap": pytest.approx(-0.12),
        "within": False,
    }
    assert rows["tpot_p50_ms"]["gap"] == 0
    assert rows["tpot_p50_ms"]["within"]


@pytest.mark.slow
def test_two_paced_engines_from_end_to_end(tmp_path, monkeypatch):
    monkeypatch.setattr(fidelity, "PROBING", fidelity.PROBING[:4])
    few = ["--instances", "2", "--rate", "4", "--seconds", "3", "--length-scale", "0.1", "--repetitions", "1"]
    out = tmp_path / "out.json"
    code = main(["paced", *few, "--traces", str(tmp_path), "--json", str(out)])
    document = json.loads(out.read_text())
    assert document["slice"]["trace"] == "synthetic stand-in"
    assert document["scenario"]["latency-ms"] >= 0
    assert code == (0 if all(row["within"] for row in document["figures"].values()) else 1)
    # how close is for a quiet machine: a busy one is slower than simulated by any factor, and none is much faster
    for name, row in document["figures"].items():
        faster, slower = ("measured", "simulated") if name == "output_tokens_per_s" else ("simulated", "measured")
        assert row[faster] < 3 * row[slower], name
    # an L4 reads the weights of Qwen3-8B, 15 GB without the embedding, in 51 ms
    assert 45 < document["figures"]["tpot_p50_ms"]["simulated"] < 80
