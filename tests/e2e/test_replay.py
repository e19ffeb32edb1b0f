"""Requests that a real server has recorded run again there."""

import json
import re

import httpx
import msgspec
import pytest

from penstock.cli.main import main
from penstock.service.request_record import RequestRecord
from tests.helpers.servers import QUICK
from tests.helpers.waiting import eventually

KINDS = {  # request -> its fields; none has a seed but the last
    "drawn": {"temperature": 1.3, "n": 3, "top_p": 0.9, "frequency_penalty": 0.7, "repetition_penalty": 1.2},
    "held-back": {"temperature": 1.1, "min_tokens": 9, "bad_words": ["self"], "stop": ["e"], "logit_bias": {"13": 5}},
    "several": {"prompt": ["class A", "import os"], "temperature": 1.0, "logprobs": 2, "max_tokens": 8},
    "searched": {"use_beam_search": True, "n": 3, "max_tokens": 8, "length_penalty": 0.5},
    "formed": {"structured_outputs": {"regex": "[a-f]{5,30}"}, "temperature": 2.0},
    "thinking": {"thinking": {"end": [9, 7], "budget": 5}, "structured_outputs": {"regex": "[a-f]{5,30}"}},
    "scored": {"echo": True, "max_tokens": 0, "logprobs": 1},
    "flexible": {"service_tier": "flex", "seed": -5, "temperature": 0.9},
}


def test_recorded_requests_bring_the_same_tokens_again(alone, record, tmp_path, capsys):
    def post(route, name, **body):
        headers = {"x-request-id": name}
        answer = httpx.post(alone.url + route, json={"model": "demo", **body}, headers=headers, timeout=60)
        assert answer.status_code == 200, answer.text

    def replay(*more, folder=record, code=0):
        out = tmp_path / "out.json"
        flags = ["--url", alone.url, "--json", str(out), "--max-concurrency", "4"]
        assert main(["replay", str(folder), *flags, *more]) == code, capsys.readouterr().out
        return json.loads(out.read_text())

    for name, fields in KINDS.items():
        post("/v1/completions", name, **({"prompt": "def f(", "max_tokens": 24} | fields))
    talk = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 12, "prediction": {"type": "content"}}
    talk["prediction"]["content"] = "import os"
    post("/v1/chat/completions", "said", **talk, logprobs=True, top_logprobs=20)
    post("/v1/embeddings", "embedded", input="a text")
    ask = {"model": "demo", "prompt": "for", "max_tokens": 4000, "ignore_eos": True, "stream": True, "n": 2}
    with httpx.stream("POST", alone.url + "/v1/completions", json=ask, headers={"x-request-id": "left"}) as answer:
        next(answer.iter_lines())
    names = [*KINDS, "said", "embedded", "left"]

    def recorded():
        with RequestRecord(record) as found:
            return {re.sub(r"^several-\d$", "several", line.id): found.read(line) for line in found.lines}

    eventually(lambda: set(names) <= recorded().keys())
    chosen = [word for name in names for word in ("--request", name)]
    found = replay(*chosen, "--speed", "50")
    assert (found["requests"], found["same"], found["not_compared"], found["beginnings"]) == (12, 12, 0, 1)
    assert found["numbers"] == found["equal_numbers"] > 8 + 12 + 100, "of three requests, and of an embedding"
    assert found["largest_gap"] == 0.0
    assert found["outputs"] == 3 + 1 + 2 + 3 + 1 + 1 + 1 + 1 + 1 + 2
    assert found["tokens"] > 100

    drawn = json.loads(next(line for line in (record / "frontend-0.jsonl").open() if '"id":"drawn"' in line))
    drawn["outputs"][1]["tokens"][7] = 4000
    other = json.loads(json.dumps(drawn)) | {"id": "other", "fingerprints": ["cafe"]}
    (tmp_path / "changed.jsonl").write_text(f"{json.dumps(drawn)}\n{json.dumps(other)}\n")
    found = replay(folder=tmp_path, code=1)
    (difference,) = found["differences"]
    assert (difference["request"], difference["output"], difference["position"]) == ("drawn", 1, 7)
    assert difference["recorded"] == 4000 != difference["replayed"]
    assert [row["request"] for row in found["not_compared_requests"]] == ["other"]
    shown = capsys.readouterr().out
    assert re.search(r"drawn\W+1\W+7\W+4000\W+\d+", shown)
    assert "not compared: other: it ran on another model, cafe" in shown
    assert replay("--any-model", folder=tmp_path, code=1)["differ"] == 2
    assert alone.metric("recorded_requests_total", outcome="dropped") == 0


def test_log_probabilities_and_embeddings_are_the_same_to_the_bit(alone, record, tmp_path):
    def replay(folder, *more, code=0):
        out = tmp_path / "out.json"
        assert main(["replay", str(folder), "--url", alone.url, "--json", str(out), *more]) == code
        return json.loads(out.read_text())

    ask = {"prompt": "def f(", "max_tokens": 12, "temperature": 0.9, "n": 2, "logprobs": 1}
    for route, name, body in (("completions", "rated", ask), ("embeddings", "vector", {"input": "some text"})):
        headers = {"x-request-id": name}
        answer = httpx.post(f"{alone.url}/v1/{route}", json={"model": "demo", **body}, headers=headers, timeout=60)
        assert answer.status_code == 200, answer.text

    def recorded():
        with RequestRecord(record) as found:
            lines = [found.read(line) for line in found.lines]
        return {line.id: line for line in lines if line.id in ("rated", "vector")}

    eventually(lambda: len(recorded()) == 2)
    found = replay(record, "--request", "rated", "--request", "vector", "--tolerance", "0")
    assert (found["same"], found["largest_gap"]) == (2, 0.0)
    assert found["numbers"] == found["equal_numbers"] > 100
    lines = recorded()
    lines["rated"].outputs[1].logprobs[2] -= 0.01
    lines["vector"].embedding[3] += 0.01
    (tmp_path / "changed.jsonl").write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines.values()))
    found = replay(tmp_path, code=1)
    differ = {(each["of"], each["output"], each["position"]) for each in found["differences"]}
    assert differ == {("embedding", 0, 3), ("logprob", 1, 2)}
    assert found["largest_gap"] == pytest.approx(0.01, rel=1e-3)
    assert replay(tmp_path, "--tolerance", "0.02")["same"] == 2


@pytest.mark.slow
def test_a_server_that_is_started_for_it_brings_the_same(alone, record, monkeypatch, capfd):
    """To the bit."""
    ask = {"model": "demo", "prompt": "def g(", "max_tokens": 12, "temperature": 0.9, "logprobs": 1}
    answer = httpx.post(f"{alone.url}/v1/completions", json=ask, headers={"x-request-id": "again"}, timeout=60)
    assert answer.status_code == 200, answer.text

    def recorded():
        with RequestRecord(record) as found:
            return any(line.id == "again" for line in found.lines)

    eventually(recorded)
    for flag, value in zip(QUICK[::2], QUICK[1::2], strict=True):
        monkeypatch.setenv(f"PENSTOCK_{flag[2:].replace('-', '_').upper()}", value)
    monkeypatch.setenv("PENSTOCK_DTYPE", "float32")
    chosen = ("--request", "again", "--tolerance", "0")
    assert main(["replay", str(record), "--serve", "demo", *chosen]) == 0, capfd.readouterr().err
    monkeypatch.setenv("PENSTOCK_DTYPE", "float7")
    assert main(["replay", str(record), "--serve", "demo", *chosen]) != 0
    assert "did not start" in (said := capfd.readouterr().err)
    assert "float7" in said
