"""OpenAI's and Anthropic's clients with pictures, as their documentation has them, of which the demo model that sees
tells what is in them."""

from __future__ import annotations

import io
from base64 import b64encode
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.helpers.servers import serving

anthropic = pytest.importorskip("anthropic")
Image = pytest.importorskip("PIL.Image")
ImageDraw = pytest.importorskip("PIL.ImageDraw")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def seeing() -> Iterator[str]:
    with serving("demo-vl") as server:
        yield server.url


def circle(colour: str) -> str:
    image = Image.new("RGB", (200, 200), "white")
    ImageDraw.Draw(image).ellipse((50, 50, 150, 150), fill=colour)
    file = io.BytesIO()
    image.save(file, "PNG")
    return b64encode(file.getvalue()).decode()


def url(colour: str) -> str:
    return f"data:image/png;base64,{circle(colour)}"


def test_openai(seeing: str) -> None:
    client = openai.OpenAI(base_url=f"{seeing}/v1", api_key="none", max_retries=0)
    for colour in ("red", "blue"):
        parts: Any = [
            {"type": "image_url", "image_url": {"url": url(colour), "detail": "high"}},
            {"type": "text", "text": "What is in this image?"},
        ]
        answer = client.chat.completions.create(model="demo-vl", messages=[{"role": "user", "content": parts}])
        assert answer.choices[0].message.content == f"A {colour} circle."
        given: Any = [
            {"type": "input_image", "image_url": url(colour), "detail": "auto"},
            {"type": "input_text", "text": "What colour is the circle?"},
        ]
        response = client.responses.create(model="demo-vl", input=[{"role": "user", "content": given}])
        assert response.output_text == f"{colour.capitalize()}."
        more = client.responses.create(
            model="demo-vl", input="What shape is it?", previous_response_id=response.id, store=True
        )
        assert more.output_text == "A circle."
    parts[0]["image_url"]["url"] = "data:image/png;base64,AAAA"
    with pytest.raises(openai.BadRequestError, match="is not an image"):
        client.chat.completions.create(model="demo-vl", messages=[{"role": "user", "content": parts}])


def test_openai_streams(seeing: str) -> None:
    client = openai.OpenAI(base_url=f"{seeing}/v1", api_key="none", max_retries=0)
    parts: Any = [
        {"type": "text", "text": "What do you see?"},
        {"type": "image_url", "image_url": {"url": url("green")}},
    ]
    stream = client.chat.completions.create(model="demo-vl", messages=[{"role": "user", "content": parts}], stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "A green circle."


def test_anthropic(seeing: str) -> None:
    client = anthropic.Anthropic(base_url=seeing, api_key="none", max_retries=0)
    source: Any = {"type": "base64", "media_type": "image/png", "data": circle("purple")}
    blocks: Any = [{"type": "image", "source": source}, {"type": "text", "text": "Describe this image."}]
    asked: Any = {"model": "demo-vl", "messages": [{"role": "user", "content": blocks}]}
    answer = client.messages.create(max_tokens=20, **asked)
    assert answer.content[0].text == "A purple circle."
    assert client.messages.count_tokens(**asked).input_tokens == answer.usage.input_tokens > 16
    with client.messages.stream(max_tokens=20, **asked) as stream:
        assert "".join(stream.text_stream) == "A purple circle."
    source["data"] = "AAAA"
    with pytest.raises(anthropic.BadRequestError, match="is not an image"):
        client.messages.create(max_tokens=20, **asked)
