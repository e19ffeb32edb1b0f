"""pydantic-ai's agents over chats and responses."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.asked import ASKED, Module, Weather, get_weather

ai = pytest.importorskip("pydantic_ai")
pytestmark = pytest.mark.slow
SETTINGS: Any = {"max_tokens": 200, "temperature": 0.0, "parallel_tool_calls": False}
SHORT: Any = SETTINGS | {"max_tokens": 20}


@pytest.fixture(params=["chat", "responses"])
def model(request: Any, url: str) -> Any:
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    kind = OpenAIChatModel if request.param == "chat" else OpenAIResponsesModel
    return kind("demo", provider=OpenAIProvider(base_url=url, api_key="none"))


def test_answers_whole_streamed_and_with_a_history(model: Any, run: Any) -> None:
    agent = ai.Agent(model, instructions="Be brief.", retries=0)
    first = run(agent.run(ASKED, model_settings=SHORT))
    assert first.output
    assert first.usage.output_tokens == 20

    async def streamed() -> str:
        async with agent.run_stream(ASKED, model_settings=SHORT) as running:
            return "".join([part async for part in running.stream_text(delta=True)])

    assert run(streamed()) == first.output
    assert run(agent.run("And another?", message_history=first.all_messages(), model_settings=SHORT)).output


@pytest.mark.parametrize("how", [ai.ToolOutput, ai.NativeOutput])
def test_structured_output(model: Any, run: Any, how: Any) -> None:
    agent = ai.Agent(model, output_type=how(Module), retries=0)
    assert isinstance(run(agent.run(ASKED, model_settings=SETTINGS)).output, Module)

    async def streamed() -> Any:
        async with agent.run_stream(ASKED, model_settings=SETTINGS) as running:
            return await running.get_output()

    assert isinstance(run(streamed()), Module)


def test_a_tool_is_called_and_its_result_answered(model: Any, run: Any) -> None:
    """The first turn has to call it; the second has its result, and is to have a form."""
    called: list[str] = []

    def weather(**arguments: Any) -> str:
        called.append(arguments["city"])
        return get_weather(**arguments)

    schema = Weather.model_json_schema()
    tool = ai.Tool.from_schema(weather, name="get_weather", description="The weather.", json_schema=schema)
    agent = ai.Agent(model, tools=[tool], retries=0)

    def settings(context: Any) -> Any:
        return SETTINGS | {"tool_choice": "none" if called else ["get_weather"]}

    result = run(agent.run("The weather in Oslo?", model_settings=settings))
    assert len(called) == 1
    assert called[0] in ("Oslo", "Rome")
    assert result.output
    kinds = [part.part_kind for message in result.all_messages() for part in message.parts]
    assert kinds[:3] == ["user-prompt", "tool-call", "tool-return"]


def test_errors_say_what_is_wrong(model: Any, run: Any) -> None:
    from pydantic_ai.exceptions import ModelHTTPError

    with pytest.raises(ModelHTTPError, match="temperature") as caught:
        run(ai.Agent(model, retries=0).run(ASKED, model_settings={"temperature": -1.0, "max_tokens": 9}))
    assert caught.value.status_code == 400


def test_embeddings(url: str, run: Any) -> None:
    from pydantic_ai.embeddings.openai import OpenAIEmbeddingModel
    from pydantic_ai.providers.openai import OpenAIProvider

    embedder = ai.Embedder(OpenAIEmbeddingModel("demo", provider=OpenAIProvider(base_url=url, api_key="none")))
    found = run(embedder.embed_documents(["import os", "class Thread"]))
    assert len(found.embeddings) == 2
