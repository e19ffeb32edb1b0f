"""Over a real server on loopback: OpenAI's own client, and clients that leave."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import openai
import pytest

from penstock.core.errors import EngineFailure, Overloaded
from penstock.obs.exposition import Exposition
from tests.helpers.waiting import until

pytestmark = pytest.mark.anyio
HI: Any = [{"role": "user", "content": "hi"}]
PATIENCE = 10.0  # seconds, for what should take milliseconds


async def soon(awaitable: Awaitable[Any]) -> Any:
    async with asyncio.timeout(PATIENCE):
        return await awaitable


def openai_client(url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


async def test_openai_chat(url: str) -> None:
    async with openai_client(url) as client:
        answer = await client.chat.completions.create(
            model="tiny", messages=HI, n=2, logprobs=True, top_logprobs=1, max_completion_tokens=9
        )
        assert [choice.message.content for choice in answer.choices] == ["Hello", "Hello"]
        assert answer.choices[1].finish_reason == "stop"
        logprobs = answer.choices[0].logprobs
        assert logprobs is not None
        assert logprobs.content is not None
        assert "".join(entry.token for entry in logprobs.content[:5]) == "Hello"
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        assert answer.usage.prompt_tokens_details.cached_tokens == 2


async def test_openai_chat_stream_helper(url: str) -> None:
    options: Any = {"include_usage": True}
    async with (
        openai_client(url) as client,
        client.chat.completions.stream(model="tiny", messages=HI, logprobs=True, stream_options=options) as stream,
    ):
        kinds = {event.type async for event in stream}
        final = await stream.get_final_completion()
    assert {"content.delta", "content.done"} <= kinds
    (choice,) = final.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "Hello", "stop")
    assert final.usage is not None
    assert final.usage.completion_tokens == 6


async def test_openai_completions(url: str) -> None:
    async with openai_client(url) as client:
        answer = await client.completions.create(model="tiny", prompt=["a", "b"], echo=True)
        assert [choice.text for choice in answer.choices] == ["aHello", "bHello"]
        scored = await client.completions.create(model="tiny", prompt="a", logprobs=1)
        logprobs = scored.choices[0].logprobs
        assert logprobs is not None
        assert logprobs.text_offset == [0, 1, 2, 3, 4, 5]
        stream = await client.completions.create(model="tiny", prompt="a", stream=True)
        assert "".join([chunk.choices[0].text async for chunk in stream]) == "Hello"
        assert [model.id async for model in client.models.list()] == ["org/tiny", "tiny"]
        assert (await client.models.retrieve("org/tiny")).owned_by == "penstock"


async def test_openai_embeddings(url: str) -> None:
    async with openai_client(url) as client:  # it asks for base64, and decodes it
        answer = await client.embeddings.create(model="tiny", input=["abcda", "b"], dimensions=2)
        assert [row.embedding for row in answer.data] == [pytest.approx([5**-0.5, 2 * 5**-0.5]), [0.0, 0.0]]
        assert (answer.model, answer.usage.total_tokens) == ("tiny", 6)
        plain = await client.embeddings.create(model="tiny", input=[98], encoding_format="float")
        assert plain.data[0].embedding == [0.0, 0.0, 1.0, 0.0]


async def test_openai_errors(url: str, frontend: Any) -> None:
    async with openai_client(url) as client:
        with pytest.raises(openai.NotFoundError, match="org/tiny"):
            await client.chat.completions.create(model="gpt", messages=HI)
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(model="tiny", messages=HI, temperature=-1)
        assert caught.value.param == "temperature"
        tools: Any = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
        with pytest.raises(openai.BadRequestError, match="tool-call-parser"):
            await client.chat.completions.create(model="tiny", messages=HI, tools=tools)
        frontend.script = lambda generation: generation.fail(Overloaded("full", 7))
        with pytest.raises(openai.RateLimitError) as limited:
            await client.chat.completions.create(model="tiny", messages=HI, stream=True)
        assert limited.value.response.headers["retry-after"] == "7"


async def test_openai_sees_an_error_inside_a_stream(url: str, frontend: Any) -> None:
    def script(generation: Any) -> None:
        generation.say("Hel")
        generation.fail(EngineFailure("the engine died"))

    frontend.script = script
    async with openai_client(url) as client:
        stream = await client.chat.completions.create(model="tiny", messages=HI, stream=True)
        with pytest.raises(openai.APIError, match="the engine died"):
            async for _ in stream:
                pass


async def test_tokens_are_sent_as_they_come(url: str, frontend: Any) -> None:
    frontend.script = lambda generation: None
    body = {"messages": HI, "stream": True}
    async with httpx.AsyncClient() as client:
        call = asyncio.create_task(
            client.send(client.build_request("POST", f"{url}/v1/chat/completions", json=body), stream=True)
        )
        await until(lambda: bool(frontend.submitted))
        (generation,) = frontend.submitted
        generation.say("one")
        response = await soon(call)
        lines = response.aiter_lines()

        async def next_text() -> str:
            async for line in lines:
                if line:
                    content = json.loads(line.removeprefix("data: "))["choices"][0]["delta"].get("content")
                    if content:
                        return content
            raise AssertionError("the stream ended")

        for word in ("two", "three"):
            assert await soon(next_text()) == {"two": "one", "three": "two"}[word]
            generation.say(word)
        await response.aclose()


async def disconnect_once(url: str, body: dict[str, Any], ready: Callable[[], bool], answered: bool = False) -> None:
    """Sends a request on a bare connection and closes it as soon as `ready`, and as an answer begins if it shall."""
    port = int(url.rsplit(":", 1)[1])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}"
    writer.write(head.encode() + b"\r\n\r\n" + data)
    await until(ready)
    if answered:
        await soon(reader.readline())
    writer.close()
    await writer.wait_closed()


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("said", [[], ["some"]])
async def test_a_client_that_leaves_cancels(
    url: str, frontend: Any, exposition: Exposition, stream: bool, said: list[str]
) -> None:
    """Before the first token (queued, prefilling) and after it; streamed or not."""
    frontend.script = lambda generation: [generation.say(word) for word in said]
    body = {"prompt": ["a", "b"], "stream": stream}
    streaming = stream and bool(said)
    await disconnect_once(url, body, lambda: len(frontend.submitted) == 2, answered=streaming)
    for generation in frontend.submitted:
        await soon(generation.cancelled.wait())
    status = 200 if streaming else 499
    line = f'penstock:http_requests_total{{route="/v1/completions",status="{status}"}} 1.0'
    await until(lambda: line in exposition.render()[0].decode())


async def test_a_client_that_leaves_while_its_prompt_is_tokenised(url: str, frontend: Any) -> None:
    frontend.encoding_blocked = True
    started = asyncio.Event()
    frontend.on_block = started.set
    await disconnect_once(url, {"prompt": "a"}, started.is_set)
    await soon(frontend.encoding_cancelled.wait())
    assert not frontend.submitted


async def test_a_client_that_leaves_in_the_middle_of_its_body(url: str, frontend: Any, exposition: Exposition) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", int(url.rsplit(":", 1)[1]))
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 99\r\n\r\n{"
    writer.write(head)
    await writer.drain()
    writer.close()
    line = 'penstock:http_requests_total{route="/v1/completions",status="499"} 1.0'
    await until(lambda: line in exposition.render()[0].decode())
    assert not frontend.submitted


async def test_a_connection_serves_one_request_after_another_and_keeps_no_task(url: str, frontend: Any) -> None:
    """The listener for disconnects takes nothing that belongs to the next request, and ends with its own."""
    async with httpx.AsyncClient(limits=httpx.Limits(max_connections=1)) as client:
        for stream in (True, False, True):
            response = await client.post(f"{url}/v1/completions", json={"prompt": "a", "stream": stream})
            assert response.status_code == 200
        before = len(asyncio.all_tasks())
        for _ in range(5):
            await client.post(f"{url}/v1/completions", json={"prompt": ["a", "b"], "stream": True})
        await until(lambda: len(asyncio.all_tasks()) <= before)
    assert len(frontend.submitted) == 13
