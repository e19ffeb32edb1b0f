"""Anthropic's client and OpenAI's responses against real servers."""

from __future__ import annotations

from typing import Any

import openai
import pytest

TOOL = {
    "name": "get_weather",
    "description": "The weather of a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


def test_a_conversation_of_responses_goes_on_at_any_frontend(apart: Any) -> None:
    """The demo model's answers, greedy: the same as those of the chat that they stand for."""
    with openai.OpenAI(base_url=apart.url + "/v1", api_key="none", max_retries=0) as client:
        options: Any = {"model": "demo", "temperature": 0}
        first = client.responses.create(input="What is a list?", max_output_tokens=20, **options)
        second = client.responses.create(
            input="And a tuple?", previous_response_id=first.id, max_output_tokens=20, **options
        )
        said = [
            {"role": "user", "content": "What is a list?"},
            {"role": "assistant", "content": first.output_text},
            {"role": "user", "content": "And a tuple?"},
        ]
        chat = client.chat.completions.create(messages=said, max_tokens=20, **options)
        assert second.output_text == chat.choices[0].message.content
        assert client.responses.retrieve(first.id).output_text == first.output_text
        with client.responses.stream(input="What is a list?", max_output_tokens=20, **options) as stream:
            events = [*stream]
        assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == first.output_text
        assert (events[0].type, events[-1].type) == ("response.created", "response.incomplete")
        tool: Any = {"type": "function", "strict": True, **TOOL}
        called = client.responses.create(
            input="The weather in Oslo?", tools=[tool], tool_choice="required", max_output_tokens=80, **options
        )
        call = next(item for item in called.output if item.type == "function_call")
        result: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "rain"}]
        after = client.responses.create(input=result, previous_response_id=called.id, max_output_tokens=8, **options)
        assert after.status == "incomplete"
        client.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(first.id)


def test_anthropics_client(alone: Any) -> None:
    anthropic = pytest.importorskip("anthropic")
    client = anthropic.Anthropic(base_url=alone.url, api_key="none", max_retries=0)
    asked: Any = {"model": "demo", "max_tokens": 20, "messages": [{"role": "user", "content": "What is a list?"}]}
    whole = client.messages.create(extra_body={"temperature": 0}, **asked)
    assert whole.stop_reason == "max_tokens"
    with client.messages.stream(extra_body={"temperature": 0}, **asked) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == final.content[0].text == whole.content[0].text
    assert final.usage.output_tokens == whole.usage.output_tokens == 20
    count = client.messages.count_tokens(model="demo", messages=asked["messages"])
    assert count.input_tokens == whole.usage.input_tokens + whole.usage.cache_read_input_tokens
    tool = {"name": TOOL["name"], "description": TOOL["description"], "input_schema": TOOL["parameters"]}
    called: Any = asked | {"max_tokens": 80, "tools": [tool], "tool_choice": {"type": "tool", "name": "get_weather"}}
    answer = client.messages.create(extra_body={"temperature": 0}, **called)
    use = next(block for block in answer.content if block.type == "tool_use")
    assert answer.stop_reason == "tool_use"
    assert set(use.input) == {"city"}
    with client.messages.stream(extra_body={"temperature": 0}, **called) as stream:
        assert next(b for b in stream.get_final_message().content if b.type == "tool_use").input == use.input
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "rain"}
    turns = [
        *asked["messages"],
        {"role": "assistant", "content": answer.content},
        {"role": "user", "content": [result]},
    ]
    assert client.messages.create(**asked | {"messages": turns}).content
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(**asked | {"model": "gpt"})
