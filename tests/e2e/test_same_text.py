"""The same requests in every shape of deployment: one engine, two or prefill apart from decode, over each transport.
Some have their prompts embedded, to the same bits."""

import json
import random
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace

import pytest

from penstock.llm import LLM
from penstock.nn import native
from tests.helpers.deployments import DEMO, deployed, disaggregated
from tests.helpers.links import NEEDS_MOONCAKE

WORDS = [
    "return",
    "the",
    "list",
    "of",
    "open",
    "files",
    "and",
    "raise",
    "an",
    "error",
    "if",
    "a",
    "key",
    "is",
    "missing",
]
CLIENTS = 24
FORM = {"type": "array", "items": {"type": "object", "additionalProperties": {"type": "integer"}}, "minItems": 99}
ROOMY = DEMO | {"kv-cache-memory": "256M"}  # so that nothing has to stay where it is


def make_requests(count):
    """Prompts from a few to some hundred tokens, half of which begin alike; greedy and seeded."""
    rng = random.Random(7)
    common = " ".join(rng.choices(WORDS, k=150))
    requests = []
    for i in range(count):
        prompt = (common if rng.random() < 0.5 else "") + " ".join(
            rng.choices(WORDS, k=rng.choice([1, 5, 40, 120, 400]))
        )
        body = {"model": "demo", "prompt": prompt, "max_tokens": rng.choice([1, 2, 7, 30, 64]), "ignore_eos": True}
        body |= {"temperature": 0.0} if i % 2 else {"temperature": 0.9, "seed": i}
        if i % 6 < 2:
            body["structured_outputs"] = {"json": FORM}
        if i % 8 == 7 and native.missing() is None:  # without our kernels rows round differently in other batches
            body = {"model": "demo", "input": [prompt, "open files"], "priority": i % 3}
        requests.append(body)
    return requests


def answers(url, requests):
    """Text and end of each, or its embeddings, asked for by many clients at once."""

    def ask(body):
        data = json.dumps(body).encode()
        path = "/v1/embeddings" if "input" in body else "/v1/completions"
        request = urllib.request.Request(url + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=300) as response:
            answer = json.loads(response.read())
        if "data" in answer:
            return [one["embedding"] for one in answer["data"]]
        choice = answer["choices"][0]
        return choice["text"], choice["finish_reason"]

    with ThreadPoolExecutor(CLIENTS) as pool:
        return list(pool.map(ask, requests))


def busy(up):
    """Seconds that each engine has computed so far."""
    names = [instance["name"] for instance in json.loads(up.get("/health"))["instances"]]
    return {name: up.metric("engine_busy_seconds_total", engine=name) for name in names}


@pytest.fixture(scope="module")
def one_engine(alone):
    """What one engine answers, by number of requests."""
    known = {}

    def ask(count):
        if count not in known:
            known[count] = answers(alone.url, make_requests(count))
        return known[count]

    return ask


COUNTS = [pytest.param(24, id="24"), pytest.param(200, id="200", marks=pytest.mark.slow)]


@pytest.mark.slow
@pytest.mark.parametrize("count", [24, 200])
def test_two_engines_give_the_text_of_one(one_engine, pair, count):
    expected, before = one_engine(count), busy(pair)
    assert answers(pair.url, make_requests(count)) == expected
    assert all(busy(pair)[name] > before[name] for name in before), "one did it all"


@pytest.fixture(scope="module")
def one_engine_in_int8():
    """The same with KV in 8 bits, of an engine in this process."""
    llm = LLM("demo", device="cpu", dtype="float32", kv_cache_dtype="int8", max_model_len=4096, max_num_seqs=64)

    def answer(body):
        if "input" in body:
            return [output.embedding for output in llm.embed(body["input"])]
        sampled = {name: body[name] for name in body.keys() - {"model", "prompt"}}
        (output,) = llm.generate(body["prompt"], replace(llm.default_sampling_params(), **sampled))
        return output.text, output.outputs[0].finish_reason

    def ask(count):
        return [answer(body) for body in make_requests(count)]

    return ask


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize(
    ("kind", "kv"),
    [("shared", "auto"), ("tcp", "int8"), pytest.param("mooncake", "auto", marks=NEEDS_MOONCAKE)],
)
def test_prefill_apart_from_decode_gives_the_text_of_one(one_engine, one_engine_in_int8, apart, kind, kv, count):
    expected = (one_engine if kv == "auto" else one_engine_in_int8)(count)
    engine = ROOMY | {"kv-cache-dtype": kv}
    with ExitStack() as stack:
        up = apart if kind == "shared" else stack.enter_context(deployed(disaggregated(kind=kind, engine=engine)))
        before, worked = up.metric("handoffs_total"), busy(up)
        assert answers(up.url, make_requests(count)) == expected
        assert all(busy(up)[name] > worked[name] for name in worked), "one decoded it all"
        moved = sum(body.get("max_tokens", 0) > 1 for body in make_requests(count))
        assert up.metric("handoffs_total") - before > 0.9 * moved, "hardly anything was handed over"
        assert up.metric("kv_blocks_pulled_total", engine="decode-0") > 0
        assert up.metric("kv_pulls_failed_total", engine="decode-0") == 0


@pytest.mark.slow
def test_nothing_is_shared_where_prefix_caching_is_off(one_engine):
    engine = ROOMY | {"enable-prefix-caching": False}
    with deployed(disaggregated(engine=engine)) as up:
        assert answers(up.url, make_requests(60)) == one_engine(60)
        assert up.metric("handoffs_total") > 30
