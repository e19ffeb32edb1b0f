"""OpenAI's client that has tools called, as it is, against the server with its demo model. It was never trained to
call any, and forced calls are valid all the same."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import openai
import pytest

from tests.helpers.servers import QUICK, serving

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "days": {"type": "integer", "minimum": 1, "maximum": 7},
        "unit": {"$ref": "#/$defs/unit"},
    },
    "required": ["city", "days", "unit"],
    "$defs": {"unit": {"enum": ["celsius", "fahrenheit"]}},
}
CLOCK = {"type": "object", "properties": {"zone": {"enum": ["UTC", "CET"]}}, "required": ["zone"]}
SCHEMAS = {"get_weather": WEATHER, "get_time": CLOCK}
TOOLS: Any = [{"type": "function", "function": {"name": name, "parameters": SCHEMAS[name]}} for name in SCHEMAS]
ASKED: Any = [{"role": "user", "content": "How is the weather in Oslo, and what time is it?"}]
NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}
COMMON: Any = {"model": "demo", "messages": ASKED, "tools": TOOLS, "max_tokens": 300, "seed": 3}


@pytest.fixture
def openai_client(alone) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{alone.url}/v1", api_key="none", max_retries=0)


def checked(calls: Any) -> None:
    """Each has an id of its own, and arguments that its schema allows."""
    assert calls
    assert len({call.id for call in calls}) == len(calls)
    for call in calls:
        jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_forced_calls_are_valid_and_come_as_a_stream(openai_client, choice):
    whole = openai_client.chat.completions.create(**COMMON, tool_choice=choice, parallel_tool_calls=False).choices[0]
    checked(whole.message.tool_calls)
    assert not whole.message.content
    assert whole.finish_reason == ("stop" if choice is NAMED else "tool_calls")
    with openai_client.chat.completions.stream(**COMMON, tool_choice=choice, parallel_tool_calls=False) as stream:
        kinds = {event.type for event in stream}
    assert "tool_calls.function.arguments.delta" in kinds
    streamed = stream.get_final_completion().choices[0]
    assert [call.function.arguments for call in streamed.message.tool_calls] == [
        call.function.arguments for call in whole.message.tool_calls
    ]
    assert streamed.finish_reason == whole.finish_reason


def test_a_conversation_with_calls_goes_on(openai_client):
    first = openai_client.chat.completions.create(**COMMON, tool_choice=NAMED).choices[0].message
    talk = [*ASKED, first.model_dump(exclude_none=True)]
    talk += [{"role": "tool", "tool_call_id": call.id, "content": "4 degrees"} for call in first.tool_calls]
    asked: Any = COMMON | {"messages": talk, "max_tokens": 20}
    for tools in ({}, {"tool_choice": "none"}, {"parallel_tool_calls": False}):
        answer = openai_client.chat.completions.create(**asked, **tools)
        assert answer.choices[0].finish_reason in ("stop", "length")
        assert answer.usage.prompt_tokens > 20


@pytest.mark.slow
def test_strict_tools_and_a_form_for_the_rest(openai_client):
    """What is no call has its form, and the model may choose."""
    strict = [{"type": "function", "function": tool["function"] | {"strict": True}} for tool in TOOLS]
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": CLOCK | {"additionalProperties": False}}}
    for seed in range(4):
        asked = COMMON | {"tools": strict, "seed": seed, "response_format": form}
        choice = openai_client.chat.completions.create(**asked).choices[0]
        calls = choice.message.tool_calls or []
        if choice.finish_reason == "length":  # then the last one is cut off
            calls = calls[:-1]
        elif not calls:
            jsonschema.validate(json.loads(choice.message.content), CLOCK)
        if calls:
            checked(calls)


@pytest.mark.slow
def test_calls_after_thinking_that_is_bounded():
    flags = ("--dtype", "float32", "--reasoning-parser", "deepseek_r1")
    with serving("demo", *QUICK, *flags) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        asked = COMMON | {"tool_choice": "required", "extra_body": {"thinking_token_budget": 9}}
        asked["parallel_tool_calls"] = False
        choice = client.chat.completions.create(**asked, logprobs=True).choices[0]
        checked(choice.message.tool_calls)
        assert choice.finish_reason == "tool_calls"
        assert choice.message.reasoning_content == choice.message.reasoning != ""
        spelled = "".join(entry.token for entry in choice.logprobs.content)
        assert spelled.index("</think>") == len("".join(entry.token for entry in choice.logprobs.content[:9]))
        chunks = list(client.chat.completions.create(**asked, stream=True))
        thought = [chunk.choices[0].delta.model_dump().get("reasoning_content") for chunk in chunks if chunk.choices]
        assert "".join(filter(None, thought)) == choice.message.reasoning_content
