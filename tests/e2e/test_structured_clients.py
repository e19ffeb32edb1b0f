"""Client libraries that ask for structured outputs, as they are, against the server with its demo model."""

from __future__ import annotations

from typing import Any, Literal

import openai
import pydantic
import pytest

pytestmark = pytest.mark.slow
ENDS = [95]  # tokens of the demo model that begin with what closes an object
ASKED = "Name a module of Python's standard library, and what it is for."


class Module(pydantic.BaseModel):
    """Of Python's standard library."""

    name: str = pydantic.Field(max_length=12)
    kind: Literal["text", "files", "network"]
    lines: int = pydantic.Field(ge=1, le=99999)
    tags: list[Literal["a", "b"]] = pydantic.Field(max_length=3)


@pytest.fixture
def url(alone) -> str:
    return f"{alone.url}/v1"


def test_openai(url):
    client = openai.OpenAI(base_url=url, api_key="none")
    asked: Any = [{"role": "user", "content": ASKED}]
    answer = client.chat.completions.parse(model="demo", messages=asked, response_format=Module, max_tokens=200)
    assert isinstance(answer.choices[0].message.parsed, Module)
    with client.chat.completions.stream(model="demo", messages=asked, response_format=Module, max_tokens=200) as stream:
        for _ in stream:
            pass
    assert isinstance(stream.get_final_completion().choices[0].message.parsed, Module)


def test_instructor(url):
    instructor = pytest.importorskip("instructor")

    class Anything(pydantic.BaseModel, extra="allow"):
        """JSON mode enforces that it is JSON, and the demo model does not do more by itself."""

    brief = {str(token): 30.0 for token in ENDS}
    for mode, model, more in (
        (instructor.Mode.JSON_SCHEMA, Module, {}),
        (instructor.Mode.JSON, Anything, {"logit_bias": brief}),
    ):
        client = instructor.from_openai(openai.OpenAI(base_url=url, api_key="none"), mode=mode)
        asked: Any = [{"role": "user", "content": ASKED}]
        found = client.chat.completions.create(
            model="demo", messages=asked, response_model=model, max_tokens=200, max_retries=0, **more
        )
        assert isinstance(found, model)


def test_langchain(url):
    langchain = pytest.importorskip("langchain_openai")
    chat = langchain.ChatOpenAI(model="demo", base_url=url, api_key="none", max_tokens=200)
    assert isinstance(chat.with_structured_output(Module).invoke(ASKED), Module)
    assert isinstance(chat.with_structured_output(Module, method="json_schema", strict=True).invoke(ASKED), Module)
    assert isinstance(list(chat.with_structured_output(Module).stream(ASKED))[-1], Module)


def test_pydantic_ai(url):
    ai = pytest.importorskip("pydantic_ai")
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel("demo", provider=OpenAIProvider(base_url=url, api_key="none"))
    agent = ai.Agent(model, output_type=ai.NativeOutput(Module), retries=0)
    assert isinstance(agent.run_sync(ASKED, model_settings={"max_tokens": 200}).output, Module)
