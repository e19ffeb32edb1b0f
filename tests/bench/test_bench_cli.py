"""`penstock bench` from its flags to its exit code."""

import argparse
import base64
import io
import json
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from penstock.cli import bench
from penstock.core.errors import ConfigError, Unavailable


def run(*words):
    parser = argparse.ArgumentParser()
    bench.add_parser(parser.add_subparsers())
    args = parser.parse_args(["bench", *map(str, words)])
    return args.run(args)


def serve(server, *words):
    small = ("--num-prompts", 4, "--random-input-len", 16, "--random-output-len", 4, "--num-warmups", 1)
    return run("serve", "--base-url", server.url, *small, *words)


def test_serve(server, tmp_path, capsys):
    out = tmp_path / "out.json"
    code = serve(server, "--max-concurrency", 2, "--goodput", "ttft:60000", "e2e:60000", "--json", out)
    assert code == 0
    content = json.loads(out.read_text())
    assert (content["kind"], content["model"], content["max_model_len"]) == ("serve", "fake", 4096)
    assert content["summary"]["completed"] == 4
    assert content["summary"]["goodput"]["attainment"] == 1.0
    assert {row["metric"]: row["server"] for row in content["server"]["rows"]}["request_success_total"] == 4
    assert content["config"]["max_concurrency"] == 2
    assert "requests" not in content
    assert server.peak <= 2
    text = capsys.readouterr().out
    assert "TTFT" in text
    assert "100.0%" in text


def test_serve_on_a_schedule_with_details_and_comparison(server, tmp_path, capsys):
    first, second = tmp_path / "1.json", tmp_path / "2.json"
    flags = ("--request-rate", 200, "--burstiness", "inf", "--save-detailed")
    assert serve(server, *flags, "--json", first) == 0
    assert serve(server, *flags, "--json", second, "--compare", first) == 0
    rows = json.loads(second.read_text())["requests"]
    assert [row["start_ms"] for row in rows] == pytest.approx([0.0, 5.0, 10.0, 15.0])
    assert all(row["event_tokens"] == [1, 1, 1, 1] and row["error"] is None for row in rows)
    assert "ratio (>1 is better)" in capsys.readouterr().out


def test_serve_a_trace_and_prefixes(server, tmp_path):
    trace = tmp_path / "trace.jsonl"
    trace.write_text(
        "".join(
            json.dumps({"timestamp": 10 * i, "input_length": 600, "output_length": 2, "hash_ids": [0, i + 1]}) + "\n"
            for i in range(3)
        )
    )
    assert serve(server, "--dataset-name", "trace", "--dataset-path", trace, "--trace-scale", 2) == 0
    prompts = [body["prompt"] for body in server.bodies[2:]]
    assert len({tuple(prompt[:512]) for prompt in prompts}) == 1
    assert len({tuple(prompt) for prompt in prompts}) == 3
    server.bodies.clear()
    assert serve(server, "--dataset-name", "prefix", "--num-prefixes", 1, "--prefix-len", 8, "--endpoint", "chat") == 0
    words = [body["messages"][0]["content"].split() for body in server.bodies[2:]]
    assert {len(prompt) for prompt in words} == {24}
    assert len({tuple(prompt[:8]) for prompt in words}) == 1


def test_images(server):
    Image = pytest.importorskip("PIL.Image")
    flags = ("--endpoint", "chat", "--images", 2, "--image-size", "20x30", "--image-repeats", 0.5)
    assert serve(server, *flags, "--num-prompts", 8) == 0
    warm_up, *sent = [body["messages"][0]["content"] for body in server.bodies[1:]]
    urls = [[part["image_url"]["url"] for part in parts[:2]] for parts in sent]
    for url in (url for both in urls for url in both):
        with Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))) as image:
            image.load()
            assert (image.size, image.mode) == ((20, 30), "RGB")
    assert len({url for both in urls for url in both}) < 16
    assert not {part["image_url"]["url"] for part in warm_up[:2]} & {url for both in urls for url in both}
    assert len({parts[2]["text"] for parts in sent}) == 8


def test_a_run_in_which_nothing_succeeded_fails(server, capsys):
    server.fail_every = 2  # the trial passes
    assert serve(server, "--num-prompts", 1, "--num-warmups", 0) == 1
    assert "1 requests failed: http 500 (told to fail)" in capsys.readouterr().out


def test_slo_by_concurrency(server, tmp_path, capsys):
    out = tmp_path / "out.json"
    shape = ("--num-prompts", 4, "--random-input-len", 8, "--random-output-len", 2, "--num-warmups", 0)
    search = ("--search", "concurrency", "--start", 1, "--max-load", 4, "--goodput", "e2e:60000")
    assert run("slo", "--base-url", server.url, *shape, *search, "--json", out) == 0
    content = json.loads(out.read_text())
    assert (content["best"], content["missed"]) == (4, None)
    assert [probe["load"] for probe in content["probes"]] == [1, 2, 4]
    assert [probe["summary"]["peak_in_flight"] for probe in content["probes"]] == [1, 2, 4]
    assert [probe["summary"]["requests"] for probe in content["probes"]] == [4, 8, 16]
    prompts = [tuple(body["prompt"]) for body in server.bodies[1:]]
    assert len(set(prompts)) == len(prompts)  # no probe repeats the tokens of another
    assert "e2e<=60000ms is still kept at 4 concurrent requests" in capsys.readouterr().out


def test_slo_by_rate_fails_when_no_load_will_do(server, tmp_path):
    out = tmp_path / "out.json"
    shape = ("--num-prompts", 5, "--random-input-len", 8, "--random-output-len", 2, "--num-warmups", 0)
    search = ("--start", 400, "--min-load", 200, "--probe-seconds", 0, "--percentile", 50, "--goodput", "e2e:0.001")
    assert run("slo", "--base-url", server.url, *shape, *search, "--json", out) == 1
    content = json.loads(out.read_text())
    assert (content["best"], content["missed"], content["target"]) == (None, 200, 0.5)
    offered = [probe["summary"]["offered_per_s"] for probe in content["probes"]]
    assert offered == pytest.approx([400, 200])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("serve", "--num-prompts", 0), "--num-prompts: '0', allowed is a whole number of at least 1"),
        (("serve", "--request-rate", "nan"), "--request-rate: 'nan', allowed is a number above 0"),
        (("serve", "--random-range-ratio", 1.5), "--random-range-ratio: '1.5', allowed is a number from 0 to 1"),
        (("serve", "--port", 70000), "--port: '70000'"),
        (("serve", "--goodput", "itl:3"), "--goodput: 'itl:3'"),
        (("serve", "--base-url", "localhost:8000"), "--base-url: localhost:8000, allowed is http://"),
        (("serve", "--dataset-name", "trace"), "--dataset-path: not given"),
        (("serve", "--json", "/nowhere/at/all.json"), "--json: /nowhere/at/all.json cannot be written"),
        (("serve", "--compare", "/nowhere/at/all.json"), "--compare: /nowhere/at/all.json cannot be read"),
        (("slo", "--goodput", "ttft:5", "--start", 10, "--max-load", 5), "--start: 10, allowed is 0.01 .* to 5"),
        (
            ("slo", "--goodput", "ttft:5", "--search", "concurrency", "--start", 1.5),
            "--start: 1.5, allowed is a whole number",
        ),
        (("serve", "--images", 1), "--images: 1, allowed with --endpoint chat alone"),
        (("serve", "--images", 1, "--endpoint", "chat", "--verify"), "--images: 1, allowed without --verify"),
        (("serve", "--image-size", "20"), "--image-size: '20', allowed is WIDTHxHEIGHT in pixels"),
        (("latency", "--model", "m", "--batch-size", 0), "--batch-size: '0'"),
    ],
)
def test_bad_flags_are_named(words, message):
    with pytest.raises(ConfigError, match=message):
        run(*words)


def test_extra_body(server):
    assert serve(server, "--extra-body", '{"top_k": 3}', "--no-ignore-eos", "--temperature", 0.5) == 0
    assert (server.bodies[-1]["top_k"], server.bodies[-1]["temperature"]) == (3, 0.5)
    assert "ignore_eos" not in server.bodies[-1]
    with pytest.raises(ConfigError, match="--extra-body"):
        serve(server, "--extra-body", "[3]")


def test_no_server(server):
    server.stop()
    with pytest.raises(Unavailable, match="no answer"):
        serve(server)


@pytest.fixture
def fake_llm(monkeypatch):
    """The engines that were made: (model, keywords, calls of generate)."""
    made = []

    class LLM:
        max_model_len = 1000

        def __init__(self, model, **keywords):
            self.calls: list[tuple[list[list[int]], Any]] = []
            self.tokenizer = SimpleNamespace(
                encode=lambda text, add_special_tokens: list(range(1, 1 + len(text.split())))
            )
            made.append((model, keywords, self.calls))

        def generate(self, prompts, params):
            self.calls.append((prompts, params))
            each = params if isinstance(params, list) else [params] * len(prompts)
            return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=[1] * p.max_tokens)]) for p in each]

    module = ModuleType("penstock.llm")
    module.LLM = LLM  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "penstock.llm", module)
    return made


def test_latency(fake_llm, tmp_path):
    out = tmp_path / "out.json"
    shape = ("--batch-size", 2, "--input-len", 8, "--output-len", 3, "--num-iters", 4, "--num-iters-warmup", 1)
    assert run("latency", "--model", "m", "--dtype", "float32", "--max-num-seqs", 7, *shape, "--json", out) == 0
    ((model, keywords, calls),) = fake_llm
    assert (model, keywords) == ("m", {"dtype": "float32", "max_num_seqs": 7})
    assert [len(prompts) for prompts, _ in calls] == [2] * 5
    prompts = [tuple(prompt) for batch, _ in calls for prompt in batch]
    assert {len(prompt) for prompt in prompts} == {8}
    assert len(set(prompts)) == 10  # no batch is served from what the one before left in a cache
    assert all((p.max_tokens, p.ignore_eos, p.temperature) == (3, True, 0.0) for _, p in calls)
    result = json.loads(out.read_text())["latency"]
    assert (result["iterations"], result["output_tokens"], result["batch_ms"]["count"]) == (4, 24, 4)


def test_throughput(fake_llm, tmp_path):
    out = tmp_path / "out.json"
    shape = ("--num-prompts", 20, "--random-input-len", 10, "--random-output-len", 10, "--random-range-ratio", 0.5)
    assert run("throughput", "--model", "m", *shape, "--vocab-size", 50, "--num-warmups", 2, "--json", out) == 0
    ((_, keywords, (warm_up, (prompts, params))),) = fake_llm
    assert keywords == {}
    assert len(warm_up[0]) == 2
    assert not {tuple(prompt) for prompt in warm_up[0]} & {tuple(prompt) for prompt in prompts}
    assert len(prompts) == len(params) == 20
    assert all(0 <= token < 50 for prompt in prompts for token in prompt)
    result = json.loads(out.read_text())["throughput"]
    assert result["output_tokens"] == sum(p.max_tokens for p in params)
    assert result["prompt_tokens"] == sum(map(len, prompts))
