"""OpenAI's responses: their items as a chat's messages, their events, and conversations that go on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.api import response_store
from penstock.api.response_store import ResponseStore
from penstock.text.detokenizer import Delta

pytestmark = pytest.mark.anyio
URL = "/v1/responses"


def events(response: httpx.Response) -> list[Any]:
    assert response.headers["content-type"].startswith("text/event-stream")
    blocks = response.text.split("\n\n")
    assert blocks.pop() == ""
    found = [json.loads(block.split("\n")[1].removeprefix("data: ")) for block in blocks]
    assert [event["sequence_number"] for event in found] == [*range(len(found))]
    assert [block.split("\n")[0].removeprefix("event: ") for block in blocks] == [event["type"] for event in found]
    return found


async def test_whole_and_in_a_stream(client: httpx.AsyncClient, frontend: Any) -> None:
    asked = {"input": "hi", "instructions": "be short", "max_output_tokens": 20}
    headers = {"x-request-id": "abc"}
    whole = (await client.post(URL, json=asked, headers=headers)).json()
    assert bytes(frontend.submitted[0].prompt).decode() == "system:be short\nuser:hi\nassistant:"
    assert (whole["id"], whole["status"], whole["error"]) == ("resp_abc", "completed", None)
    text = {"type": "output_text", "text": "Hello", "annotations": [], "logprobs": []}
    (message,) = whole["output"]
    assert message | {"id": ""} == {
        "id": "",
        "type": "message",
        "status": "completed",
        "role": "assistant",
        "content": [text],
    }
    prompt = len(frontend.submitted[0].prompt)
    assert whole["usage"] == {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": 2},
        "output_tokens": 6,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + 6,
    }
    found = events(await client.post(URL, json=asked | {"stream": True}, headers=headers))
    assert [event["type"] for event in found if not event["type"].endswith(".delta")] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert "".join(event["delta"] for event in found if event["type"].endswith(".delta")) == "Hello"
    assert found[-1]["response"] | {"created_at": 0} == whole | {"created_at": 0}
    assert found[0]["response"]["status"] == "in_progress"


async def test_what_is_cut_is_incomplete(client: httpx.AsyncClient, frontend: Any) -> None:
    frontend.script = lambda part: part.put(Delta(0, "Hi", [72], finish_reason="length"))
    whole = (await client.post(URL, json={"input": "hi"})).json()
    assert (whole["status"], whole["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert whole["output"][0]["status"] == "incomplete"
    assert events(await client.post(URL, json={"input": "hi", "stream": True}))[-1]["type"] == "response.incomplete"


async def test_a_conversation_goes_on(client: httpx.AsyncClient, frontend: Any) -> None:
    first = (await client.post(URL, json={"input": "one", "instructions": "short"})).json()
    asked = {"input": [{"role": "user", "content": "two"}], "previous_response_id": first["id"]}
    second = (await client.post(URL, json=asked)).json()
    assert bytes(frontend.submitted[1].prompt).decode() == "user:one\nassistant:Hello\nuser:two\nassistant:"
    await client.post(URL, json={"input": "three", "previous_response_id": second["id"], "store": False})
    last = bytes(frontend.submitted[2].prompt).decode()
    assert last == "user:one\nassistant:Hello\nuser:two\nassistant:Hello\nuser:three\nassistant:"
    assert (await client.get(f"{URL}/{first['id']}")).json() == first
    assert (await client.delete(f"{URL}/{first['id']}")).json()["deleted"]
    for answer in (
        await client.get(f"{URL}/{first['id']}"),
        await client.delete(f"{URL}/{first['id']}"),
        await client.post(URL, json={"input": "x", "previous_response_id": "resp_none"}),
    ):
        assert answer.status_code == 404
        assert "is not kept" in answer.json()["error"]["message"]
    unkept = (await client.post(URL, json={"input": "x", "store": False})).json()
    assert (await client.get(f"{URL}/{unkept['id']}")).status_code == 404


async def test_items_are_messages_of_a_chat(client: httpx.AsyncClient, frontend: Any) -> None:
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "c2", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "r"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "b"}]},
        {"role": "developer", "content": "d"},
    ]
    answer = await client.post(URL, json={"input": items})
    assert answer.status_code == 200, answer.text
    assert bytes(frontend.submitted[0].prompt).decode().startswith("user:a\nassistant:")


async def test_functions_in_namespaces(client: httpx.AsyncClient, frontend: Any) -> None:
    """The model reads and calls them by one name; clients have the function's and the namespace's."""
    function = {"type": "function", "name": "state", "parameters": {"type": "object", "properties": {"app": {}}}}
    spaces = [{"type": "namespace", "name": "mcp__computer", "description": "d", "tools": [function]}]
    tools = [{"type": "function", "name": "mcp__state"}, *spaces]
    choice = {"type": "function", "name": "mcp__computer__state"}
    frontend.script = lambda part: part.put(Delta(0, '{"app": 1}', [72], finish_reason="stop"))
    asked = {"input": "hi", "tools": tools, "tool_choice": choice}
    whole = (await client.post(URL, json=asked)).json()
    assert b"tools:['mcp__state', 'mcp__computer__state']" in bytes(frontend.submitted[0].prompt)
    assert whole["tools"] == tools
    (call,) = whole["output"]
    assert (call["name"], call["namespace"], call["arguments"]) == ("state", "mcp__computer", '{"app": 1}')
    found = events(await client.post(URL, json=asked | {"stream": True}))
    items = [event["item"] for event in found if "item" in event]
    assert [(item["name"], item["namespace"]) for item in items] == [("state", "mcp__computer")] * 2
    for before in ({"input": [{"role": "user", "content": "hi"}, call]}, {"previous_response_id": whole["id"]}):
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": "on"}
        answer = await client.post(URL, json=before | {"input": [*before.get("input", ()), result]})
        assert answer.status_code == 200, answer.text
        (made,) = [message for message in frontend.conversations[-1] if message.get("tool_calls")]
        assert made["tool_calls"][0]["function"] == {"name": "mcp__computer__state", "arguments": '{"app": 1}'}


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"role": "", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].image_url"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "http://x"}]}]},
            "input[0].content[0].image_url",
        ),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 5000}, "max_output_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "name": ""}]}, "tools[0].name"),
        (
            {"input": [{"type": "function_call", "call_id": "c", "namespace": 3, "name": "f", "arguments": ""}]},
            "input[0].namespace",
        ),
        ({"tools": [{"type": "namespace", "name": "n"}]}, "tools[0].tools"),
        ({"tools": [{"type": "namespace", "tools": [{"type": "function", "name": "f"}]}]}, "tools[0].name"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "custom"}]}]}, "tools[0].tools[0].type"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [3]}]}, "tools[0].tools[0].type"),
        (
            {"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "function", "name": 3}]}]},
            "tools[0].tools[0].name",
        ),
        ({"text": {"format": {"type": "xml"}}}, "text.format"),
        ({"background": True, "store": False}, "background"),
        ({"background": True, "stream": True}, "background"),
        ({"background": True, "temperature": -1}, "temperature"),
        ({"truncation": "auto"}, "truncation"),
        ({"reasoning": {"effort": "much"}}, "reasoning.effort"),
    ],
)
async def test_what_is_wrong_is_named_as_it_came(client: httpx.AsyncClient, change: Any, param: str) -> None:
    answer = await client.post(URL, json={"input": "hi"} | change)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param, answer.json()


async def test_tenants_do_not_see_each_others(make_client: Any) -> None:
    async with make_client(api_keys=("one", "two")) as client:
        client.headers["authorization"] = "Bearer one"
        kept = (await client.post(URL, json={"input": "hi"})).json()["id"]
        assert (await client.get(f"{URL}/{kept}")).status_code == 200
        client.headers["authorization"] = "Bearer two"
        assert (await client.get(f"{URL}/{kept}")).status_code == 404


async def test_what_cannot_be_kept_is_answered_all_the_same(
    make_client: Any, frontend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a disk that is full; nothing of it is left in the way of what comes later."""
    monkeypatch.setattr(response_store, "SCHEMA", response_store.SCHEMA + "PRAGMA max_page_count = 16;")
    large = {"input": "hi", "user": "x" * 100_000}
    async with make_client() as client:
        whole = (await client.post(URL, json=large)).json()
        assert (whole["status"], whole["store"]) == ("completed", False)
        last = events(await client.post(URL, json=large | {"stream": True}))[-1]
        assert (last["type"], last["response"]["store"]) == ("response.completed", False)
        refused = await client.post(URL, json=large | {"background": True})
        assert refused.status_code == 503
        assert "responses cannot be kept now" in refused.json()["error"]["message"]
        small = (await client.post(URL, json={"input": "hi"})).json()
        assert small["store"]
        assert (await client.get(f"{URL}/{small['id']}")).json() == small
        assert (await client.get(f"{URL}/{whole['id']}")).status_code == 404


def test_the_oldest_go_when_there_are_too_many_and_frontends_share_them(tmp_path: Path) -> None:
    store, other = (ResponseStore(tmp_path / "responses", max_bytes=2000) for _ in range(2))
    for i in range(10):
        store.put("", f"r{i}", b"x" * 400, [{"role": "user", "content": str(i)}])
    kept = [i for i in range(10) if other.get("", f"r{i}") is not None]
    assert kept == [*range(10 - len(kept), 10)]
    assert 3 <= len(kept) <= 4
    assert store.bytes <= 2000
    found = other.get("", "r9")
    assert found is not None
    assert found.messages == [{"role": "user", "content": "9"}]
    before = store.bytes
    other.put("", "r9", b"y" * 400, [{"role": "user", "content": "9"}])
    assert store.bytes == before
    store.put("", "huge", b"x" * 3000, [])
    assert store.get("", "huge") is None
    assert store.get("somebody", "r9") is None
    store.close()
    other.close()
