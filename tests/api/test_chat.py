from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from penstock.core.errors import EngineFailure, Overloaded, PromptTooLong, Unavailable
from penstock.text.detokenizer import Delta

pytestmark = pytest.mark.anyio
URL = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]


def events(response: httpx.Response) -> list[Any]:
    """The stream's events, parsed; `[DONE]` as it is."""
    assert response.headers["content-type"].startswith("text/event-stream")
    blocks = response.text.split("\n\n")
    assert blocks.pop() == ""
    data = [block.removeprefix("data: ") for block in blocks]
    return [text if text == "[DONE]" else json.loads(text) for text in data]


def deltas(chunks: list[Any], index: int = 0) -> str:
    pieces = [c for chunk in chunks if chunk != "[DONE]" for c in chunk["choices"] if c["index"] == index]
    return "".join(c["delta"].get("content", "") for c in pieces)


async def test_whole_answer(client: httpx.AsyncClient, frontend: Any) -> None:
    response = await client.post(URL, json={"model": "tiny", "messages": HI}, headers={"x-request-id": "abc"})
    assert response.status_code == 200
    body = response.json()
    assert isinstance(body.pop("created"), int)
    prompt_tokens = len("user:hi\nassistant:")
    assert body == {
        "id": "chatcmpl-abc",
        "object": "chat.completion",
        "model": "tiny",
        "choices": [
            {
                "index": 0,
                "message": {
                    "role": "assistant",
                    "content": "Hello",
                    "refusal": None,
                    "reasoning_content": None,
                    "reasoning": None,
                },
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
                "token_ids": None,
            }
        ],
        "service_tier": None,
        "system_fingerprint": "f00d",
        "kv_transfer_params": None,
        "prompt_logprobs": None,
        "prompt_token_ids": None,
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": 6,
            "total_tokens": prompt_tokens + 6,
            "prompt_tokens_details": {"cached_tokens": 2},
        },
    }
    assert frontend.request_ids == ["abc"]
    assert frontend.submitted[0].params.max_tokens is None


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
async def test_more_output_than_fits_is_refused(client: httpx.AsyncClient, frontend: Any, field: str) -> None:
    body = {"messages": [{"role": "user", "content": "x" * 90}]}
    refused = await client.post(URL, json=body | {field: 30})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, field)
    assert "(30 > 128 - " in refused.json()["error"]["message"]
    assert not frontend.submitted
    assert (await client.post(URL, json=body | {field: 5})).status_code == 200


async def test_stream(client: httpx.AsyncClient) -> None:
    response = await client.post(URL, json={"messages": HI, "stream": True})
    *chunks, done = events(response)
    assert done == "[DONE]"
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    assert all("usage" not in chunk for chunk in chunks)
    first, last = chunks[0]["choices"][0], chunks[-1]["choices"][0]
    assert first == {
        "index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None
    }  # fmt: skip
    assert (last["delta"], last["finish_reason"]) == ({"content": "Hello"}, "stop")  # in one event, as in vLLM
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks[:-1])
    assert deltas(chunks) == "Hello"


async def test_usage_comes_last_and_is_null_before(client: httpx.AsyncClient) -> None:
    body = {"messages": HI, "stream": True, "stream_options": {"include_usage": True}}
    *chunks, last, _ = events(await client.post(URL, json=body))
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 6
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}


async def test_what_is_queued_becomes_one_event_per_output(client: httpx.AsyncClient) -> None:
    """The script says everything at once: per output a role, and its text with its end."""
    *chunks, _ = events(await client.post(URL, json={"messages": HI, "stream": True, "n": 3}))
    assert len(chunks) == 6
    assert [deltas(chunks, index) for index in range(3)] == ["Hello"] * 3
    assert [chunk["choices"][0]["index"] for chunk in chunks[:3]] == [0, 1, 2]


async def test_several_outputs_are_in_order(client: httpx.AsyncClient, frontend: Any) -> None:
    def backwards(generation: Any) -> None:
        for index in (2, 1, 0):
            generation.say(f"out{index}", index, finish="length")

    frontend.script = backwards
    body = (await client.post(URL, json={"messages": HI, "n": 3})).json()
    assert [(c["index"], c["message"]["content"]) for c in body["choices"]] == [(0, "out0"), (1, "out1"), (2, "out2")]


async def test_held_back_tokens_are_no_event_but_their_end_is(client: httpx.AsyncClient, frontend: Any) -> None:
    def script(generation: Any) -> None:
        generation.put(Delta(0, "", [1, 2]))
        generation.put(Delta(0, "", [3], finish_reason="stop", stop_reason="</s>"))

    frontend.script = script
    *chunks, _ = events(await client.post(URL, json={"messages": HI, "stream": True}))
    assert [c["choices"][0]["delta"] for c in chunks] == [{"role": "assistant", "content": ""}, {}]
    assert chunks[-1]["choices"][0]["stop_reason"] == "</s>"


async def test_token_ids_on_request(client: httpx.AsyncClient) -> None:
    body = {"messages": HI, "return_token_ids": True}
    prompt = list(b"user:hi\nassistant:")
    whole = (await client.post(URL, json=body)).json()
    assert whole["prompt_token_ids"] == prompt
    assert whole["choices"][0]["token_ids"] == [*b"Hello", 256]
    *chunks, _ = events(await client.post(URL, json=body | {"stream": True}))
    assert chunks[0]["prompt_token_ids"] == prompt
    assert all("prompt_token_ids" not in chunk for chunk in chunks[1:])
    assert [t for chunk in chunks for t in chunk["choices"][0].get("token_ids", ())] == [*b"Hello", 256]


@pytest.mark.parametrize("stream", [True, False])
async def test_logprobs(client: httpx.AsyncClient, stream: bool) -> None:
    body = {"messages": HI, "logprobs": True, "top_logprobs": 2, "stream": stream}
    response = await client.post(URL, json=body)
    choices = [c["choices"][0] for c in events(response)[:-1]] if stream else response.json()["choices"]
    content = [entry for choice in choices for entry in (choice["logprobs"] or {}).get("content", ())]
    assert [entry["token"] for entry in content] == [*"Hello", "<eos>"]
    assert content[0] == {
        "token": "H",
        "logprob": -0.5,
        "bytes": [72],
        "top_logprobs": [
            {"token": "H", "logprob": -0.5, "bytes": [72]},
            {"token": "<eos>", "logprob": -9999.0, "bytes": list(b"<eos>")},
        ],
    }


async def test_all_of_the_vocabulary_for_as_many_tokens_as_is_sane(client: httpx.AsyncClient, frontend: Any) -> None:
    frontend.vocab_size = 1 << 14  # of which 16 places may be named
    body = {"messages": HI, "logprobs": True, "top_logprobs": -1}
    assert (await client.post(URL, json=body | {"max_tokens": 16})).status_code == 200
    assert frontend.submitted[0].params.logprobs == -1
    for longer in ({"max_tokens": 17}, {"max_tokens": 9, "n": 2}, {}):
        response = await client.post(URL, json=body | longer)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "logprobs")
        assert "at most 16 places" in response.json()["error"]["message"]
    assert len(frontend.submitted) == 1


async def test_logprobs_without_alternatives(client: httpx.AsyncClient) -> None:
    body = (await client.post(URL, json={"messages": HI, "logprobs": True})).json()
    assert body["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


async def test_text_parts_and_template_arguments(client: httpx.AsyncClient, frontend: Any) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    body = {
        "messages": [{"role": "user", "content": parts}],
        "add_generation_prompt": False,
        "chat_template_kwargs": {"deep": 1},
    }
    assert (await client.post(URL, json=body)).status_code == 200
    assert bytes(frontend.submitted[0].prompt) == b"user:a\nb\n{'deep': 1}"


async def test_image_parts_are_refused_by_name(client: httpx.AsyncClient) -> None:
    parts = [{"type": "image_url", "image_url": {"url": "http://x"}}]
    response = await client.post(URL, json={"messages": [{"role": "user", "content": parts}]})
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "unsupported_field"
    assert response.json()["error"]["param"] == "messages[0].content[0].image_url"
    assert "this model takes text alone" in response.json()["error"]["message"]


async def test_priority_is_handed_on(client: httpx.AsyncClient, frontend: Any) -> None:
    await client.post(URL, json={"messages": HI, "priority": -3})
    assert frontend.submitted[0].level.priority == -3


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (PromptTooLong("prompt: 200 tokens, the model takes 128", "messages"), 400, "context_length_exceeded"),
        (Overloaded("the queue is full", 2.3), 429, "overloaded"),
        (Unavailable("draining"), 503, "unavailable"),
        (EngineFailure("the engine died"), 500, "internal_error"),
        (ZeroDivisionError("secret"), 500, "internal_error"),
    ],
)
@pytest.mark.parametrize("when", ["submit", "generate"])
async def test_errors_before_the_first_token_have_a_status(
    client: httpx.AsyncClient, frontend: Any, stream: bool, error: Exception, status: int, code: str, when: str
) -> None:
    def submit(generation: Any) -> None:
        raise error

    frontend.script = submit if when == "submit" else lambda generation: generation.fail(error)
    response = await client.post(URL, json={"messages": HI, "stream": stream}, headers={"x-request-id": "r1"})
    assert response.status_code == status
    found = response.json()["error"]
    assert found["code"] == code
    assert found["param"] == getattr(error, "field", None)
    assert ("r1" in found["message"]) == (status == 500)
    assert "secret" not in response.text
    assert response.headers.get("retry-after") == {429: "3", 503: "1"}.get(status)


async def test_an_error_after_the_first_token_ends_the_stream(client: httpx.AsyncClient, frontend: Any) -> None:
    def script(generation: Any) -> None:
        generation.say("Hel")
        generation.fail(EngineFailure("the engine died"))

    frontend.script = script
    response = await client.post(URL, json={"messages": HI, "stream": True}, headers={"x-request-id": "r1"})
    assert response.status_code == 200
    *chunks, error = events(response)
    assert deltas(chunks) == "Hel"
    assert error["error"]["message"] == "the engine died (request r1)"
    assert error["error"]["type"] == "server_error"
    assert frontend.submitted[0].cancelled.is_set()


async def test_the_time_a_request_came_is_before_it_was_tokenised(client: httpx.AsyncClient, frontend: Any) -> None:
    frontend.on_encode = lambda: frontend.clock.advance(5)
    await client.post(URL, json={"messages": HI})
    assert frontend.arrivals == [0.0]


async def test_prompt_logprobs_stand_beside_the_choices(client: httpx.AsyncClient) -> None:
    body = (await client.post(URL, json={"messages": HI, "prompt_logprobs": 0, "return_token_ids": True})).json()
    assert body["prompt_logprobs"][0] is None
    assert [list(entry) for entry in body["prompt_logprobs"][1:]] == [[str(t)] for t in body["prompt_token_ids"][1:]]
    assert (await client.post(URL, json={"messages": HI})).json()["prompt_logprobs"] is None


async def test_the_final_message_is_continued(client: httpx.AsyncClient, frontend: Any) -> None:
    talk = [*HI, {"role": "assistant", "content": "Well"}]
    for fields in ({}, {"add_generation_prompt": False}):
        await client.post(URL, json={"messages": talk, "continue_final_message": True, **fields})
        assert bytes(frontend.submitted[-1].prompt).decode().endswith("assistant:Well")
    await client.post(URL, json={"messages": talk, "add_generation_prompt": False})
    assert bytes(frontend.submitted[-1].prompt).decode().endswith("assistant:Well\n")
    both = {"messages": talk, "continue_final_message": True, "add_generation_prompt": True}
    response = await client.post(URL, json=both)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "continue_final_message")


async def test_salt_and_truncation_of_a_chat(client: httpx.AsyncClient, frontend: Any) -> None:
    await client.post(URL, json={"messages": HI, "cache_salt": "mine", "truncate_prompt_tokens": 5})
    assert frontend.salts == ["mine"]
    assert bytes(frontend.submitted[0].prompt) == b"tant:"


async def test_usage_so_far_in_every_event(client: httpx.AsyncClient) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"messages": HI, "stream": True, "stream_options": options, "return_token_ids": True}
    *chunks, _ = events(await client.post(URL, json=body))
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [0, *[6] * (len(chunks) - 1)]
    assert ["prompt_token_ids" in chunk for chunk in chunks] == [True] + [False] * (len(chunks) - 1)


@pytest.mark.parametrize(
    ("content", "text"),
    [("as it was", "as it was"), ([{"type": "text", "text": "as it "}, {"type": "text", "text": "was"}], "as it was")],
)
async def test_a_prediction_is_passed_on_as_tokens(
    client: httpx.AsyncClient, frontend: Any, content: object, text: str
) -> None:
    body = {"messages": HI, "prediction": {"type": "content", "content": content}}
    assert (await client.post(URL, json=body)).status_code == 200
    assert (await client.post(URL, json={"messages": HI, "prediction": None})).status_code == 200
    assert frontend.predictions == [text, ""]


@pytest.mark.parametrize(
    ("prediction", "message"),
    [
        ({"type": "content", "content": [{"type": "image"}]}, "prediction.content: [{'type': 'image'}], allowed is a"),
        ({"type": "content", "content": 5}, "prediction.content: 5, allowed is a string, or a list of parts of type"),
        ({"type": "text", "content": "a"}, "prediction.type: 'text', allowed is 'content'"),
        ({"type": "content"}, "prediction.content: missing, it is required"),
    ],
)
async def test_a_wrong_prediction_is_named(client: httpx.AsyncClient, prediction: object, message: str) -> None:
    response = await client.post(URL, json={"messages": HI, "prediction": prediction})
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith(message)


async def test_a_form_reaches_the_engine_and_what_is_wrong_with_it_its_client(
    client: httpx.AsyncClient, frontend: Any
) -> None:
    def asked(schema: Any) -> Any:
        return {"messages": HI, "response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}

    assert (await client.post(URL, json=asked({"type": "integer"}))).status_code == 200
    assert frontend.submitted[-1].params.structured_outputs.json == '{"type":"integer"}'
    wrong = await client.post(URL, json=asked({"properties": {"x": {"type": "strin"}}}))
    assert wrong.status_code == 400
    field = "response_format.json_schema.schema.properties.x"
    assert wrong.json()["error"]["param"] == field
    assert wrong.json()["error"]["message"].startswith(f"{field}: type: 'strin', allowed are string")
    wrong = await client.post(URL, json={"messages": HI, "structured_outputs": {"regex": "(["}})
    assert wrong.status_code == 400
    assert wrong.json()["error"]["param"] == "structured_outputs.regex"
