"""OpenAI's agents SDK, over chats and responses."""

from __future__ import annotations

from typing import Any, Literal

import openai
import pytest

from tests.helpers.asked import ASKED, Module, get_weather

agents = pytest.importorskip("agents")
pytestmark = pytest.mark.slow
SOON: Any = {"logit_bias": {"2": 100}, "min_tokens": 5}  # the end of a turn, after five tokens or when JSON is complete


@pytest.fixture(params=["chat", "responses"])
def model(request: Any, url: str) -> Any:
    agents.set_tracing_disabled(True)
    client = openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0)
    kind = agents.OpenAIChatCompletionsModel if request.param == "chat" else agents.OpenAIResponsesModel
    return kind(model="demo", openai_client=client)


def settings(**more: Any) -> Any:
    """With what ends a text soon, since one that is cut is an error to it."""
    common: Any = {"max_tokens": 200, "temperature": 0.0, "include_usage": True, "extra_body": SOON}
    return agents.ModelSettings(**common | more)


def test_answers_whole_streamed_and_with_a_history(model: Any, run: Any) -> None:
    agent = agents.Agent(name="one", instructions="Be brief.", model=model, model_settings=settings())

    async def runs() -> None:
        first = await agents.Runner.run(agent, ASKED)
        assert first.final_output
        assert first.context_wrapper.usage.output_tokens > 0
        streamed = agents.Runner.run_streamed(agent, ASKED)
        texts = [
            event.data.delta
            async for event in streamed.stream_events()
            if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
        ]
        assert "".join(texts) == streamed.final_output == first.final_output
        again = await agents.Runner.run(agent, [*first.to_input_list(), {"role": "user", "content": "And another?"}])
        assert again.final_output

    run(runs())


def test_an_output_type(model: Any, run: Any) -> None:
    agent = agents.Agent(name="one", output_type=Module, model=model, model_settings=settings())

    async def runs() -> None:
        assert isinstance((await agents.Runner.run(agent, ASKED)).final_output, Module)
        streamed = agents.Runner.run_streamed(agent, ASKED)
        assert [event async for event in streamed.stream_events()]
        assert isinstance(streamed.final_output, Module)

    run(runs())


@pytest.mark.parametrize("choice", ["required", "weather"])
def test_a_tool_is_called_and_its_result_answered(model: Any, run: Any, choice: str) -> None:
    called = []

    @agents.function_tool
    def weather(city: Literal["Oslo", "Rome"], unit: Literal["celsius", "fahrenheit"]) -> str:
        """The weather."""
        called.append(city)
        return get_weather(city, unit)

    how = settings(tool_choice=choice, parallel_tool_calls=False)
    agent = agents.Agent(name="one", tools=[weather], model=model, model_settings=how)  # after it: auto

    async def runs() -> None:
        result = await agents.Runner.run(agent, "The weather in Oslo?", max_turns=4)
        assert len(called) >= 1
        assert result.final_output
        streamed = agents.Runner.run_streamed(agent, "The weather in Oslo?", max_turns=4)
        assert [event async for event in streamed.stream_events()]
        assert streamed.final_output == result.final_output

    run(runs())


def test_a_handoff_to_another_agent(model: Any, run: Any) -> None:
    other = agents.Agent(name="other", model=model, model_settings=settings())
    how = settings(tool_choice="required", parallel_tool_calls=False)
    first = agents.Agent(name="first", handoffs=[other], model=model, model_settings=how)
    result = run(agents.Runner.run(first, ASKED))
    assert result.last_agent.name == "other"
    assert result.final_output


def test_errors_are_its_clients(model: Any, run: Any) -> None:
    agent = agents.Agent(name="one", model=model, model_settings=settings(temperature=-1.0))
    with pytest.raises(openai.BadRequestError, match="temperature"):
        run(agents.Runner.run(agent, ASKED))
