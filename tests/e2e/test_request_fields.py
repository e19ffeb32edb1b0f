"""Request fields through HTTP, with one engine and with two between which a request goes over."""

import json
import math

import httpx
import pytest

LONG = "def read(path):\n    return open(path).read()\n" * 20


@pytest.fixture(scope="module")
def post(server):
    def ask(path="completions", **body):
        body = {"model": "demo", "temperature": 0, **body}
        response = httpx.post(f"{server.url}/v1/{path}", json=body, timeout=60)
        if not body.get("stream"):
            return response.json()
        lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
        assert lines.pop() == "[DONE]"
        return [json.loads(line) for line in lines]

    return ask


def test_min_tokens_and_bad_words(post):
    (free,) = post(prompt="import os", max_tokens=20, return_token_ids=True)["choices"]
    stop = free["token_ids"][2]
    for stream in (False, True):
        ask = {"prompt": "import os", "max_tokens": 20, "stop_token_ids": [stop], "return_token_ids": True}
        answer = post(**ask, min_tokens=10, stream=stream)
        choices = [choice for event in answer for choice in event["choices"]] if stream else answer["choices"]
        tokens = [token for choice in choices for token in choice.get("token_ids") or ()]
        assert len(tokens) >= 10
        assert stop not in tokens[:9]
    word = next(word for word in free["text"].split() if word.isalpha())
    (without,) = post(prompt="import os", max_tokens=20, bad_words=[word], return_token_ids=True)["choices"]
    assert without["token_ids"] != free["token_ids"]


def test_all_of_the_vocabulary(post):
    (choice,) = post(prompt="import os", max_tokens=1, prompt_logprobs=-1)["choices"]
    _, *scored = choice["prompt_logprobs"]
    assert scored
    for entry in scored:
        assert sorted(map(int, entry)) == list(range(len(entry)))
        assert len(entry) > 4000
        assert sum(math.exp(of_token["logprob"]) for of_token in entry.values()) == pytest.approx(1, abs=1e-3)
        assert {of_token["rank"] for of_token in entry.values()} == set(range(1, len(entry) + 1))


def test_a_prompt_is_scored_the_same_however_it_is_asked(post):
    scored = post(prompt=LONG, max_tokens=3, prompt_logprobs=0, return_token_ids=True)["choices"][0]
    assert scored["prompt_logprobs"][0] is None
    values = [
        entry[str(token)]["logprob"]
        for token, entry in zip(scored["prompt_token_ids"][1:], scored["prompt_logprobs"][1:], strict=True)
    ]
    assert len(values) > 128
    whole = post(prompt=LONG, echo=True, logprobs=0, max_tokens=0)
    assert whole["choices"][0]["text"] == LONG
    assert whole["usage"]["completion_tokens"] == 0
    assert whole["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    streamed = post(prompt=LONG, echo=True, logprobs=0, max_tokens=0, stream=True)
    found = [choice["logprobs"] for event in streamed for choice in event["choices"] if choice["logprobs"]]
    for logprobs in (whole["choices"][0]["logprobs"], *found):
        assert logprobs["token_logprobs"][0] is None
        assert logprobs["token_logprobs"][1:] == pytest.approx(values, abs=1e-3)
        assert "".join(logprobs["tokens"]) == LONG
    assert len(found) == 1


def test_salts_keep_prefixes_apart(post):
    def cached(salt):
        ask = {"messages": [{"role": "user", "content": LONG}], "max_tokens": 2}
        answer = post("chat/completions", **ask, **({"cache_salt": salt} if salt else {}))
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert [cached("a"), cached("b"), cached(None)] == [0, 0, 0]
    assert min(cached("a"), cached("b"), cached(None)) >= 64


def test_a_chat_goes_on_with_its_last_message(post):
    talk = [{"role": "user", "content": "What does os.path.join do?"}, {"role": "assistant", "content": "It joins"}]
    ask = {"messages": talk, "max_tokens": 4, "return_token_ids": True}
    going_on = post("chat/completions", **ask, continue_final_message=True)
    anew = post("chat/completions", **ask)
    assert len(going_on["prompt_token_ids"]) < len(anew["prompt_token_ids"])
    assert anew["prompt_token_ids"][: len(going_on["prompt_token_ids"])] == going_on["prompt_token_ids"]
    wrong = post("chat/completions", **ask, continue_final_message=True, add_generation_prompt=True)
    assert wrong["error"]["param"] == "continue_final_message"


def test_usage_so_far_and_truncation(post):
    options = {"include_usage": True, "continuous_usage_stats": True}
    *events, last = post(
        prompt=LONG, max_tokens=6, stream=True, stream_options=options, truncate_prompt_tokens=7, ignore_eos=True
    )
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert last["usage"]["prompt_tokens"] == 7
    assert last["usage"]["completion_tokens"] == counts[-1] == 6


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("min_tokens", 17),
        ("bad_words", [""]),
        ("allowed_token_ids", [10**6]),
        ("tools", [{"type": "function"}]),
    ],
)
def test_what_cannot_be_served_is_named(post, field, value):
    error = post(prompt="a", **{field: value})["error"]
    assert error["param"] == field
    assert error["message"].startswith(field)


def test_beam_search(post):
    ask = {"n": 4, "max_tokens": 12, "use_beam_search": True, "return_token_ids": True, "temperature": 1}
    whole = post(prompt=LONG, logprobs=1, **ask)
    choices = whole["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    assert len({tuple(choice["token_ids"]) for choice in choices}) == 4
    assert whole["usage"]["completion_tokens"] == sum(len(choice["token_ids"]) for choice in choices)
    length = whole["usage"]["prompt_tokens"]
    scores = [
        sum(choice["logprobs"]["token_logprobs"])
        / (length + len(choice["token_ids"]) - (choice["finish_reason"] == "stop"))
        for choice in choices
    ]
    assert scores == sorted(scores, reverse=True)
    again = post(prompt=LONG, **ask)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= 64
    assert [choice["text"] for choice in again["choices"]] == [choice["text"] for choice in choices]
    # a single beam is the greedy output
    (greedy,) = post(prompt=LONG, max_tokens=12, ignore_eos=True)["choices"]
    (single,) = post(prompt=LONG, ignore_eos=True, **(ask | {"n": 1}))["choices"]
    assert (single["text"], single["finish_reason"]) == (greedy["text"], "length")
    talk = post("chat/completions", messages=[{"role": "user", "content": "What does len do?"}], **ask)
    assert [choice["index"] for choice in talk["choices"]] == [0, 1, 2, 3]
    assert all(choice["message"]["content"] for choice in talk["choices"])


def test_a_beam_search_of_what_is_valid(post):
    ask = {"n": 4, "max_tokens": 12, "use_beam_search": True}
    items = ["import os", "import sys", "from os import path"]
    found = post(prompt=LONG, structured_outputs={"choice": items}, **(ask | {"n": 40}))["choices"]
    assert {choice["text"] for choice in found} == {*items}
    assert [choice["index"] for choice in found] == list(range(len(found)))
    best = post(prompt=LONG, structured_outputs={"choice": items}, **ask)["choices"]
    assert {choice["text"] for choice in best} <= {*items}
    word = {"type": "json_schema", "json_schema": {"name": "w", "schema": {"enum": ["yes", "no"]}}}
    talk = post("chat/completions", messages=[{"role": "user", "content": "Well?"}], response_format=word, **ask)
    said = {choice["message"]["content"] for choice in talk["choices"]}
    assert said
    assert said <= {'"yes"', '"no"'}


@pytest.mark.parametrize(
    ("field", "more"),
    [
        ("n", {"n": 129}),
        ("max_tokens", {"n": 60, "max_tokens": 4000}),
        ("logit_bias", {"logit_bias": {"1": 2}}),
        ("stop", {"stop": ["x"]}),
    ],
)
def test_a_beam_search_that_cannot_be_is_named(post, field, more):
    error = post(**{"prompt": "x", "max_tokens": 4, "use_beam_search": True, **more})["error"]
    assert error["param"] == field
    assert error["type"] == "invalid_request_error"
