"""instructor in each of its modes that goes by OpenAI's or Anthropic's routes."""

from __future__ import annotations

from typing import Any

import openai
import pydantic
import pytest

from tests.helpers.asked import ASKED, Module

instructor = pytest.importorskip("instructor")
pytestmark = pytest.mark.slow
ENDS = {"95": 30.0}  # a token of the demo model that begins with what closes an object
TALK: Any = [{"role": "user", "content": ASKED}]
COMMON: Any = {"model": "demo", "messages": TALK, "max_tokens": 200, "temperature": 0, "max_retries": 0}


class Anything(pydantic.BaseModel, extra="allow"):
    """JSON mode enforces that it is JSON, and the demo model does not do more by itself."""


def client_of(url: str, mode: Any) -> Any:
    return instructor.from_openai(openai.OpenAI(base_url=url, api_key="none", max_retries=0), mode=mode)


@pytest.mark.parametrize("mode", ["TOOLS", "TOOLS_STRICT", "JSON_SCHEMA", "RESPONSES_TOOLS"])
def test_a_model_of_pydantic(url: str, mode: str) -> None:
    client = client_of(url, instructor.Mode[mode])
    found, raw = client.chat.completions.create_with_completion(response_model=Module, **COMMON)
    assert isinstance(found, Module)
    assert raw.usage.total_tokens


def test_json_mode(url: str) -> None:
    client = client_of(url, instructor.Mode.JSON)
    assert isinstance(client.chat.completions.create(response_model=Anything, logit_bias=ENDS, **COMMON), Anything)


@pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA"])
def test_streams_of_parts_and_of_several(url: str, mode: str) -> None:
    client = client_of(url, instructor.Mode[mode])
    *_, last = client.chat.completions.create_partial(response_model=Module, **COMMON)
    assert Module.model_validate(last.model_dump())
    for one in client.chat.completions.create_iterable(response_model=Module, **COMMON | {"max_tokens": 600}):
        assert isinstance(one, Module)
        break


def test_async(url: str, run: Any) -> None:
    client = instructor.from_openai(openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0))
    found = run(client.chat.completions.create(response_model=Module, **COMMON))
    assert isinstance(found, Module)


def test_retries_say_what_was_wrong(url: str) -> None:
    class Never(pydantic.BaseModel):
        name: str = pydantic.Field(max_length=3)

        @pydantic.field_validator("name")
        @classmethod
        def refused(cls, value: str) -> str:
            raise ValueError(f"{value!r} is not wanted")

    from instructor.core import InstructorRetryException

    client = client_of(url, instructor.Mode.TOOLS)
    with pytest.raises(InstructorRetryException) as caught:  # each try is a turn of tools
        client.chat.completions.create(response_model=Never, **COMMON | {"max_retries": 2})
    assert "is not wanted" in str(caught.value)


def test_anthropics_messages(alone: Any) -> None:
    anthropic = pytest.importorskip("anthropic")
    given = anthropic.Anthropic(base_url=alone.url, api_key="none", max_retries=0)
    client = instructor.from_anthropic(given, mode=instructor.Mode.ANTHROPIC_TOOLS)
    found = client.messages.create(response_model=Module, model="demo", max_tokens=200, messages=TALK, max_retries=0)
    assert isinstance(found, Module)
