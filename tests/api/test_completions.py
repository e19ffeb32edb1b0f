from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from penstock.core.request import TokenLogprobs
from penstock.text.detokenizer import Delta

pytestmark = pytest.mark.anyio
URL = "/v1/completions"


def chunks_of(response: httpx.Response) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


async def test_whole_answer(client: httpx.AsyncClient, frontend: Any) -> None:
    response = await client.post(URL, json={"prompt": "Once"}, headers={"x-request-id": "abc"})
    body = response.json()
    assert isinstance(body.pop("created"), int)
    assert body == {
        "id": "cmpl-abc",
        "object": "text_completion",
        "model": "org/tiny",
        "choices": [
            {
                "index": 0,
                "text": "Hello",
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
                "prompt_logprobs": None,
                "token_ids": None,
                "prompt_token_ids": None,
            }
        ],
        "service_tier": None,
        "system_fingerprint": "f00d",
        "kv_transfer_params": None,
        "usage": {
            "prompt_tokens": 4,
            "completion_tokens": 6,
            "total_tokens": 10,
            "prompt_tokens_details": {"cached_tokens": 2},
        },
    }
    assert frontend.submitted[0].params.max_tokens == 16


async def test_stream(client: httpx.AsyncClient) -> None:
    body = {"prompt": "Once", "stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = chunks_of(await client.post(URL, json=body))
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "Hello"
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == ["stop"]
    assert last["choices"] == []
    assert last["usage"]["total_tokens"] == 10


async def test_a_token_that_has_no_text_yet_is_an_event_at_once(url: str, frontend: Any) -> None:
    frontend.script = lambda generation: generation.put(Delta(0, "", [0xC3]))
    options = {"include_usage": True, "continuous_usage_stats": True}
    async with (
        httpx.AsyncClient(timeout=20) as client,
        client.stream("POST", url + URL, json={"prompt": "x", "stream": True, "stream_options": options}) as response,
    ):
        lines = (line async for line in response.aiter_lines() if line)
        first = json.loads((await anext(lines)).removeprefix("data: "))
        frontend.submitted[0].put(Delta(0, "éa", [0xA9, 97], finish_reason="length"))
        second = json.loads((await anext(lines)).removeprefix("data: "))
    assert [event["choices"][0]["text"] for event in (first, second)] == ["", "éa"]
    assert [event["usage"]["completion_tokens"] for event in (first, second)] == [1, 3]


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("ab", [b"ab"]),
        (["ab", "c"], [b"ab", b"c"]),
        ([97, 98], [b"ab"]),
        ([[97, 98], [99]], [b"ab", b"c"]),
    ],
)
async def test_four_kinds_of_prompts(
    client: httpx.AsyncClient, frontend: Any, prompt: object, expected: list[bytes]
) -> None:
    assert (await client.post(URL, json={"prompt": prompt})).status_code == 200
    assert [bytes(generation.prompt) for generation in frontend.submitted] == expected


@pytest.mark.parametrize("stream", [True, False])
async def test_choices_are_numbered_prompt_by_prompt(client: httpx.AsyncClient, frontend: Any, stream: bool) -> None:
    def script(generation: Any) -> None:
        for index in range(2):
            generation.say(f"{bytes(generation.prompt).decode()}{index}", index, finish="length")

    frontend.script = script
    response = await client.post(
        URL, json={"prompt": ["a", "b"], "n": 2, "stream": stream}, headers={"x-request-id": "r"}
    )
    texts = dict.fromkeys(range(4), "")
    for answer in chunks_of(response) if stream else [response.json()]:
        for choice in answer["choices"]:
            texts[choice["index"]] += choice["text"]
    assert list(texts.values()) == ["a0", "a1", "b0", "b1"]
    assert frontend.request_ids == ["r"]
    if not stream:
        assert response.json()["usage"]["prompt_tokens"] == 2
        assert response.json()["usage"]["completion_tokens"] == 8


@pytest.mark.parametrize("prompt", ["Once ", [79, 110]])
async def test_echo(client: httpx.AsyncClient, prompt: object) -> None:
    said = {"Once ": "Once Hello"}.get(str(prompt), "OnHello")
    body = {"prompt": prompt, "echo": True}
    assert (await client.post(URL, json=body)).json()["choices"][0]["text"] == said
    chunks = chunks_of(await client.post(URL, json=body | {"stream": True}))
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == said


async def test_special_tokens_are_added_unless_unwanted(client: httpx.AsyncClient, frontend: Any) -> None:
    await client.post(URL, json={"prompt": "special"})
    await client.post(URL, json={"prompt": "special", "add_special_tokens": False})
    assert [generation.prompt[-1] for generation in frontend.submitted] == [256, ord("l")]


async def test_token_ids_on_request(client: httpx.AsyncClient) -> None:
    body = {"prompt": ["a", "b"], "return_token_ids": True}
    choices = (await client.post(URL, json=body)).json()["choices"]
    assert [choice["prompt_token_ids"] for choice in choices] == [[97], [98]]
    assert choices[1]["token_ids"] == [*b"Hello", 256]
    chunks = [chunk["choices"][0] for chunk in chunks_of(await client.post(URL, json=body | {"stream": True}))]
    assert [(c["index"], c["prompt_token_ids"]) for c in chunks if "prompt_token_ids" in c] == [(0, [97]), (1, [98])]


@pytest.mark.parametrize("stream", [True, False])
async def test_logprobs_know_where_each_token_begins(client: httpx.AsyncClient, frontend: Any, stream: bool) -> None:
    """A character of three tokens is one character; the special token at the end is no text."""

    def script(generation: Any) -> None:
        for text, tokens in (("a", [*b"a", 0xE2]), ("", [0x82]), ("€", [0xAC]), ("b", [*b"b", 256])):
            generation.put(Delta(0, text, tokens, [TokenLogprobs(-1.0, 2, [(120, -0.25)]) for _ in tokens]))
        generation.put(Delta(0, "", [], None, "stop"))

    frontend.script = script
    response = await client.post(URL, json={"prompt": "x", "logprobs": 1, "stream": stream})
    answers = chunks_of(response) if stream else [response.json()]
    found = [choice["logprobs"] for answer in answers for choice in answer["choices"] if choice["logprobs"]]
    assert [offset for piece in found for offset in piece["text_offset"]] == [0, 1, 1, 1, 2, 3]
    assert [token for piece in found for token in piece["tokens"]] == ["a", "�", "�", "�", "b", "<eos>"]
    assert found[0]["token_logprobs"][0] == -1.0
    assert found[0]["top_logprobs"][0] == {"x": -0.25, "a": -1.0}


LONG_PROMPT = [1] * 120  # of 128


@pytest.mark.parametrize("asked", [9, 16, 50, 99])
@pytest.mark.parametrize("several", [False, True])
async def test_more_output_than_fits_is_refused_where_somebody_asked_for_it(
    client: httpx.AsyncClient, frontend: Any, asked: int, several: bool
) -> None:
    """Also when it is what nobody would have had to ask for."""
    frontend.default_sampling = {"max_tokens": 50}
    prompt = [[1], LONG_PROMPT] if several else LONG_PROMPT
    error = (await client.post(URL, json={"prompt": prompt, "max_tokens": asked})).json()["error"]
    assert error["param"] == "max_tokens"
    assert f"max_tokens: {asked} is too large" in error["message"]
    assert f"120 input tokens ({asked} > 128 - 120)" in error["message"]
    assert not frontend.submitted


@pytest.mark.parametrize("default", [None, 50])
async def test_what_nobody_asked_for_is_cut_to_what_fits(
    client: httpx.AsyncClient, frontend: Any, default: int | None
) -> None:
    frontend.default_sampling = {} if default is None else {"max_tokens": default}
    for body in ({}, {"max_tokens": None}, {"max_tokens": 8}):
        response = await client.post(URL, json={"prompt": LONG_PROMPT, **body})
        assert response.status_code == 200, response.text


async def test_prompt_logprobs_have_vllms_shape(client: httpx.AsyncClient) -> None:
    body = {"prompt": [97, 98], "prompt_logprobs": 1, "n": 2}
    for choice in (await client.post(URL, json=body)).json()["choices"]:
        assert choice["prompt_logprobs"] == [
            None,
            {
                "98": {"logprob": -24.5, "rank": 2, "decoded_token": "b"},
                "256": {"logprob": -0.125, "rank": 1, "decoded_token": "<eos>"},
            },
        ]
    plain = (await client.post(URL, json={"prompt": [97, 98]})).json()["choices"][0]
    assert plain["prompt_logprobs"] is None


async def test_all_of_the_vocabulary_for_as_much_of_a_prompt_as_is_sane(
    client: httpx.AsyncClient, frontend: Any
) -> None:
    frontend.vocab_size = 1 << 12  # of which 64 places may be named
    body = {"prompt": [[1] * 33, [2] * 17], "prompt_logprobs": -1}
    assert (await client.post(URL, json=body)).status_code == 200
    assert {generation.params.prompt_logprobs for generation in frontend.submitted} == {-1}
    response = await client.post(URL, json=body | {"n": 2})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt_logprobs")
    assert "all 4096 tokens of the vocabulary in 96 places, at most 64" in response.json()["error"]["message"]
    assert len(frontend.submitted) == 2


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("count", [1, 2])
async def test_an_echo_has_its_logprobs(client: httpx.AsyncClient, stream: bool, count: int) -> None:
    body = {"prompt": "ab", "echo": True, "logprobs": 1, "stream": stream, "n": count}
    response = await client.post(URL, json=body)
    for index in range(count):
        answers = chunks_of(response) if stream else [response.json()]
        choices = [choice for answer in answers for choice in answer["choices"] if choice["index"] == index]
        assert "".join(choice["text"] for choice in choices) == "abHello"
        found = [choice["logprobs"] for choice in choices if choice["logprobs"] is not None]
        assert [token for piece in found for token in piece["tokens"]] == [*"abHello", "<eos>"]
        assert found[0]["token_logprobs"][:3] == [None, -24.5, -0.5]
        assert found[0]["top_logprobs"][:2] == [None, {"<eos>": -0.125, "b": -24.5}]
        assert [offset for piece in found for offset in piece["text_offset"]] == list(range(8))


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("logprobs", [0, None])
async def test_a_prompt_is_scored_without_generating(
    client: httpx.AsyncClient, frontend: Any, stream: bool, logprobs: int | None
) -> None:
    body = {"prompt": ["ab", "c"], "echo": True, "max_tokens": 0, "logprobs": logprobs, "stream": stream}
    body |= {"stream_options": {"include_usage": True}} if stream else {}
    response = await client.post(URL, json=body)
    answers = chunks_of(response) if stream else [response.json()]
    choices = [choice for answer in answers for choice in answer["choices"]]
    for index, text in enumerate(["ab", "c"]):
        mine = [choice for choice in choices if choice["index"] == index]
        assert "".join(choice["text"] for choice in mine) == text
        assert mine[-1]["finish_reason"] == "length"
        scores = [piece["token_logprobs"] for choice in mine if (piece := choice["logprobs"]) is not None]
        assert [s for piece in scores for s in piece] == ([] if logprobs is None else [None, -24.5][: len(text)])
    assert answers[-1]["usage"]["completion_tokens"] == 0
    assert answers[-1]["usage"]["total_tokens"] == 3
    assert [generation.params.max_tokens for generation in frontend.submitted] == [1, 1]


async def test_special_tokens_stand_in_an_echo_where_they_were_written(client: httpx.AsyncClient) -> None:
    """The tokenizer puts an <eos> after this text that is not part of it."""
    body = {"prompt": "special", "echo": True, "logprobs": 0, "max_tokens": 0}
    found = (await client.post(URL, json=body)).json()["choices"][0]["logprobs"]
    assert found["tokens"] == [*"special", "<eos>"]
    assert found["text_offset"] == [0, 1, 2, 3, 4, 5, 6, 7]


async def test_the_end_of_a_long_prompt_is_kept(client: httpx.AsyncClient, frontend: Any) -> None:
    body = {"prompt": "abcdef", "truncate_prompt_tokens": 2, "echo": True, "return_token_ids": True}
    choice = (await client.post(URL, json=body)).json()["choices"][0]
    assert choice["text"] == "efHello"
    assert choice["prompt_token_ids"] == [101, 102]
    assert (await client.post(URL, json={"prompt": [7] * 500, "truncate_prompt_tokens": -1})).status_code == 200
    assert [len(generation.prompt) for generation in frontend.submitted] == [2, 128 - 16]


async def test_a_salt_goes_to_the_engine(client: httpx.AsyncClient, frontend: Any) -> None:
    await client.post(URL, json={"prompt": ["a", "b"], "cache_salt": "mine"})
    await client.post(URL, json={"prompt": "a"})
    assert frontend.salts == ["mine", ""]


@pytest.mark.parametrize("continuous", [True, False, None])
async def test_usage_in_every_event(client: httpx.AsyncClient, continuous: bool | None) -> None:
    options = {"include_usage": True, "continuous_usage_stats": continuous}
    body = {"prompt": "ab", "stream": True, "stream_options": options, "return_token_ids": True}
    *chunks, last = chunks_of(await client.post(URL, json=body))
    assert last["usage"]["completion_tokens"] == 6
    counts = [chunk["usage"] and chunk["usage"]["total_tokens"] for chunk in chunks]
    assert counts == ([2, 8] if continuous else [None, None])  # the first one has the prompt's tokens
    assert [chunk["choices"][0]["token_ids"] for chunk in chunks] == [[], [*b"Hello", 256]]
