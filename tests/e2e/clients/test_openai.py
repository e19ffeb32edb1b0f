"""OpenAI's client where it asks for structured outputs; more of it is in the tests beside this folder."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from tests.helpers.asked import ASKED, Module, Weather

pytestmark = pytest.mark.slow
ASK: Any = {"model": "demo", "messages": [{"role": "user", "content": ASKED}], "max_tokens": 300, "temperature": 0}


def test_parsed_messages_whole_and_streamed(url: str) -> None:
    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
    answer = client.chat.completions.parse(response_format=Module, **ASK)
    assert isinstance(answer.choices[0].message.parsed, Module)
    with client.chat.completions.stream(response_format=Module, **ASK) as stream:
        for _ in stream:
            pass
    assert isinstance(stream.get_final_completion().choices[0].message.parsed, Module)


def test_parsed_responses_whole_and_streamed(url: str) -> None:
    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
    asked: Any = {"model": "demo", "input": ASKED, "max_output_tokens": 300, "temperature": 0, "text_format": Module}
    assert isinstance(client.responses.parse(**asked).output_parsed, Module)
    with client.responses.stream(**asked) as stream:
        for _ in stream:
            pass
        assert isinstance(stream.get_final_response().output_parsed, Module)


def test_parsed_tools(url: str) -> None:
    """Which are strict, and have to be called."""
    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
    tools = [openai.pydantic_function_tool(Weather)]
    answer = client.chat.completions.parse(tools=tools, tool_choice="required", parallel_tool_calls=False, **ASK)
    (call,) = answer.choices[0].message.tool_calls or ()
    assert isinstance(call.function.parsed_arguments, Weather)


def test_async_answers_streams_and_errors(url: str, run: Any) -> None:
    async def asks() -> None:
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            whole = await client.chat.completions.create(response_format={"type": "json_object"}, **ASK)
            assert whole.choices[0].finish_reason == "length" or json.loads(whole.choices[0].message.content)
            stream = await client.chat.completions.create(**ASK | {"max_tokens": 20}, stream=True)
            assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
            with pytest.raises(openai.NotFoundError):
                await client.chat.completions.create(**ASK | {"model": "gpt"})
            with pytest.raises(openai.BadRequestError, match="temperature"):
                await client.chat.completions.create(**ASK | {"temperature": -1})
            found = await client.embeddings.create(model="demo", input=["import os"], dimensions=8)
            assert len(found.data[0].embedding) == 8

    run(asks())
