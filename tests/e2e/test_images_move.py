"""Requests with images are handed over after their prefill, and outlive the engines that they are on."""

import json
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import httpx
import pytest

from penstock.nn import native
from tests.e2e.test_images import drawn, said, url
from tests.helpers.deployments import DEMO, deployed
from tests.helpers.servers import serving
from tests.helpers.waiting import eventually
from tools.make_checkpoint import write

pytest.importorskip("transformers")
pytest.importorskip("PIL.Image")
pytestmark = pytest.mark.slow
LENGTH = 400  # tokens


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    write("qwen2.5-vl-tiny", folder)
    return folder


def body(colour: str, **options):
    parts = [{"type": "text", "text": "What is it?"}, {"type": "image_url", "image_url": {"url": url(drawn(colour))}}]
    parts.append({"type": "image_url", "image_url": {"url": url(drawn("black", 300, 300))}})
    return {
        "model": "tiny",
        "messages": [{"role": "user", "content": parts}],
        "max_tokens": LENGTH,
        "temperature": 1.0,
        "seed": 3,
        "ignore_eos": True,
        "logprobs": True,
        **options,
    }


def streamed(address: str, asked, meanwhile):
    """Tokens and log-probabilities of a stream; after some of them something is done meanwhile."""
    tokens = []
    with httpx.stream("POST", address + "/v1/chat/completions", json=asked | {"stream": True}, timeout=120) as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line[6:])
            assert "error" not in chunk, chunk
            for choice in chunk["choices"]:
                tokens += [(t["token"], t["logprob"]) for t in (choice.get("logprobs") or {}).get("content") or ()]
            if len(tokens) >= 5 and meanwhile is not None:
                meanwhile()
                meanwhile = None
    assert meanwhile is None, "it was over before"
    return tokens


@pytest.fixture(scope="module")
def expected(checkpoint):
    """What one engine says."""
    flags = [f"--{name}={value}" for name, value in DEMO.items()]
    with serving(str(checkpoint), *flags, "--served-model-name", "tiny") as server:
        return {
            colour: said(httpx.post(server.url + "/v1/chat/completions", json=body(colour), timeout=120))
            for colour in ("red", "blue")
        }


@pytest.mark.parametrize("instances", [[{"count": 2}], [{"role": "prefill"}, {"role": "decode", "count": 2}]])
def test_the_same_tokens_when_an_engine_is_killed(checkpoint, expected, instances):
    content = {"model": str(checkpoint), "engine": DEMO, "instances": instances, "policy": "least_loaded"}
    content["served-model-name"] = "tiny"
    with deployed(content) as up:
        for colour in expected:
            answer = httpx.post(up.url + "/v1/chat/completions", json=body(colour), timeout=120)
            assert said(answer) == expected[colour]

        def kill_who_decodes():
            busy = [n for n in up.pids() if n.startswith(("engine-", "decode-"))]
            before = {n: up.metric("engine_busy_seconds_total", engine=n) for n in busy}
            eventually(
                lambda: any(up.metric("engine_busy_seconds_total", engine=n) > before[n] for n in busy), what=up.log
            )
            victim = max(busy, key=lambda n: up.metric("engine_busy_seconds_total", engine=n) - before[n])
            up.wait_restarted(victim, up.kill(victim))

        assert streamed(up.url, body("red", cache_salt="new"), kill_who_decodes) == expected["red"]
        recovered = [up.metric("recoveries_total", how=how) for how in ("recompute", "cache", "fetch", "remap")]
        assert sum(recovered) >= 1, "nothing was to be recovered"
        handed_over = any("role" in each for each in instances)
        assert not handed_over or up.metric("handoffs_total") >= 3


@pytest.mark.skipif(native.missing() is not None, reason="stages of one machine meet in native code")
def test_the_same_tokens_in_stages(checkpoint, expected):
    """Only the first looks at images."""
    flags = [f"--{name}={value}" for name, value in DEMO.items()]
    flags += ["--served-model-name=tiny", "--pipeline-parallel-size=2"]
    with serving(str(checkpoint), *flags) as server, ThreadPoolExecutor(2) as pool:
        ask = partial(httpx.post, server.url + "/v1/chat/completions", timeout=120)
        answers = {colour: pool.submit(ask, json=body(colour)) for colour in expected}
        assert {colour: said(answer.result()) for colour, answer in answers.items()} == expected
