"""A model that sees behind a real server."""

import io
import json
from base64 import b64encode
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.helpers.servers import serving
from tools.make_checkpoint import write

pytest.importorskip("transformers")
Image = pytest.importorskip("PIL.Image")
FLAGS = (
    "--max-num-batched-tokens",
    "128",
    "--max-model-len",
    "4096",
    "--kv-cache-memory",
    "64M",
    "--max-num-seqs",
    "8",
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    write("qwen2.5-vl-tiny", folder)
    return folder


@pytest.fixture(scope="module")
def server(checkpoint):
    with serving(str(checkpoint), *FLAGS, "--served-model-name", "tiny") as server:
        yield server


def drawn(colour: str, width: int = 600, height: int = 420, kind: str = "PNG") -> bytes:
    """Larger than a step: 15 rows of 21 tokens."""
    image = Image.new("RGB", (width, height), "white")
    image.paste(colour, (width // 4, height // 4, width // 2, height // 2))
    file = io.BytesIO()
    image.save(file, kind)
    return file.getvalue()


def url(data: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{b64encode(data).decode()}"


def ask(server, *images: bytes, text: str = "What is it?", **options):
    parts = [{"type": "text", "text": text}]
    parts += [{"type": "image_url", "image_url": {"url": url(image)}} for image in images]
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": parts}],
        "max_tokens": 12,
        "temperature": 1.0,
        "seed": 3,
        "ignore_eos": True,
        "return_token_ids": True,
        "logprobs": True,
        **options,
    }
    return httpx.post(server.url + "/v1/chat/completions", json=body, timeout=60)


def said(answer) -> list[tuple[str, float]]:
    """Tokens and their log-probabilities, which are never the same by chance."""
    assert answer.status_code == 200, answer.text
    return [(each["token"], each["logprob"]) for each in answer.json()["choices"][0]["logprobs"]["content"]]


def cached(answer) -> int:
    return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_images_are_told_apart_and_found_again(server):
    red, blue = drawn("red"), drawn("blue")
    first = ask(server, red)
    assert image_tokens(first) == 15 * 21
    assert cached(first) == 0
    again = ask(server, red)
    assert said(again) == said(first)
    assert cached(again) >= 15 * 21
    other = ask(server, blue)
    assert said(other) != said(first)
    assert cached(other) < 64, "only what is before the image may be found"
    assert said(ask(server, drawn("red", kind="BMP"))) == said(first), "the same pixels are the same image"


def image_tokens(answer) -> int:
    return answer.json()["prompt_token_ids"].count(4098)


def test_the_same_tokens_alone_and_in_company(server):
    """Prompts of several chunks, each cut inside its image, beside others."""
    images = [drawn(colour, 560 + 28 * i, 420) for i, colour in enumerate(("red", "green", "blue", "black"))]
    salts = [{"cache_salt": f"s{i}"} for i in range(2)]  # nothing is found of the others' KV
    alone = [said(ask(server, image, **salts[0])) for image in images]
    with ThreadPoolExecutor(8) as pool:
        texts = [pool.submit(ask, server, text=f"And {i}?") for i in range(4)]
        together = [pool.submit(ask, server, image, **salts[1]) for image in images]
        assert [said(each.result()) for each in together] == alone
        assert all(said(each.result()) for each in texts)


def test_other_apis(server):
    """Responses and Anthropic's messages ask what a chat does."""
    red = drawn("red", 280, 280)
    text = ask(server, red, temperature=0.0).json()["choices"][0]["message"]["content"]
    parts = [{"type": "input_text", "text": "What is it?"}, {"type": "input_image", "image_url": url(red)}]
    body = {"model": "tiny", "input": [{"role": "user", "content": parts}], "temperature": 0.0, "ignore_eos": True}
    answer = httpx.post(server.url + "/v1/responses", json=body | {"max_output_tokens": 12}, timeout=60).json()
    assert answer["output"][-1]["content"][0]["text"] == text
    blocks = [
        {"type": "text", "text": "What is it?"},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": b64encode(red).decode()}},
    ]
    body = {"model": "tiny", "messages": [{"role": "user", "content": blocks}], "temperature": 0.0, "max_tokens": 12}
    answer = httpx.post(server.url + "/v1/messages", json=body, timeout=60).json()
    of_prompt = answer["usage"]["input_tokens"] + answer["usage"]["cache_read_input_tokens"]
    assert of_prompt == ask(server, red).json()["usage"]["prompt_tokens"]
    assert text.startswith(answer["content"][0]["text"])
    counted = httpx.post(server.url + "/v1/messages/count_tokens", json=body, timeout=60).json()
    assert counted["input_tokens"] == of_prompt
    blocks[1]["source"]["data"] = "AAAA"
    refused = httpx.post(server.url + "/v1/messages", json=body, timeout=60)
    assert refused.status_code == 400
    assert "messages[0].content[1].source: the image is not an image" in refused.json()["error"]["message"]


def test_streams(server):
    body = {"stream": True}
    lines = [line for line in ask(server, drawn("red"), **body).text.splitlines() if line.startswith("data: {")]
    assert sum(len(json.loads(line[6:])["choices"][0].get("token_ids") or ()) for line in lines) == 12


def test_what_is_refused(server):
    assert "4096" in ask(server, *[drawn("red", 1120, 1120)] * 4).json()["error"]["message"], "longer than the context"
    refused = ask(server, drawn("red"), truncate_prompt_tokens=20)
    assert refused.json()["error"]["param"] == "truncate_prompt_tokens"
    refused = ask(server, drawn("red"), text="<|image_pad|>")
    assert "places for images" in refused.json()["error"]["message"]
    refused = ask(server, text="<|image_pad|>")
    assert refused.status_code == 200, "without an image it is a token as any other"
