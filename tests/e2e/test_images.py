"""A model that sees behind a real server."""

import io
import json
from base64 import b64encode
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from penstock.cli.main import main
from penstock.service.request_record import FIRST, RequestRecord
from tests.helpers.servers import serving
from tests.helpers.waiting import eventually
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
def record(tmp_path_factory):
    return tmp_path_factory.mktemp("record")


@pytest.fixture(scope="module")
def server(checkpoint, record):
    with serving(str(checkpoint), *FLAGS, "--served-model-name", "tiny", "--record-requests", str(record)) as server:
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


def chat_parts(*images: bytes, text: str = "What is it?"):
    parts = [{"type": "image_url", "image_url": {"url": url(image)}} for image in images]
    return [{"role": "user", "content": [{"type": "text", "text": text}, *parts]}]


def test_tokenize_counts_what_a_model_sees(server):
    red = drawn("red", 280, 280)
    found = httpx.post(server.url + "/tokenize", json={"messages": chat_parts(red)}).json()
    assert found["tokens"] == ask(server, red).json()["prompt_token_ids"]
    body = {"messages": chat_parts(red), "max_tokens": 2}
    answer = httpx.post(server.url + "/invocations", json=body, timeout=60).json()
    assert answer["usage"]["prompt_tokens"] == found["count"]


def test_images_in_a_prompt(server):
    """As RTP-LLM has them: a tag for each URL."""
    red, blue = url(drawn("red", 280, 280)), url(drawn("blue", 280, 280))
    asked = {"model": "tiny", "max_tokens": 8, "temperature": 0.0, "logprobs": 0, "return_token_ids": True}

    def complete(prompt, **more):
        body = asked | {"prompt": prompt, "ignore_eos": True} | more
        return httpx.post(server.url + "/v1/completions", json=body, timeout=60)

    both = complete("<image>\nand <image>: ", urls=[red, blue]).json()["choices"][0]
    assert both["prompt_token_ids"].count(4098) == 200
    again = complete("<image>\nand <image>: ", images=[red, blue]).json()["choices"][0]
    assert again["logprobs"] == both["logprobs"]
    other = complete("<image>\nand <image>: ", urls=[blue, red]).json()["choices"][0]
    assert other["logprobs"] != both["logprobs"]
    assert other["prompt_token_ids"] == both["prompt_token_ids"]
    plain = complete("<image> is a tag").json()["choices"][0]["prompt_token_ids"]
    assert 4098 not in plain
    for prompt, more, field, said in (
        ("no tag", {"urls": [red]}, "urls", "1 images, the prompt has 0 times <image>"),
        ("<image><image>", {"urls": [red]}, "urls", "2 times <image>"),
        ([5, 6], {"urls": [red]}, "urls", "1 images, the prompt has 0 tokens for one"),
        ("<image>", {"urls": [red], "images": [red]}, "images", "without urls"),
        (["<image>", "<image>"], {"images": [red]}, "images", "a single prompt"),
        ("<image>", {"urls": ["data:image/png;base64,AAAA"]}, "urls[0]", "not an image"),
        ("<image>", {"urls": ["http://127.0.0.1/a.png"]}, "urls[0]", "--allowed-media-domains"),
        ("<image><|image_pad|>", {"urls": [red]}, "prompt", "no text that reads as one"),
        ("<image>", {"urls": [red], "truncate_prompt_tokens": 5}, "truncate_prompt_tokens", "only without images"),
    ):
        refused = complete(prompt, **more)
        assert refused.status_code == 400, refused.text
        error = refused.json()["error"]
        assert (error["param"], said in error["message"]) == (field, True), error


def test_what_tools_show(server):
    """Images in the results of tools, of Anthropic's messages and of Responses."""
    red = drawn("red", 280, 280)
    source = {"type": "base64", "media_type": "image/png", "data": b64encode(red).decode()}
    call = {"type": "tool_use", "id": "c", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "image", "source": source}]}
    talk = [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result, {"type": "text", "text": "And?"}]},
    ]
    plain = [*talk[:2], {"role": "user", "content": [result | {"content": ""}, {"type": "text", "text": "And?"}]}]
    counts = [
        httpx.post(server.url + "/v1/messages/count_tokens", json={"model": "tiny", "messages": each}, timeout=60)
        for each in (talk, plain)
    ]
    seen, blind = (each.json()["input_tokens"] for each in counts)
    assert seen == blind + 100 + 2, "and the marks around it"
    body = {"model": "tiny", "messages": talk, "max_tokens": 3}
    assert httpx.post(server.url + "/v1/messages", json=body, timeout=60).status_code == 200
    source["data"] = "AAAA"
    refused = httpx.post(server.url + "/v1/messages", json=body, timeout=60)
    assert "messages[2].content[0].content[0].source: the image is not" in refused.json()["error"]["message"]
    items = [
        {"role": "user", "content": "Look."},
        {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_image", "image_url": url(red)}]},
    ]
    body = {"model": "tiny", "input": items, "max_output_tokens": 3}
    answer = httpx.post(server.url + "/v1/responses", json=body, timeout=60).json()
    assert answer["usage"]["input_tokens"] > 100
    items[2]["output"][0]["image_url"] = "data:image/png;base64,AAAA"
    refused = httpx.post(server.url + "/v1/responses", json=body, timeout=60).json()["error"]
    assert refused["param"] == "input[2].output[0].image_url"


def test_the_document_has_images(server):
    assert httpx.get(server.url + "/v1/models").json()["data"][0]["input_modalities"] == ["text", "image", "video"]
    paths = httpx.get(server.url + "/openapi.json").json()["paths"]
    for path, kind in (
        ("/v1/chat/completions", "image_url"),
        ("/tokenize", "video_url"),
        ("/v1/responses", "input_image"),
        ("/v1/messages", "image/webp"),
    ):
        assert kind in json.dumps(paths[path]["post"]["requestBody"]), path


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


def test_recorded_requests_bring_the_same_tokens_again(server, record, tmp_path):
    """An image that comes twice, a video, and urls of a completion; an image that the record lacks is named."""
    from tests.helpers.hostile import video

    film = {"type": "video_url", "video_url": {"url": f"data:video/mp4;base64,{b64encode(video(16, 84, 56)).decode()}"}}
    picture = {"type": "image_url", "image_url": {"url": url(drawn("purple"))}}
    asked = {
        "twice": [picture, {"type": "text", "text": "What are they?"}, picture],
        "both": [film, picture, {"type": "text", "text": "What is it?"}],
    }
    for name, parts in asked.items():
        body = {"model": "tiny", "messages": [{"role": "user", "content": parts}], "max_tokens": 12, "logprobs": True}
        headers = {"x-request-id": name}
        answer = httpx.post(server.url + "/v1/chat/completions", json=body, headers=headers, timeout=60)
        assert answer.status_code == 200, answer.text
    body = {"model": "tiny", "prompt": "<image> is", "urls": [url(drawn("purple"))], "max_tokens": 12, "n": 2}
    answer = httpx.post(server.url + "/v1/completions", json=body, headers={"x-request-id": "text"}, timeout=60)
    assert answer.status_code == 200, answer.text

    def recorded():
        with RequestRecord(record) as found:
            return {line.id: len(found.read(line).media) for line in found.lines}

    names = {"twice": 2, "both": 2, "text": 1}
    eventually(lambda: names.items() <= recorded().items())
    chosen = [word for name in names for word in ("--request", name)]
    flags = ["--url", server.url, "--json", str(tmp_path / "out.json")]
    assert main(["replay", str(record), *flags, *chosen]) == 0
    found = json.loads((tmp_path / "out.json").read_text())
    assert (found["same"], found["outputs"], found["numbers"]) == (3, 4, 24)
    assert found["equal_numbers"] == 24
    lines = (record / "frontend-0.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "requests.jsonl").write_bytes(b"".join(line for line in lines if b'"file"' not in line[:FIRST]))
    assert main(["replay", str(tmp_path), *flags, *chosen]) == 1
    found = json.loads((tmp_path / "out.json").read_text())
    assert (found["not_compared"], found["failed"]) == (3, 0)
    assert "the record lacks an image of it" in found["not_compared_requests"][0]["why"]
