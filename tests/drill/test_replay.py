"""Recorded requests: what is sent again, what cannot be, and what is said of the answers."""

import asyncio
import json
import struct
from base64 import b64encode

import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from hypothesis import given
from hypothesis import strategies as st

from penstock.api.completions import CompletionBody
from penstock.api.schema import parse, sampling_params
from penstock.bench.client import Client
from penstock.cli.main import main
from penstock.core.clock import SystemClock
from penstock.core.errors import ConfigError, InvalidRequest, Unavailable
from penstock.core.sampling import SamplingParams
from penstock.drill.replay import (
    Choice,
    Difference,
    Pace,
    Target,
    body_of,
    chosen,
    compare,
    find_target,
    replay,
    why_not,
)
from penstock.service.request_record import VERSION, RecordedOutput, RecordedRequest, RequestRecord, recorded_params

EVERY_DEFAULT_DIFFERS = {"temperature": 0.125, "top_k": 3, "top_p": 0.5, "min_p": 0.5, "repetition_penalty": 1.5}


def request(name="r", at=0.0, outputs=((4, 5, "stop"),), params=None, **changes):
    """An output is its tokens, and its finish reason if it had ended."""
    made = [
        RecordedOutput([t for t in o if type(t) is int], next((t for t in o if type(t) is str), None)) for o in outputs
    ]
    values = {"model": "m", "prompt": [1, 2], "max_tokens": 9, "seed": 7, "fingerprints": ["f00d"], "outputs": made}
    values |= {"params": recorded_params(params or SamplingParams(n=len(outputs) or 1))} | changes
    return RecordedRequest(version=VERSION, id=name, at=at, seconds=0.5, **values)


def written(folder, *requests):
    (folder / "frontend-0.jsonl").write_bytes(b"".join(msgspec.json.encode(one) + b"\n" for one in requests))
    return folder


@st.composite
def some_params(draw):
    """Of requests that a server takes."""
    texts = st.text("abc", min_size=1, max_size=3)
    ids = st.lists(st.integers(0, 99), max_size=3)
    fields = {
        "temperature": st.floats(0, 2),
        "top_k": st.integers(0, 50),
        "top_p": st.floats(0.01, 1),
        "min_p": st.floats(0, 1),
        "presence_penalty": st.floats(-2, 2),
        "frequency_penalty": st.floats(-2, 2),
        "repetition_penalty": st.floats(0.1, 2),
        "logit_bias": st.dictionaries(st.integers(0, 99), st.floats(-100, 100), max_size=3),
        "stop": st.lists(texts, max_size=3),
        "stop_token_ids": ids,
        "ignore_eos": st.booleans(),
        "min_tokens": st.integers(0, 12),
        "bad_words": st.lists(texts, max_size=2),
        "allowed_token_ids": st.lists(st.integers(0, 99), min_size=1, max_size=3),
        "structured_outputs": st.sampled_from(
            [{"regex": "a+"}, {"choice": ["a", "b"]}, {"json": {"type": "object"}, "whitespace_pattern": " "}]
        ),
        "n": st.integers(1, 4),
        "logprobs": st.integers(-1, 20),
        "prompt_logprobs": st.integers(-1, 20),
        "skip_special_tokens": st.booleans(),
        "include_stop_str_in_output": st.booleans(),
        "use_beam_search": st.booleans(),
        "length_penalty": st.floats(-2, 2),
        "early_stopping": st.sampled_from([True, False, "never"]),
        "truncate_prompt_tokens": st.just(2),
    }
    given = draw(st.fixed_dictionaries({}, optional=fields))
    try:
        return SamplingParams(max_tokens=None, **given)
    except InvalidRequest:
        return SamplingParams(max_tokens=None)


@given(some_params(), st.integers(-(2**63), 2**63 - 1), st.integers(1, 12), st.booleans())
def test_a_request_asks_for_the_same_when_it_is_sent_again(params, seed, max_tokens, ended):
    """Through JSON, by a server with defaults of its own."""
    tokens = [1] * (max_tokens if ended else max(1, max_tokens - 2))
    outputs = [(*tokens, "length") if ended else tokens] * params.n
    sent = request(outputs=outputs, params=params, seed=seed, max_tokens=max_tokens)
    known = msgspec.json.decode(msgspec.json.encode(sent), type=RecordedRequest)
    body, ignored = parse(json.dumps(body_of(known, "m")).encode(), CompletionBody)
    again = sampling_params(body, EVERY_DEFAULT_DIFFERS, 100)
    assert not ignored
    assert (body.prompt, body.stream, body.return_token_ids, again.seed) == ([1, 2], None, True, seed)
    assert again.max_tokens == (sent.max_tokens if ended else len(tokens))
    right = recorded_params(params)
    right["min_tokens"] = min(params.min_tokens, again.max_tokens)
    if params.logprobs == -1:
        right["logprobs"] = 20
    assert recorded_params(again) == right


def test_targets_and_priorities_are_those_that_were_recorded():
    body, _ = parse(json.dumps(body_of(request(ttft_ms=50.0, priority=3), "m")).encode(), CompletionBody)
    assert (body.slo.ttft_ms, body.slo.tpot_ms, body.priority, body.service_tier) == (50.0, None, 3, None)
    assert body_of(request(offline=True), "m")["service_tier"] == "flex"


@pytest.mark.parametrize(
    ("recorded", "came", "position", "pair"),
    [
        ((4, 5, "stop"), ([4, 5], "stop"), None, None),
        ((4, 5, "stop"), ([4, 6], "stop"), 1, (5, 6)),
        ((4, 5, "stop"), ([4, 5], "length"), 2, ("stop", "length")),
        ((4, 5, "stop"), ([4, 5, 6], "length"), 2, ("stop", 6)),
        ((4, 5, "length"), ([4], "stop"), 1, (5, "stop")),
        (("length",), ([4], "stop"), 0, ("length", 4)),
        ((4, 5), ([4, 5], "length"), None, None),
        ((4, 5), ([4, 5, 6], "length"), None, None),
        ((4, 5), ([4], "stop"), 1, (5, "stop")),
        ((4, 5), ([9, 5], "length"), 0, (4, 9)),
        ((), ([9], "length"), None, None),
    ],
)
def test_the_first_difference_of_each_output(recorded, came, position, pair):
    same = (7, "stop"), Choice(0, "stop", [7])
    found = compare(request(outputs=[same[0], recorded]), [same[1], Choice(1, came[1], came[0])])
    assert found == ([] if position is None else [Difference("r", 1, position, *pair)])


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (request(), None),
        (request(outputs=[(), (5,)]), None),
        (request(fingerprints=["cafe"]), "it ran on another model, cafe; this is f00d"),
        (request(fingerprints=[]), "it ran on another model, an unknown one; this is f00d"),
        (request(fingerprints=["f00d", "cafe"]), "it went on at another checkpoint"),
        (request(outputs=[], pooling="mean", seed=None), "there is no embedding of it in the record"),
        (request(outputs=[], pooling="mean", seed=None, embedding=[0.5]), None),
        (request(seed=None), "its seed is not known"),
        (request(outputs=[(), ()], failure="the client left"), "it ended before its first token: the client left"),
    ],
)
def test_what_cannot_be_compared_is_named(made, why):
    assert why_not(made, "f00d") == why
    assert (why_not(made, None) is None) == (why is None or "model" in why or "checkpoint" in why)


class Served(Client):
    """A server that answers as a test says."""

    def __init__(self, answer, cards=({"id": "m", "fingerprint": "f00d"},), status=200):
        self.clock, self.base_url = SystemClock(), "http://nowhere"
        self.answer, self.cards, self.status = answer, cards, status
        self.sent, self.running, self.most = [], 0, 0

    async def get(self, path):
        return self.status, json.dumps({"data": self.cards})

    async def post(self, path, body, name="", *, patient=False):
        self.sent.append((name, self.clock.now()))
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(0.002)
        self.running -= 1
        return self.answer(body, name)


def tokens(*outputs, finish="stop"):
    choices = [{"index": i, "finish_reason": finish, "token_ids": [*o], "text": ""} for i, o in enumerate(outputs)]
    return 200, json.dumps({"choices": choices[::-1], "usage": {}})


def run(folder, client, pace, requests=()):
    done = []

    async def go():
        target = await find_target(client, None, any_model=False)
        with RequestRecord(folder) as record:
            return await replay(record, chosen(record, requests, str(folder)), target, pace, done.append)

    result = asyncio.run(go())
    assert sum(done) == result.requests
    return result


def test_every_request_is_accounted_for(tmp_path):
    folder = written(
        tmp_path,
        request("two", 2.0, outputs=[(4, "stop"), (5, "stop")]),
        request("one", 1.0),
        request("other", 3.0, outputs=[(4, "stop"), (5, "stop")]),
        request("refused", 4.0),
        request("gone", 5.0),
        request("few", 6.0, outputs=[(4, "stop"), (5, "stop")]),
        request("odd", 7.0),
        request("left", 8.0, outputs=[(4,)]),
        request("elsewhere", 9.0, fingerprints=["cafe"]),
    )

    def answer(body, name):
        match name.removeprefix("replay-"):
            case "one":
                return tokens((4, 5))
            case "two":
                return tokens((4,), (5,))
            case "other":
                return tokens((4,), (6,))
            case "refused":
                return 429, '{"error": {"message": "the queue is full"}}'
            case "gone":
                raise Unavailable("no answer")
            case "odd":
                return 200, '{"choices": [{"text": "a"}]}'
        return tokens((4,))

    served = Served(answer)
    result = run(folder, served, Pace(speed=None, at_once=2))
    assert [name for name, _ in served.sent] == [
        f"replay-{name}" for name in ["one", "two", "other", "refused", "gone", "few", "odd", "left"]
    ]
    assert served.most == 2
    assert (result.requests, result.same, result.beginnings, result.differ) == (9, 3, 1, 1)
    assert (result.outputs, result.tokens, result.good) == (6, 7, False)
    assert result.differences == [Difference("other", 1, 0, 5, 6)]
    assert {note.request: note.why.partition(" (")[0] for note in result.failed} == {
        "refused": "http 429: the queue is full",
        "gone": "no answer",
        "few": "1 outputs came, 2 are recorded",
        "odd": "an answer without token ids or finish reasons",
    }
    assert [note.request for note in result.skipped] == ["elsewhere"]
    document = result.document()
    assert (document["differ"], document["failed"], document["not_compared"]) == (1, 4, 1)
    assert not run(folder, served, Pace(speed=None, at_once=1), ["elsewhere"]).good, "nothing was compared"
    assert run(folder, served, Pace(speed=None, at_once=1), ["cmpl-two", "one"]).good


def test_numbers_may_differ_by_a_tolerance(tmp_path):
    scored = request("scored")
    scored.outputs[0].logprobs = [-0.5, -1.5]
    longer = request("longer", 1.0, outputs=[(4,)])  # as it was left early, the beginning counts
    longer.outputs[0].logprobs = [-0.5]
    embedded = request("embedded", 2.0, outputs=[], pooling="mean", seed=None, embedding=[0.5, 0.25])
    folder = written(tmp_path, scored, longer, embedded)
    vector = [0.5, 0.25]

    def answer(body, name):
        if "input" in body:
            assert (body["input"], body["normalize"]) == ([[1, 2]], False)
            packed = b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
            return 200, json.dumps({"data": [{"embedding": packed}]})
        status, text = tokens((4, 5))
        made = json.loads(text)
        made["choices"][0]["logprobs"] = {"token_logprobs": [-0.5, -1.625]}
        return status, json.dumps(made)

    def result(tolerance):
        async def go():
            target = await find_target(Served(answer), None, any_model=False, tolerance=tolerance)
            with RequestRecord(folder) as record:
                return await replay(record, record.lines, target, Pace(speed=None, at_once=1), lambda count: None)

        return asyncio.run(go())

    near = result(0.125)
    assert (near.good, near.same, near.numbers, near.equal, near.largest_gap) == (True, 3, 5, 4, 0.125)
    assert result(0.1).differences == [Difference("scored", 0, 1, -1.5, -1.625, "logprob")]
    vector[:] = [0.5]
    assert result(1.0).differences == [Difference("embedded", 0, 1, 0.25, "none", "embedding")]


@pytest.mark.parametrize("patience", [30.0, 0.5])
def test_what_is_refused_as_too_much_is_sent_again_as_long_as_there_is_time(patience):
    asked = []

    async def full_at_first(request):
        asked.append(await request.json())
        if len(asked) < 3:
            wait = "0" if patience > 1 else "1"
            return web.json_response({"error": {"message": "full"}}, status=429, headers={"Retry-After": wait})
        return web.json_response({})

    async def go():
        app = web.Application()
        app.router.add_post("/v1/completions", full_at_first)
        async with TestServer(app) as server, Client(str(server.make_url("/")), timeout=patience) as client:
            told = await client.post("/v1/completions", {"prompt": "a"}), await client.post("/x", {}, patient=True)
            return [status for status, _ in told], (await client.post("/v1/completions", {}, patient=True))[0]

    impatient, status = asyncio.run(go())
    assert impatient == [429, 404]
    assert (status, len(asked)) == ((200, 3) if patience > 1 else (429, 2))


def test_requests_keep_their_times_at_a_speed(tmp_path):
    folder = written(tmp_path, *(request(f"r-{i}", 1000 + 0.04 * i) for i in range(4)))
    served = Served(lambda body, name: tokens((4, 5)))
    result = run(folder, served, Pace(speed=2.0, at_once=None), ["r"])
    times = [at for _, at in served.sent]
    assert all(time - times[0] >= 0.02 * i - 0.002 for i, time in enumerate(times))
    assert result.good
    assert result.same == 4


def test_mistakes_are_named(tmp_path, capsys):
    served = Served(None)
    folder = written(tmp_path, request("r-1"))
    for client, model, error, says in (
        (Served(None, status=503), None, Unavailable, "does not serve"),
        (Served(None, status=404), None, ConfigError, "^--url: .* answered 404"),
        (Served(None, cards=[{}]), None, ConfigError, "^--url: .* is not OpenAI's shape"),
        (served, "x", ConfigError, "^--model: x, served at http://nowhere: m"),
        (Served(None, cards=[{"id": "m"}]), None, Unavailable, "does not say which model"),
    ):
        with pytest.raises(error, match=says):
            asyncio.run(find_target(client, model, any_model=False))
    nameless = Served(None, cards=[{"id": "m"}])
    assert asyncio.run(find_target(nameless, None, any_model=True)) == Target(nameless, "m", None)
    with RequestRecord(folder) as record:
        with pytest.raises(ConfigError, match=r"^--request: r-2 is not in"):
            chosen(record, ["r-1", "r-2"], str(folder))
        assert chosen(record, ["r", "r-1"], str(folder)) == record.lines
    for argv, says in (
        (["replay", str(tmp_path / "absent")], "RECORD: "),
        (["replay", str(folder), "--url", "nowhere"], "--url: nowhere, allowed is http"),
        (["replay", str(folder), "--speed", "0"], "--speed: '0', allowed is a number above 0, or inf"),
        (["replay", str(folder), "--json", str(tmp_path)], "--json: "),
    ):
        assert main(argv) == 2, argv
        assert f"penstock: {says}" in capsys.readouterr().err
    (folder / "frontend-0.jsonl").write_bytes(b"")
    assert main(["replay", str(folder)]) == 2
    assert "has no requests" in capsys.readouterr().err
