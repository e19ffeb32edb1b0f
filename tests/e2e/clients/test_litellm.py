"""litellm, as a client of OpenAI's routes, of vLLM's, and of Anthropic's."""

from __future__ import annotations

import gc
import json
import os
from typing import Any

import pytest

from tests.helpers.asked import ASKED, Module, Weather

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # it asks another host for prices otherwise
litellm = pytest.importorskip("litellm")
pytestmark = pytest.mark.slow
TALK = [{"role": "user", "content": ASKED}]
TOOLS = [{"type": "function", "function": {"name": "Weather", "parameters": Weather.model_json_schema()}}]
NAMED = {"type": "function", "function": {"name": "Weather"}}


def streamed(**asked: Any) -> list[Any]:
    """All of it. It leaves streams before their end, and one that is collected while another request looks for a
    connection waits for ever."""
    found = [*litellm.completion(**asked, stream=True)]
    gc.collect()
    return found


@pytest.fixture(params=["openai", "hosted_vllm"])
def common(request: Any, url: str) -> Any:
    options = {"api_base": url, "api_key": "none", "num_retries": 0}
    return options | {"model": f"{request.param}/demo", "messages": TALK, "temperature": 0, "max_tokens": 200}


def test_answers_whole_streamed_and_async(common: Any, run: Any) -> None:
    asked = common | {"max_tokens": 20}
    whole = litellm.completion(**asked)
    text = whole.choices[0].message.content
    assert whole.usage.completion_tokens == 20
    chunks = streamed(**asked, stream_options={"include_usage": True})
    rebuilt = litellm.stream_chunk_builder(chunks, messages=TALK)
    assert rebuilt.choices[0].message.content == text
    assert rebuilt.usage.total_tokens == whole.usage.total_tokens

    async def both() -> list[str]:
        stream = await litellm.acompletion(**asked, stream=True)
        parts = [chunk.choices[0].delta.content or "" async for chunk in stream]
        return [(await litellm.acompletion(**asked)).choices[0].message.content, "".join(parts)]

    assert run(both()) == [text, text]


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_tools_that_are_forced_and_the_turn_after_them(common: Any, choice: Any) -> None:
    asked = common | {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False}
    message = litellm.completion(**asked).choices[0].message
    (call,) = message.tool_calls
    Weather.model_validate_json(call.function.arguments)
    rebuilt = litellm.stream_chunk_builder(streamed(**asked))
    assert rebuilt.choices[0].message.tool_calls[0].function.arguments == call.function.arguments
    talk = [*TALK, message, {"role": "tool", "tool_call_id": call.id, "content": "rain"}]
    for free in ("auto", "none"):
        after = litellm.completion(**common | {"messages": talk, "tools": TOOLS, "tool_choice": free, "max_tokens": 9})
        assert after.choices[0].finish_reason in ("stop", "length", "tool_calls")


def test_structured_output(common: Any) -> None:
    answer = litellm.completion(**common, response_format=Module)
    assert Module.model_validate_json(answer.choices[0].message.content)
    answer = litellm.completion(**common, response_format={"type": "json_object"}, logit_bias={"95": 30.0})
    assert isinstance(json.loads(answer.choices[0].message.content), dict)


def test_completions_embeddings_and_what_is_wrong(common: Any) -> None:
    asked = {key: value for key, value in common.items() if key != "messages"} | {"max_tokens": 9}
    assert litellm.text_completion(**asked, prompt="import ").choices[0].text
    where = {key: common[key] for key in ("model", "api_base", "api_key")}
    found = litellm.embedding(**where, input=["import os", "class Thread"], encoding_format="float")
    assert len(found.data) == 2
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(**common | {"model": "openai/gpt"})
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion(**common | {"temperature": -1})
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(**common | {"messages": [{"role": "user", "content": "word " * 9000}]})


def test_reranking(url: str) -> None:
    found = litellm.rerank(
        model="hosted_vllm/demo", api_base=url, api_key="none", query="files", documents=["os", "threads"], top_n=1
    )
    assert len(found.results) == 1


def test_responses_and_messages(alone: Any, url: str) -> None:
    answer = litellm.responses(model="openai/demo", api_base=url, api_key="none", input=ASKED, max_output_tokens=20)
    assert answer.usage.output_tokens == 20
    events = litellm.responses(
        model="openai/demo", api_base=url, api_key="none", input=ASKED, max_output_tokens=20, stream=True
    )
    assert [*events][-1].type in ("response.incomplete", "response.completed")  # it goes by chats for some models
    asked: Any = {"model": "anthropic/demo", "api_base": alone.url, "api_key": "none", "messages": TALK}
    assert litellm.completion(**asked, max_tokens=20).usage.completion_tokens == 20
    forced = litellm.completion(**asked, max_tokens=200, tools=TOOLS, tool_choice="required")
    Weather.model_validate_json(forced.choices[0].message.tool_calls[0].function.arguments)
