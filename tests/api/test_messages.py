"""Anthropic's API: its fields as a chat's, and its blocks, whole and as events."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from penstock.text.detokenizer import Delta

pytestmark = pytest.mark.anyio
URL = "/v1/messages"
HI: dict[str, Any] = {"model": "tiny", "max_tokens": 20, "messages": [{"role": "user", "content": "hi"}]}


def events(response: httpx.Response) -> list[tuple[str, Any]]:
    assert response.headers["content-type"].startswith("text/event-stream")
    blocks = response.text.split("\n\n")
    assert blocks.pop() == ""
    found = []
    for block in blocks:
        name, data = block.split("\n")
        found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
        assert found[-1][0] == found[-1][1]["type"]
    return found


def folded(response: httpx.Response) -> dict[str, Any]:
    """What Anthropic's clients make of the events."""
    message: dict[str, Any] = {}
    for kind, event in events(response):
        if kind == "message_start":
            message = event["message"]
        elif kind == "content_block_start":
            assert event["index"] == len(message["content"])
            message["content"].append(event["content_block"] | {"json": ""})
        elif kind == "content_block_delta":
            block, delta = message["content"][event["index"]], event["delta"]
            if delta["type"] == "input_json_delta":
                block["json"] += delta["partial_json"]
            else:
                name = delta["type"].removesuffix("_delta")
                block[name] += delta[name]
        elif kind == "content_block_stop":
            block = message["content"][event["index"]]
            if text := block.pop("json"):
                block["input"] = json.loads(text)
        elif kind == "message_delta":
            message |= event["delta"] | {"usage": event["usage"]}
    assert events(response)[-1][0] == "message_stop"
    return message


async def test_whole_and_in_a_stream(client: httpx.AsyncClient, frontend: Any) -> None:
    headers = {"x-request-id": "abc"}
    whole = (await client.post(URL, json=HI | {"system": "be short"}, headers=headers)).json()
    prompt = "system:be short\nuser:hi\nassistant:"
    assert bytes(frontend.submitted[0].prompt).decode() == prompt
    assert whole == {
        "id": "msg_abc",
        "type": "message",
        "role": "assistant",
        "model": "tiny",
        "content": [{"type": "text", "text": "Hello"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": len(prompt) - 2,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 2,
            "output_tokens": 6,
        },
    }
    stream = await client.post(URL, json=HI | {"system": "be short", "stream": True}, headers=headers)
    assert folded(stream) == whole
    longer = (await client.post(URL, json=HI | {"system": "x" * 80})).json()["usage"]
    assert longer["cache_creation_input_tokens"] == 64 - 2, "a whole block, less what was found"
    assert sum(longer.values()) - longer["output_tokens"] == len(prompt) - len("be short") + 80


@pytest.mark.parametrize(
    ("delta", "why"),
    [
        (Delta(0, "Hi", [72], finish_reason="length"), {"stop_reason": "max_tokens", "stop_sequence": None}),
        (
            Delta(0, "Hi", [72], finish_reason="stop", stop_reason="END"),
            {"stop_reason": "stop_sequence", "stop_sequence": "END"},
        ),
        (Delta(0, "Hi", [72], finish_reason="stop", stop_reason=7), {"stop_reason": "end_turn", "stop_sequence": None}),
    ],
)
async def test_why_it_ended(client: httpx.AsyncClient, frontend: Any, delta: Delta, why: dict[str, Any]) -> None:
    frontend.script = lambda part: part.put(delta)
    whole = (await client.post(URL, json=HI)).json()
    assert {key: whole[key] for key in why} == why
    stream = folded(await client.post(URL, json=HI | {"stream": True}))
    assert {key: stream[key] for key in why} == why


async def test_blocks_are_messages_of_a_chat(client: httpx.AsyncClient, frontend: Any) -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "text", "text": "c"},
                {"type": "tool_use", "id": "t1", "name": "f", "input": {"x": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "r"}]},
                {"type": "text", "text": "d"},
            ],
        },
    ]
    answer = await client.post(URL, json=HI | {"messages": messages})
    assert answer.status_code == 200, answer.text
    assert bytes(frontend.submitted[0].prompt).decode() == "user:a\nb\nassistant:c\ntool:r\nuser:d\nassistant:"
    count = await client.post(f"{URL}/count_tokens", json={"model": "tiny", "messages": messages})
    assert count.json() == {"input_tokens": len(frontend.submitted[0].prompt)}
    begun = [*HI["messages"], {"role": "assistant", "content": "So"}]
    await client.post(URL, json=HI | {"messages": begun})
    assert bytes(frontend.submitted[1].prompt).decode() == "user:hi\nassistant:So"  # it is gone on with


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"max_tokens": None}, "max_tokens: None, allowed is a whole number"),
        ({"temperature": -1}, "temperature: -1"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"messages": [{"role": "system", "content": "x"}]}, "messages[0].role: 'system', allowed is 'user' or"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "messages[0].content[0].source: {}, allowed is an object with a type",
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "http://x"}}]}
                ]
            },
            "messages[0].content[0].source: parts with images are not supported, this model takes text alone",
        ),
        ({"system": [{"type": "image"}]}, "system[0].type: 'image' is not supported"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema: missing"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type: 'web_search_20250305'"),
        ({"tools": [{"name": "", "input_schema": {"type": "object"}}]}, "tools[0].name"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type: 'some', allowed is"),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens: 0, allowed is"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1.5}}, "thinking.budget_tokens: 1.5, allowed is"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers is not supported"),
    ],
)
async def test_what_is_wrong_is_named_as_it_came(client: httpx.AsyncClient, change: Any, said: str) -> None:
    answer = await client.post(URL, json=HI | change)
    assert answer.status_code == 400
    body = answer.json()
    assert body["type"] == "error"
    assert body["error"]["type"] == "invalid_request_error"
    assert body["error"]["message"].startswith(said), body


async def test_other_errors_have_its_shape_and_its_key_is_taken(make_client: Any) -> None:
    async with make_client(api_keys=("one",)) as client:
        answer = await client.post(URL, json=HI)
        assert (answer.status_code, answer.json()["error"]["type"]) == (401, "authentication_error")
        client.headers["x-api-key"] = "one"
        assert (await client.post(URL, json=HI)).status_code == 200
        missing = await client.post(URL, json=HI | {"model": "gpt"})
        assert (missing.status_code, missing.json()["error"]["type"]) == (404, "not_found_error")
