"""LangChain's chats, agents, structured outputs and embeddings."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.helpers.asked import ASKED, Module, Weather, get_weather

langchain = pytest.importorskip("langchain_openai")
pytestmark = pytest.mark.slow
HOW = "How is the weather in Oslo?"


@pytest.fixture(params=["chat", "responses"])
def chat(request: Any, url: str) -> Any:
    options: Any = {"use_responses_api": request.param == "responses", "stream_usage": True}
    return langchain.ChatOpenAI(
        model="demo", base_url=url, api_key="none", max_tokens=200, temperature=0, max_retries=0, **options
    )


def whole(chunks: Any) -> Any:
    merged = None
    for chunk in chunks:
        merged = chunk if merged is None else merged + chunk
    assert merged is not None
    return merged


async def gathered(chunks: Any) -> Any:
    return whole([chunk async for chunk in chunks])


def test_answers_whole_streamed_and_async(chat: Any, run: Any) -> None:
    bound = chat.model_copy(update={"max_tokens": 20})
    answer = bound.invoke(ASKED)
    assert answer.text
    assert answer.usage_metadata["output_tokens"] == 20
    streamed = whole(bound.stream(ASKED))
    assert streamed.text == answer.text
    assert streamed.usage_metadata["total_tokens"] == answer.usage_metadata["total_tokens"]

    async def both() -> list[Any]:
        return [await bound.ainvoke(ASKED), await gathered(bound.astream(ASKED))]

    assert [one.text for one in run(both())] == [answer.text] * 2
    assert [one.text for one in bound.batch([ASKED, ASKED])] == [answer.text] * 2


@pytest.mark.parametrize("choice", ["any", "Weather", "required"])
def test_tools_that_are_forced_and_the_turn_after_them(chat: Any, choice: str) -> None:
    from langchain_core.messages import HumanMessage, ToolMessage

    bound = chat.bind_tools([Weather], tool_choice=choice, parallel_tool_calls=False)
    answer = bound.invoke(HOW)
    (call,) = answer.tool_calls
    assert call["name"] == "Weather"
    Weather.model_validate(call["args"])
    assert whole(bound.stream(HOW)).tool_calls[0]["args"] == call["args"]
    talk = [HumanMessage(HOW), answer, ToolMessage("rain", tool_call_id=call["id"])]
    assert chat.bind_tools([Weather]).invoke(talk).text


@pytest.mark.parametrize("strict", [None, True])
def test_tools_that_the_model_may_call(chat: Any, strict: bool | None) -> None:
    answer = chat.bind_tools([get_weather], strict=strict).invoke(HOW)
    assert answer.text or answer.tool_calls
    assert chat.bind_tools([get_weather], tool_choice="none").invoke(HOW).text


@pytest.mark.parametrize("method", ["function_calling", "json_schema"])
def test_structured_output(chat: Any, run: Any, method: str) -> None:
    asked = chat.with_structured_output(Module, method=method)
    assert isinstance(asked.invoke(ASKED), Module)
    assert isinstance(run(asked.ainvoke(ASKED)), Module)
    assert isinstance(list(asked.stream(ASKED))[-1], Module)
    raw = chat.with_structured_output(Module, method=method, strict=True, include_raw=True).invoke(ASKED)
    assert isinstance(raw["parsed"], Module)
    assert raw["parsing_error"] is None


def test_an_agent_calls_a_tool_and_goes_on(chat: Any) -> None:
    agents = pytest.importorskip("langchain.agents")
    from langchain.agents.structured_output import ProviderStrategy, ToolStrategy

    for form in (ProviderStrategy(Module), ToolStrategy(Module)):
        agent = agents.create_agent(chat, tools=[], response_format=form)
        assert isinstance(agent.invoke({"messages": [("user", ASKED)]})["structured_response"], Module)


def test_completions_and_embeddings(url: str) -> None:
    model = langchain.OpenAI(model="demo", base_url=url, api_key="none", max_tokens=20, temperature=0)
    assert "".join(model.stream("import ")) == model.invoke("import ")
    vectors = langchain.OpenAIEmbeddings(
        model="demo", base_url=url, api_key="none", check_embedding_ctx_length=False, dimensions=16
    )
    both = vectors.embed_documents(["import os", "class Thread"])
    assert [len(one) for one in both] == [16, 16]
    assert vectors.embed_query("import os") == pytest.approx(both[0])


def test_errors_are_its_clients(chat: Any, url: str) -> None:
    other = langchain.ChatOpenAI(model="gpt", base_url=url, api_key="none", max_retries=0)
    with pytest.raises(openai.NotFoundError, match="gpt"):
        other.invoke(ASKED)
    with pytest.raises(openai.BadRequestError, match="temperature"):
        chat.bind(temperature=-1).invoke(ASKED)


def test_anthropics_messages(alone: Any) -> None:
    claude = pytest.importorskip("langchain_anthropic")
    chat = claude.ChatAnthropic(
        model="demo", base_url=alone.url, api_key="none", max_tokens=200, temperature=0, max_retries=0
    )
    answer = chat.bind(max_tokens=20).invoke(ASKED)
    assert whole(chat.bind(max_tokens=20).stream(ASKED)).text == answer.text
    bound = chat.bind_tools([Weather], tool_choice="any", parallel_tool_calls=False)
    Weather.model_validate(bound.invoke(HOW).tool_calls[0]["args"])
    assert whole(bound.stream(HOW)).tool_calls[0]["name"] == "Weather"
    for method in ("function_calling", "json_schema"):
        assert isinstance(chat.with_structured_output(Weather, method=method).invoke(HOW), Weather)
