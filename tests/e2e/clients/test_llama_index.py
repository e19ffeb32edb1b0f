"""LlamaIndex, which knows servers like this one as "like OpenAI's"."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.helpers.asked import ASKED, Module, get_weather

like = pytest.importorskip("llama_index.llms.openai_like")
pytestmark = pytest.mark.slow


@pytest.fixture(params=[False, True])
def llm(request: Any, url: str) -> Any:
    return like.OpenAILike(
        model="demo",
        api_base=url,
        api_key="none",
        max_tokens=200,
        temperature=0,
        max_retries=0,
        context_window=4096,
        is_chat_model=True,
        is_function_calling_model=True,
        should_use_structured_outputs=request.param,
    )


def test_answers_whole_streamed_and_async(llm: Any, run: Any) -> None:
    from llama_index.core.llms import ChatMessage

    talk = [ChatMessage(role="system", content="Be brief."), ChatMessage(role="user", content=ASKED)]
    answer = llm.chat(talk, max_tokens=20).message.content
    assert answer
    assert "".join(part.delta for part in llm.stream_chat(talk, max_tokens=20)) == answer
    assert run(llm.achat(talk, max_tokens=20)).message.content == answer
    assert llm.complete(ASKED, max_tokens=20).text


def test_tools_that_are_forced_and_the_turn_after_them(llm: Any) -> None:
    from llama_index.core.llms import ChatMessage
    from llama_index.core.tools import FunctionTool

    tool = FunctionTool.from_defaults(get_weather)
    talk = [ChatMessage(role="user", content="The weather in Oslo?")]
    forced: Any = {"chat_history": talk, "tool_required": True, "allow_parallel_tool_calls": False}
    answer = llm.chat_with_tools([tool], **forced)
    (call,) = llm.get_tool_calls_from_response(answer)
    *_, last = llm.stream_chat_with_tools([tool], **forced)
    (streamed,) = llm.get_tool_calls_from_response(last)
    assert call.tool_name == streamed.tool_name == "get_weather"
    assert call.tool_kwargs == streamed.tool_kwargs
    result = tool.call(**call.tool_kwargs)
    assert "Rain" in str(result)
    named = {"tool_call_id": call.tool_id, "name": call.tool_name}
    talk += [answer.message, ChatMessage(role="tool", content=str(result), additional_kwargs=named)]
    assert llm.chat_with_tools([tool], chat_history=talk, max_tokens=20).message.content
    assert "Rain" in str(llm.predict_and_call([tool], chat_history=talk[:1], tool_required=True))


def test_structured_output(llm: Any, run: Any) -> None:
    from llama_index.core.prompts import PromptTemplate

    prompt = PromptTemplate(ASKED)
    assert isinstance(llm.structured_predict(Module, prompt), Module)
    assert isinstance(run(llm.astructured_predict(Module, prompt)), Module)
    if llm.should_use_structured_outputs:  # else its stream leaves the choice to the model, which calls nothing
        *_, last = llm.stream_structured_predict(Module, prompt)
        assert Module.model_validate(last.model_dump())
    assert isinstance(llm.as_structured_llm(Module).complete(ASKED).raw, Module)


def test_an_agent_answers(llm: Any, run: Any) -> None:
    workflow = pytest.importorskip("llama_index.core.agent.workflow")
    llm.max_tokens = 30

    async def runs() -> str:
        agent = workflow.FunctionAgent(tools=[get_weather], llm=llm, system_prompt="Be brief.")
        return str(await agent.run("The weather in Oslo?"))

    assert run(runs())


def test_errors_are_its_clients(llm: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature"):
        llm.complete(ASKED, temperature=-1)


def test_completions_and_embeddings(url: str) -> None:
    plain = like.OpenAILike(model="demo", api_base=url, api_key="none", max_tokens=20, temperature=0, max_retries=0)
    text = plain.complete("import ").text
    assert "".join(part.delta for part in plain.stream_complete("import ")) == text != ""
    embeddings = pytest.importorskip("llama_index.embeddings.openai_like")
    model = embeddings.OpenAILikeEmbedding(model_name="demo", api_base=url, api_key="none", max_retries=0)
    (first, second) = model.get_text_embedding_batch(["import os", "class Thread"])
    assert len(first) == len(second)
    assert model.get_text_embedding("import os") == pytest.approx(first)
