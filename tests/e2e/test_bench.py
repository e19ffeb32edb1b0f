"""`penstock bench` against the real server and the real engine."""

import json

import pytest

from penstock.cli.main import main


def bench(tmp_path, *arguments):
    file = tmp_path / "result.json"
    assert main(["bench", *arguments, "--json", str(file)]) == 0
    return json.loads(file.read_text())


@pytest.mark.parametrize(
    ("server", "load"),
    [
        ("serve", ["--max-concurrency", "6"]),
        ("serve", ["--request-rate", "10", "--endpoint", "chat"]),
        ("up", ["--dataset-name", "prefix", "--num-prefixes", "2", "--prefix-len", "150", "--max-concurrency", "4"]),
    ],
    indirect=["server"],
)
def test_the_client_and_the_server_agree(server, tmp_path, load):
    sizes = ["--num-prompts", "30", "--random-input-len", "60", "--random-output-len", "16"]
    result = bench(tmp_path, "serve", "--base-url", server.url, *sizes, *load, "--seed", str(len(load)))
    rows = {row["name"]: row for row in result["server"]["rows"]}
    for name in ("requests", "prompt tokens", "output tokens"):
        assert rows[name]["server"] == rows[name]["client"] > 0
    for name, most in (("TTFT mean", 50), ("TPOT mean", 5)):  # ms that the way there and back may take
        assert -5 <= rows[name]["difference"] <= max(most, 0.25 * rows[name]["server"]), rows[name]


def test_slo_search_ends_with_a_load(alone, tmp_path):
    limits = ["--goodput", "ttft:60000", "--search", "concurrency", "--max-load", "4", "--num-prompts", "4"]
    sizes = ["--random-input-len", "20", "--random-output-len", "4", "--probe-seconds", "1"]
    result = bench(tmp_path, "slo", "--base-url", alone.url, *limits, *sizes)
    assert 1 <= result["best"] <= 4
    assert result["probes"]


@pytest.mark.parametrize("kind", ["latency", "throughput"])
def test_offline(tmp_path, kind):
    engine = ["--max-model-len", "512", "--max-num-batched-tokens", "512", "--graph-mode", "eager"]
    sizes = {
        "latency": ["--batch-size", "2", "--input-len", "20", "--output-len", "4", "--num-iters", "2"],
        "throughput": ["--num-prompts", "8", "--random-input-len", "20", "--random-output-len", "4"],
    }
    result = bench(tmp_path, kind, "--model", "demo", *engine, *sizes[kind])
    assert result["kind"] == kind
