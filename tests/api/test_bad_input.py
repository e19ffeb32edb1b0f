"""What clients send that is wrong: each has its status, and a message that names what is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

pytestmark = pytest.mark.anyio
JSON = {"content-type": "application/json"}
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "hi"}]
HUGE = 10**400
DEEP = 100_000

RAW = [  # path, bytes, status, a word of the message
    (TEXT, b"", 400, "not valid JSON"),
    (TEXT, b"{", 400, "not valid JSON"),
    (TEXT, b'{"prompt": "a"}}', 400, "not valid JSON"),
    (TEXT, b"{'prompt': 'a'}", 400, "not valid JSON"),
    (TEXT, b'{"prompt": "\xff\xfe"}', 400, "not valid JSON"),
    (TEXT, b'{"prompt": "\\ud800"}', 400, ""),
    (TEXT, b'{"prompt": "\xed\xa0\x80"}', 400, "not valid JSON"),
    (TEXT, b'"prompt"', 400, "an object"),
    (TEXT, b"[]", 400, "an object"),
    (TEXT, b"null", 400, "an object"),
    (TEXT, b'{"prompt": ' + b"[" * DEEP + b"]" * DEEP + b"}", 400, "nested too deeply, at most 200"),
    (CHAT, b'{"messages": ' + b'{"a":' * DEEP + b"1" + b"}" * DEEP + b"}", 400, "nested too"),
    (CHAT, b'{"messages": [{"role": "user", "content": ' + b"[" * DEEP + b"]" * DEEP + b"}]}", 400, "nested too"),
    (TEXT, b'{"prompt": "a", "temperature": NaN}', 400, "temperature"),
    (TEXT, b'{"prompt": "a", "temperature": Infinity}', 400, "temperature"),
    (TEXT, b'{"prompt": "a", "temperature": 1e999}', 400, "temperature"),
    (TEXT, b'{"prompt": "a", "slo": {"ttft_ms": -Infinity}}', 400, "slo.ttft_ms"),
    (TEXT, b'{"prompt": "a", "logit_bias": {"1": NaN}}', 400, "logit_bias"),
    (TEXT, b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", 400, ""),
]
FIELDS = [  # path, body, status, param
    (TEXT, {}, 400, "prompt"),
    (TEXT, {"prompt": ""}, 400, "prompt"),
    (TEXT, {"prompt": []}, 400, "prompt"),
    (TEXT, {"prompt": [[]]}, 400, "prompt"),
    (TEXT, {"prompt": None}, 400, "prompt"),
    (TEXT, {"prompt": 7}, 400, "prompt"),
    (TEXT, {"prompt": {"text": "a"}}, 400, "prompt"),
    (TEXT, {"prompt": ["a", 1]}, 400, "prompt"),
    (TEXT, {"prompt": ["a", ""]}, 400, "prompt"),
    (TEXT, {"prompt": ["a", [1]]}, 400, "prompt"),
    (TEXT, {"prompt": [1, "a"]}, 400, "prompt"),
    (TEXT, {"prompt": [[1], [-1]]}, 400, "prompt"),
    (TEXT, {"prompt": [-1]}, 400, "prompt"),
    (TEXT, {"prompt": [257]}, 400, "prompt"),
    (TEXT, {"prompt": [HUGE]}, 400, "prompt"),
    (TEXT, {"prompt": [1.5]}, 400, "prompt"),
    (TEXT, {"prompt": [True]}, 400, "prompt"),
    (TEXT, {"prompt": ["a"] * 1025}, 400, "prompt"),
    (TEXT, {"prompt": "a", "model": "gpt"}, 404, "model"),
    (TEXT, {"prompt": "a", "model": ["tiny"]}, 400, "model"),
    (TEXT, {"prompt": "a", "max_tokens": -1}, 400, "max_tokens"),
    (TEXT, {"prompt": "a", "max_tokens": 0}, 400, "max_tokens"),
    (TEXT, {"prompt": "a", "echo": True, "max_tokens": -1}, 400, "max_tokens"),
    (TEXT, {"prompt": "a", "echo": True, "max_tokens": 0, "min_tokens": 1}, 400, "min_tokens"),
    (TEXT, {"prompt": "a", "min_tokens": 17}, 400, "min_tokens"),
    (TEXT, {"prompt": "a", "echo": True, "logprobs": 1, "prompt_logprobs": 2}, 400, "prompt_logprobs"),
    (TEXT, {"prompt": "a", "stream": True, "prompt_logprobs": 1}, 400, "prompt_logprobs"),
    (TEXT, {"prompt": "a", "truncate_prompt_tokens": 129}, 400, "truncate_prompt_tokens"),
    (TEXT, {"prompt": "a", "cache_salt": ""}, 400, "cache_salt"),
    (TEXT, {"prompt": "a", "stream_options": {"include_usage": True}}, 400, "stream_options"),
    (TEXT, {"prompt": "a", "suffix": "b"}, 400, "suffix"),
    (TEXT, {"prompt": "a", "best_of": 2}, 400, "best_of"),
    (TEXT, {"prompt": "a", "max_tokens": HUGE}, 400, "max_tokens"),
    (TEXT, {"prompt": "a", "max_tokens": 1.5}, 400, "max_tokens"),
    (TEXT, {"prompt": "a", "max_tokens": "9"}, 400, "max_tokens"),
    (TEXT, {"prompt": "a", "temperature": -0.1}, 400, "temperature"),
    (TEXT, {"prompt": "a", "temperature": "hot"}, 400, "temperature"),
    (TEXT, {"prompt": "a", "temperature": HUGE}, 400, "temperature"),
    (TEXT, {"prompt": "a", "top_p": 0}, 400, "top_p"),
    (TEXT, {"prompt": "a", "top_p": 1.1}, 400, "top_p"),
    (TEXT, {"prompt": "a", "top_k": -2}, 400, "top_k"),
    (TEXT, {"prompt": "a", "min_p": 2}, 400, "min_p"),
    (TEXT, {"prompt": "a", "n": 0}, 400, "n"),
    (TEXT, {"prompt": "a", "n": 10**9}, 400, "n"),
    (TEXT, {"prompt": "a", "stop": [1]}, 400, "stop[0]"),
    (TEXT, {"prompt": "a", "stop_token_ids": [-1]}, 400, "stop_token_ids"),
    (TEXT, {"prompt": "a", "stop_token_ids": [257]}, 400, "stop_token_ids"),
    (TEXT, {"prompt": "a", "logit_bias": {"257": 1}}, 400, "logit_bias"),
    (TEXT, {"prompt": "a", "logit_bias": {"x": 1}}, 400, "logit_bias"),
    (TEXT, {"prompt": "a", "logit_bias": {"1": "x"}}, 400, "logit_bias"),
    (TEXT, {"prompt": "a", "logprobs": 10**6}, 400, "logprobs"),
    (TEXT, {"prompt": "a", "logprobs": 21}, 400, "logprobs"),
    (TEXT, {"prompt": "a", "logprobs": -1}, 400, "logprobs"),
    (TEXT, {"prompt": "a", "logprobs": True}, 400, "logprobs"),
    (TEXT, {"prompt": "a", "stream": "yes"}, 400, "stream"),
    (TEXT, {"prompt": "a", "slo": {"ttft_ms": 0}}, 400, "slo.ttft_ms"),
    (TEXT, {"prompt": "a", "slo": {"speed": 1}}, 400, "slo.speed"),
    (TEXT, {"prompt": "a", "service_tier": "gold"}, 400, "service_tier"),
    (CHAT, {}, 400, "messages"),
    (CHAT, {"messages": []}, 400, "messages"),
    (CHAT, {"messages": "hi"}, 400, "messages"),
    (CHAT, {"messages": [{"content": "hi"}]}, 400, "messages[0].role"),
    (CHAT, {"messages": HI, "top_logprobs": 3}, 400, "top_logprobs"),
    (CHAT, {"messages": HI, "max_completion_tokens": 0}, 400, "max_completion_tokens"),
    ("/tokenize", {}, 400, "prompt"),
    ("/tokenize", {"prompt": "a", "messages": HI}, 400, "prompt"),
    ("/detokenize", {"tokens": [257]}, 400, "tokens"),
    ("/detokenize", {"tokens": [-1]}, 400, "tokens"),
    ("/detokenize", {"tokens": "abc"}, 400, "tokens"),
]


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert "Traceback" not in response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert len(error["message"]) < 500  # however long what was sent is
    return error


@pytest.mark.parametrize(("path", "content", "status", "word"), RAW, ids=[repr(c[1][:40]) for c in RAW])
async def test_bytes(client: httpx.AsyncClient, path: str, content: bytes, status: int, word: str) -> None:
    error = error_of(await client.post(path, content=content, headers=JSON), status)
    assert word in error["message"]


@pytest.mark.parametrize(("path", "body", "status", "param"), FIELDS, ids=[str(case[1])[:50] for case in FIELDS])
async def test_fields(
    client: httpx.AsyncClient, frontend: Any, path: str, body: dict[str, Any], status: int, param: str
) -> None:
    error = error_of(await client.post(path, content=json.dumps(body), headers=JSON), status)
    assert error["param"] == param
    assert error["message"].startswith((param, param.split("[", maxsplit=1)[0], "exactly"))
    assert not frontend.submitted


async def test_arguments_of_tool_calls_that_are_nested_without_end(client: httpx.AsyncClient) -> None:
    call = {"function": {"name": "f", "arguments": "[" * DEEP}}
    messages = [*HI, {"role": "assistant", "content": "", "tool_calls": [call]}]
    error = error_of(await client.post(CHAT, json={"messages": messages}), 400)
    assert "tool_calls[0].function.arguments" in error["message"]


CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
OBJECT: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "string"}}}
TEXTS = [{"type": "text", "text": "a"}]
RICH: dict[str, Any] = {  # bodies with everything in them that has parts
    CHAT: {
        "messages": [
            {"role": "user", "content": TEXTS},
            {"role": "assistant", "content": "x", "reasoning_content": "r", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c", "content": "r"},
        ],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": OBJECT, "strict": True}}],
        "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [CALL]}},
        "prediction": {"type": "content", "content": TEXTS},
        "kv_transfer_params": {"prompt_token_ids": [5]},
    },
    TEXT: {
        "prompt": ["a"],
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": OBJECT}},
        "thinking": {"start": [1], "end": [2], "budget": 1},
        "logit_bias": {"5": 1},
        "slo": {"ttft_ms": 5},
    },
    "/v1/responses": {
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
            {"type": "reasoning", "id": "rs", "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "namespace": "n"},
            {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "r"}]},
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "x"}]},
        ],
        "tools": [{"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "f"}]}],
        "tool_choice": {"type": "function", "name": "n__f"},
        "text": {"format": {"type": "json_schema", "name": "n", "schema": OBJECT}},
        "reasoning": {"effort": "low"},
    },
    "/v1/messages": {
        "max_tokens": 5,
        "system": TEXTS,
        "messages": [
            {"role": "user", "content": TEXTS},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "t"},
                    {"type": "tool_use", "id": "c", "name": "f", "input": {}},
                ],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": TEXTS}]},
        ],
        "tools": [{"name": "f", "input_schema": OBJECT}],
        "tool_choice": {"type": "tool", "name": "f"},
        "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": OBJECT}},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
    },
}


def replaced(value: Any, other: Any) -> Iterator[Any]:
    """The same with one of its parts, at whatever depth, replaced."""
    yield other
    for key, part in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        for changed in replaced(part, other):
            copied = value.copy()
            copied[key] = changed
            yield copied


@pytest.mark.parametrize("path", RICH)
async def test_any_part_of_a_body_may_be_something_else(client: httpx.AsyncClient, path: str) -> None:
    assert (await client.post(path, json=RICH[path])).status_code == 200
    for other in (5, "x", [None], {"type": 5}):
        for body in replaced(RICH[path], other):
            answer = await client.post(path, json=body)
            assert answer.status_code in (200, 400, 404), (answer.text, body)


@pytest.mark.parametrize("path", [TEXT, CHAT, "/tokenize", "/detokenize", "/v1/models"])
async def test_ten_megabytes(client: httpx.AsyncClient, path: str) -> None:
    content = b'{"prompt": "' + b"a" * (10 * 2**20) + b'"}'
    response = await client.request("GET" if "models" in path else "POST", path, content=content, headers=JSON)
    error = error_of(response, 413)
    assert str(len(content)) in error["message"]
    assert str(8 * 2**20) in error["message"]


async def test_keys_come_before_everything_else(make_client: Callable[..., httpx.AsyncClient]) -> None:
    async with make_client(api_keys=("k",)) as client:
        error_of(await client.post(TEXT, content=b"{" * 100, headers=JSON), 401)
        error_of(await client.post(TEXT, content=b"a" * (10 * 2**20), headers=JSON), 401)
        error_of(await client.post(TEXT, content=b"{}", headers=JSON | {"x-request-id": "a" * 1000}), 401)
