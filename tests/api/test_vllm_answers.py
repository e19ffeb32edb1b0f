"""What vLLM has in its answers, and routes that only it has."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from penstock.api import background
from penstock.api.schema import AnswerDefaults
from penstock.core.errors import EngineFailure

pytestmark = pytest.mark.anyio
CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
HI = [{"role": "user", "content": "hi"}]
TALK = [*HI, {"role": "assistant", "content": "Well, "}]


def chunks_of(response: httpx.Response) -> list[Any]:
    *lines, done = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert done == "[DONE]"
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("flag", [True, False])
async def test_tokens_by_their_ids(make_client: Any, flag: bool) -> None:
    wish = {} if flag else {"return_tokens_as_token_ids": True}
    async with make_client(answer_defaults=AnswerDefaults(tokens_as_ids=flag)) as client:
        chat = (await client.post(CHAT, json={"messages": HI, "logprobs": True, "top_logprobs": 1} | wish)).json()
        entry = chat["choices"][0]["logprobs"]["content"][0]
        assert (entry["token"], entry["bytes"]) == (f"token_id:{ord('H')}", [ord("H")])
        assert entry["top_logprobs"][0]["token"] == entry["token"]
        text = (await client.post(TEXT, json={"prompt": "a", "echo": True, "logprobs": 1} | wish)).json()
        found = text["choices"][0]["logprobs"]
        assert found["tokens"][:2] == ["token_id:97", "token_id:72"]
        assert "token_id:72" in found["top_logprobs"][1]
        plain = {"messages": HI, "logprobs": True, "return_tokens_as_token_ids": False}
        named = (await client.post(CHAT, json=plain)).json()["choices"][0]["logprobs"]["content"]
        assert named[0]["token"] == "H"  # a request's own word comes first


async def test_tokens_whose_logprobs_are_wanted(client: httpx.AsyncClient, frontend: Any) -> None:
    body = {"logprobs": 5, "prompt": "a", "logprob_token_ids": [7, 9]}
    assert (await client.post(TEXT, json=body)).status_code == 200
    chat = {"messages": HI, "logprobs": True, "top_logprobs": 5, "logprob_token_ids": [7, 9]}
    assert (await client.post(CHAT, json=chat)).status_code == 200
    for one in frontend.submitted:
        assert (one.params.logprobs, one.params.logprob_token_ids) == (0, (7, 9))
    for wrong in (
        {"logprobs": False},
        {"logprob_token_ids": []},
        {"logprob_token_ids": [257]},
        {"logprob_token_ids": list(range(129))},
        {"use_beam_search": True},
    ):
        answer = await client.post(CHAT, json=chat | {"top_logprobs": None} | wrong)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "logprob_token_ids"), wrong
    nothing = body | {"echo": True, "max_tokens": 0}
    assert (await client.post(TEXT, json=nothing)).json()["error"]["param"] == "logprob_token_ids"


@pytest.mark.parametrize("stream", [True, False])
async def test_a_message_that_is_gone_on_with_is_echoed(client: httpx.AsyncClient, stream: bool) -> None:
    async def said(**fields: Any) -> str:
        answer = await client.post(CHAT, json={"messages": TALK, "stream": stream} | fields)
        if not stream:
            return answer.json()["choices"][0]["message"]["content"]
        return "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks_of(answer))

    assert await said(echo=True, continue_final_message=True) == "Well, Hello"
    assert await said(continue_final_message=True) == "Hello"
    assert await said(echo=True) == "Hello"  # a new message
    assert await said(echo=True, continue_final_message=True, messages=HI) == "Hello"  # the user's is no answer


async def test_prompts_of_chats(client: httpx.AsyncClient, frontend: Any) -> None:
    special = {"messages": [{"role": "special", "content": "x"}]}  # the tokenizer adds a token to such a text
    await client.post(CHAT, json=special)
    await client.post(CHAT, json=special | {"add_special_tokens": True})
    without, with_ = (one.prompt for one in frontend.submitted)
    assert with_ == [*without, 256]
    asked = {"messages": HI, "return_token_ids": True}
    given = await client.post(CHAT, json=asked | {"kv_transfer_params": {"prompt_token_ids": [5, 6], "do_x": None}})
    assert given.json()["prompt_token_ids"] == [5, 6]
    for params, field in (
        ({"remote_engine_id": "e"}, "remote_engine_id"),
        ({"prompt_token_ids": []}, "prompt_token_ids"),
        ({"prompt_token_ids": [999]}, "prompt_token_ids"),
    ):
        answer = await client.post(CHAT, json=asked | {"kv_transfer_params": params})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, f"kv_transfer_params.{field}")


async def test_all_wrong_keys_of_a_bias_are_named(client: httpx.AsyncClient) -> None:
    bias = {"a": 1, "300": 2, "7": 3}
    error = (await client.post(CHAT, json={"messages": HI, "logit_bias": bias})).json()["error"]["message"]
    assert error.startswith("logit_bias: 'a', '300', allowed are token ids from 0 to 256")


@pytest.mark.parametrize(("url", "fields"), [(CHAT, {"messages": HI}), (TEXT, {"prompt": "a", "echo": True})])
async def test_what_flags_add_to_answers(make_client: Any, url: str, fields: dict[str, Any]) -> None:
    times = {"time_to_first_token_ms": 250.0, "generation_time_ms": 500.0, "queue_time_ms": 125.0}
    times |= {"mean_itl_ms": 100.0, "tokens_per_second": 8.0}
    async with make_client(answer_defaults=AnswerDefaults(usage=True, timing=True)) as client:
        assert (await client.post(url, json=fields)).json()["metrics"] == times
        *chunks, last = chunks_of(await client.post(url, json=fields | {"stream": True}))
        assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [0, 6]
        assert not any("metrics" in chunk for chunk in chunks)
        assert (last["choices"], last["usage"]["completion_tokens"], last["metrics"]) == ([], 6, times)
    async with make_client() as client:
        assert "metrics" not in (await client.post(url, json=fields)).json()


async def test_the_tier_that_served(client: httpx.AsyncClient, frontend: Any) -> None:
    for asked, served in {"auto": "default", "scale": "default", "flex": "flex", "priority": "priority"}.items():
        body = {"messages": HI, "service_tier": asked}
        assert (await client.post(CHAT, json=body)).json()["service_tier"] == served
        chunks = chunks_of(await client.post(CHAT, json=body | {"stream": True}))
        assert {chunk["service_tier"] for chunk in chunks} == {served}
    assert [one.level.priority for one in frontend.submitted[-2:]] == [-1, -1]


async def test_one_route_for_all(client: httpx.AsyncClient) -> None:
    async def kind(body: object) -> str:
        answer = await client.post("/invocations", json=body)
        return answer.json().get("object") or str(answer.status_code)

    assert await kind({"messages": HI}) == "chat.completion"
    assert await kind({"prompt": "a"}) == "text_completion"
    assert await kind({"input": "a"}) == "list"
    for wrong in ({}, {"model": "tiny"}, [], "messages"):
        assert (await client.post("/invocations", json=wrong)).status_code == 400


async def test_probes_of_others(client: httpx.AsyncClient, frontend: Any) -> None:
    assert (await client.get("/load")).json() == {"server_load": 3}
    assert [(await ask("/ping")).status_code for ask in (client.get, client.post)] == [200, 200]
    frontend.healthy, frontend.unhealthy_reason = False, "gone"
    assert [(await ask("/ping")).status_code for ask in (client.get, client.post)] == [503, 503]


async def test_the_tokenizer_is_shown_where_that_is_wanted(make_client: Any) -> None:
    async with make_client() as client:
        assert (await client.get("/tokenizer_info")).status_code == 404
    async with make_client(shows_tokenizer=True) as client:
        assert (await client.get("/tokenizer_info")).json()["tokenizer_class"] == "ByteTokenizer"


async def test_several_conversations(client: httpx.AsyncClient, frontend: Any) -> None:
    url = f"{CHAT}/batch"
    body = {"messages": [HI, [{"role": "user", "content": "you"}]], "seed": 5, "logprobs": True}
    found = (await client.post(url, json=body)).json()
    assert [(c["index"], c["message"]["content"]) for c in found["choices"]] == [(0, "Hello"), (1, "Hello")]
    prompts = [bytes(one.prompt).decode() for one in frontend.submitted]
    assert prompts == ["user:hi\nassistant:", "user:you\nassistant:"]
    assert found["usage"]["completion_tokens"] == 12
    assert found["usage"]["prompt_tokens"] == sum(map(len, prompts))
    assert {one.params.seed for one in frontend.submitted} == {5}
    for wrong, field in (
        ({"stream": True}, "stream"),
        ({"n": 2}, "n"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"messages": []}, "messages"),
        ({"messages": [HI, []]}, "messages[1]"),
        ({"messages": [HI, [{"content": "x"}]]}, "messages[1][0].role"),
        ({"temperature": -1}, "temperature"),
        ({"max_tokens": 500}, "max_tokens"),
    ):
        answer = await client.post(url, json=body | wrong)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, field), wrong


async def test_what_ends_one_conversation_ends_all(client: httpx.AsyncClient, frontend: Any) -> None:
    def script(generation: Any) -> None:
        if bytes(generation.prompt).startswith(b"user:hi"):
            generation.fail(EngineFailure("broken"))

    frontend.script = script
    body = {"messages": [[{"role": "user", "content": "you"}], HI]}
    assert (await client.post(f"{CHAT}/batch", json=body)).status_code == 500
    assert all(one.cancelled.is_set() for one in frontend.submitted)


# --- responses in the background


async def until(client: httpx.AsyncClient, name: str, *ends: str) -> dict[str, Any]:
    while True:
        found: dict[str, Any] = (await client.get(f"{RESPONSES}/{name}")).json()
        if found["status"] in ends:
            return found
        await asyncio.sleep(0.01)


@pytest.fixture
def silent(frontend: Any) -> Callable[[], Any]:
    """Nothing comes of requests until the test says so; returns the newest."""
    frontend.script = lambda generation: None
    return lambda: frontend.submitted[-1]


async def test_a_response_in_the_background(client: httpx.AsyncClient, silent: Any) -> None:
    queued = (await client.post(RESPONSES, json={"input": "hi", "background": True})).json()
    assert (queued["status"], queued["background"], queued["output"]) == ("queued", True, [])
    await until(client, queued["id"], "in_progress")
    silent().say("Done", finish="stop")
    found = await until(client, queued["id"], "completed", "failed")
    assert (found["status"], found["output"][0]["content"][0]["text"]) == ("completed", "Done")
    after = {"input": "and?", "previous_response_id": queued["id"], "background": True}
    later = (await client.post(RESPONSES, json=after)).json()
    assert b"assistant:Done" in bytes(silent().prompt)
    silent().fail(EngineFailure("broken"))
    failed = await until(client, later["id"], "failed")
    assert failed["error"]["message"].startswith("broken")


async def test_it_is_cancelled_and_stays_so(client: httpx.AsyncClient, silent: Any) -> None:
    name = (await client.post(RESPONSES, json={"input": "hi", "background": True})).json()["id"]
    assert (await client.post(f"{RESPONSES}/{name}/cancel")).json()["status"] == "cancelled"
    silent().say("Too late", finish="stop")
    async with asyncio.timeout(10):
        await silent().cancelled.wait()
    assert (await client.get(f"{RESPONSES}/{name}")).json()["status"] == "cancelled"
    plain = asyncio.create_task(client.post(RESPONSES, json={"input": "hi"}))
    while silent().cancelled.is_set():
        await asyncio.sleep(0.01)
    silent().say("x", finish="stop")
    refused = await client.post(f"{RESPONSES}/{(await plain).json()['id']}/cancel")
    assert (refused.status_code, "Cannot cancel" in refused.json()["error"]["message"]) == (400, True)
    assert (await client.post(f"{RESPONSES}/resp_none/cancel")).status_code == 404


async def test_what_nobody_works_on_any_more_has_failed(
    client: httpx.AsyncClient, silent: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = (await client.post(RESPONSES, json={"input": "hi", "background": True})).json()["id"]
    monkeypatch.setattr(background, "LOST", -1.0)
    assert (await client.get(f"{RESPONSES}/{name}")).json()["error"]["code"] == "server_error"


async def test_what_the_model_read_and_wrote(client: httpx.AsyncClient) -> None:
    found = (await client.post(RESPONSES, json={"input": "hi", "enable_response_messages": True})).json()
    prompt = "user:hi\nassistant:"
    assert found["input_messages"] == [{"type": "raw_message_tokens", "message": prompt, "tokens": [*prompt.encode()]}]
    assert found["output_messages"][0]["tokens"] == [*b"Hello", 256]
    assert "input_messages" not in (await client.post(RESPONSES, json={"input": "hi"})).json()
