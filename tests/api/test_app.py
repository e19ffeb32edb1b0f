"""What all routes have in common, and the small ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from penstock.core.errors import EngineFailure
from penstock.obs.exposition import Exposition
from penstock.service.frontend import Models

pytestmark = pytest.mark.anyio
CHAT = {"messages": [{"role": "user", "content": "hi"}]}
REQUESTS = [
    ("/v1/chat/completions", CHAT),
    ("/v1/completions", {"prompt": [97]}),
    ("/tokenize", {"prompt": "a"}),
    ("/detokenize", {"tokens": [97]}),
]


def error_of(response: httpx.Response) -> dict[str, Any]:
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


async def test_models(client: httpx.AsyncClient) -> None:
    body = (await client.get("/v1/models")).json()
    assert body["object"] == "list"
    assert [card["id"] for card in body["data"]] == ["org/tiny", "tiny"]
    assert body["data"][0]["max_model_len"] == 128
    assert body["data"][0]["modelled"] is None
    assert (await client.get("/v1/models/org/tiny")).json() == body["data"][0]
    missing = await client.get("/v1/models/big")
    assert missing.status_code == 404
    assert error_of(missing)["code"] == "model_not_found"


@pytest.mark.parametrize(("path", "body"), REQUESTS)
async def test_an_unknown_model_is_answered_with_the_served_ones(
    client: httpx.AsyncClient, path: str, body: dict[str, Any]
) -> None:
    assert (await client.post(path, json=body)).status_code == 200
    response = await client.post(path, json=body | {"model": "gpt"})
    assert response.status_code == 404
    error = error_of(response)
    assert error["param"] == "model"
    assert "org/tiny, tiny" in error["message"]


async def test_tokenize_and_back(client: httpx.AsyncClient) -> None:
    body = (await client.post("/tokenize", json={"prompt": "hé", "return_token_strs": True})).json()
    assert body == {
        "count": 3,
        "max_model_len": 128,
        "tokens": [104, 195, 169],
        "token_strs": ["<0x68>", "<0xc3>", "<0xa9>"],  # the vocabulary's own spelling, as vLLM has it
    }
    assert (await client.post("/detokenize", json={"tokens": body["tokens"]})).json() == {"prompt": "hé"}
    assert (await client.post("/detokenize", json={"tokens": []})).json() == {"prompt": ""}
    bad = await client.post("/detokenize", json={"tokens": [257]})
    assert (bad.status_code, error_of(bad)["param"]) == (400, "tokens")


async def test_tokenize_messages(client: httpx.AsyncClient) -> None:
    body = (await client.post("/tokenize", json=CHAT)).json()
    assert bytes(body["tokens"]) == b"user:hi\nassistant:"
    assert body["token_strs"] is None


@pytest.mark.parametrize(("path", "flag"), [("/health", "healthy"), ("/ready", "ready")])
async def test_health_is_honest(client: httpx.AsyncClient, frontend: Any, path: str, flag: str) -> None:
    assert (await client.get(path)).status_code == 200
    setattr(frontend, flag, False)
    frontend.unhealthy_reason = "the engine is stuck"
    response = await client.get(path)
    assert response.status_code == 503
    assert response.headers["retry-after"] == "1"
    assert "the engine is stuck" in error_of(response)["message"]


@pytest.mark.parametrize(("path", "body"), REQUESTS)
async def test_before_it_is_ready_nobody_is_told_that_their_request_is_wrong(
    client: httpx.AsyncClient, frontend: Any, path: str, body: dict[str, Any]
) -> None:
    frontend.ready = False
    frontend.vocab_size = 0
    response = await client.post(path, json=body)
    assert response.status_code == 503
    assert "starting" in error_of(response)["message"]
    assert (await client.get("/v1/models")).status_code == 503  # its lengths are not known yet


async def test_health_lists_the_instances(client: httpx.AsyncClient, frontend: Any) -> None:
    body = (await client.get("/health")).json()
    told = {"id": "org/tiny", "ready": True, "trouble": ""}
    assert body == {"status": "healthy", "models": [told], "instances": frontend.instance_states()}


async def test_what_operators_see_needs_a_key_and_tells_of_no_tenant(make_client: Callable[..., Any]) -> None:
    async with make_client(api_keys=("one",)) as client:
        assert (await client.get("/overview")).status_code == 401
        client.headers["authorization"] = "Bearer one"
        assert (await client.get("/overview")).json()["master"]["decisions"][0]["request_id"] == "r-0badc0de"
        told = await client.get("/explain/r")
        assert told.json() == {"request": "r", "policy": None, "sequences": [{"id": "r-0badc0de"}]}
        missing = await client.get("/explain/a%2Fb")
        assert (missing.status_code, error_of(missing)["code"]) == (404, "not_found")
        assert error_of(missing)["message"] == "'a/b' is not among the 7 decisions that are remembered"
    for shared, status, shown in ((False, 403, None), (True, 200, "r-0badc0de")):
        async with make_client(api_keys=("one", "two"), share_prefixes=shared) as client:
            client.headers["authorization"] = "Bearer two"
            master = (await client.get("/overview")).json()["master"]
            assert master["decisions"][0]["request_id"] == master["relocations"][0]["request_id"] == shown
            assert (await client.get("/explain/r")).status_code == status


async def test_version_and_openapi(client: httpx.AsyncClient) -> None:
    assert (await client.get("/version")).json().keys() == {"version"}
    paths = (await client.get("/openapi.json")).json()["paths"]
    schema = paths["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert {"prompt", "temperature", "echo"} <= schema["properties"].keys()


async def test_unknown_routes_and_methods(client: httpx.AsyncClient) -> None:
    missing = await client.post("/v1/nothing")
    assert (missing.status_code, error_of(missing)["code"]) == (404, "not_found")
    assert "/v1/nothing" in error_of(missing)["message"]
    wrong = await client.get("/v1/completions")
    assert (wrong.status_code, error_of(wrong)["code"]) == (405, "method_not_allowed")
    assert wrong.headers["allow"] == "POST"


async def test_head_and_slashes_at_the_end(client: httpx.AsyncClient) -> None:
    for path in ("/health", "/ready", "/v1/models"):
        get, head, slash = await client.get(path), await client.head(path), await client.get(path + "/")
        assert (get.status_code, slash.status_code, head.status_code) == (200, 200, 200)
        assert head.headers["content-type"] == get.headers["content-type"]
    assert (await client.post("/v1/completions/", json={"prompt": "a"})).status_code == 200
    assert (await client.get("/v1/models//")).status_code == 404
    assert (await client.post("/health")).headers["allow"] == "GET, HEAD"


@pytest.mark.parametrize(
    ("content", "kind", "word"),
    [
        (b"{", "application/json", "JSON"),
        (b'{"messages": "\xff"}', "application/json; charset=utf-8", "JSON"),
        (b"{}", "application/x-www-form-urlencoded", "content-type"),
        (b"{}", "", "content-type"),
    ],
)
async def test_bodies_that_are_no_json(client: httpx.AsyncClient, content: bytes, kind: str, word: str) -> None:
    response = await client.post("/v1/completions", content=content, headers={"content-type": kind} if kind else {})
    assert response.status_code == 400
    assert word in error_of(response)["message"]


@pytest.mark.parametrize("announced", [True, False])
async def test_bodies_that_are_too_long(make_client: Callable[..., httpx.AsyncClient], announced: bool) -> None:
    data = b'{"prompt": "%s"%s}' % (b"a" * 100, b" " * 900)

    async def pieces() -> Any:
        yield data[:600]
        yield data[600:]

    headers = {"content-type": "application/json"}
    async with make_client(max_body_bytes=len(data)) as client:
        assert (await client.post("/v1/completions", content=data, headers=headers)).status_code == 200
    async with make_client(max_body_bytes=len(data) - 1) as client:
        response = await client.post("/v1/completions", content=data if announced else pieces(), headers=headers)
        assert (response.status_code, error_of(response)["code"]) == (413, "request_too_large")


async def test_ignored_fields_are_named_in_a_header(client: httpx.AsyncClient) -> None:
    body = CHAT | {"zebra": 1, "a\r\nset-cookie: b": 2, "x" * 100: 3}
    response = await client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200
    expected = ["zebra", "a%0D%0Aset-cookie%3A%20b", "x" * 64]
    assert response.headers["x-penstock-ignored-fields"].split(", ") == expected
    assert "x-penstock-ignored-fields" not in (await client.post("/v1/chat/completions", json=CHAT)).headers


async def test_request_id_and_traceparent_come_back(client: httpx.AsyncClient) -> None:
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    given = {"x-request-id": "my id", "traceparent": trace}
    for path in ("/version", "/nowhere"):
        response = await client.get(path, headers=given)
        assert response.headers["x-request-id"] == "my id"
        assert response.headers["traceparent"] == trace
    first, second = [(await client.get("/version")).headers for _ in range(2)]
    assert first["x-request-id"] != second["x-request-id"]
    assert "traceparent" not in first


@pytest.mark.parametrize("bad", [b"", b"a" * 129, "ä".encode(), b"a\tb"])
async def test_a_request_id_that_cannot_be_one(client: httpx.AsyncClient, bad: bytes) -> None:
    response = await client.get("/version", headers={b"x-request-id": bad})
    assert (response.status_code, error_of(response)["param"]) == (400, "x-request-id")
    assert response.headers["x-request-id"].encode("latin-1") != bad


@pytest.mark.parametrize("header", [None, "Bearer wrong", "Basic key-1", "key-1", "Bearer", "Bearer k\xe9y"])
async def test_without_a_good_key_only_the_operators_routes_are_open(
    make_client: Callable[..., httpx.AsyncClient], header: str | None
) -> None:
    headers = {} if header is None else {b"authorization": header.encode("latin-1")}
    async with make_client(api_keys=("key-1", "key-2")) as client:
        for path in ("/", "/docs", "/page/main.js", "/health", "/ready", "/metrics", "/version"):
            assert (await client.get(path, headers=headers)).status_code == 200
        for path in ("/v1/models", "/v1/nothing", "/overview", "/openapi.json"):
            response = await client.get(path, headers=headers)
            assert (response.status_code, error_of(response)["code"]) == (401, "invalid_api_key")
        response = await client.post("/v1/chat/completions", json=CHAT, headers=headers)
        assert response.status_code == 401


@pytest.mark.parametrize("key", ["key-1", "ключ"])
async def test_every_key_opens(make_client: Callable[..., httpx.AsyncClient], key: str) -> None:
    async with make_client(api_keys=("key-1", "ключ")) as client:
        response = await client.get("/v1/models", headers={b"authorization": f"Bearer {key}".encode()})
        assert response.status_code == 200


@pytest.mark.parametrize("shared", [False, True])
async def test_keys_share_neither_prefixes_nor_conversations(
    make_client: Callable[..., httpx.AsyncClient], frontend: Any, shared: bool
) -> None:
    roots, conversations, keys, salts = set(), set(), ("one", "two", "ключ"), (None, "a", "b")
    async with make_client(api_keys=(*keys, "one"), share_prefixes=shared) as client:
        for key in keys:
            for salt in salts:
                body = {"prompt": "a", "prompt_cache_key": "c"} | ({} if salt is None else {"cache_salt": salt})
                headers = {b"authorization": f"Bearer {key}".encode()}
                for _ in range(2):
                    assert (await client.post("/v1/completions", json=body, headers=headers)).status_code == 200
            roots |= set(frontend.salts)
            conversations |= {made.level.chat for made in frontend.submitted}
    assert len(roots) == (len(salts) if shared else len(keys) * len(salts))
    assert len(conversations) == (1 if shared else len(keys))
    assert not any(key in text for text in roots | conversations for key in keys)
    async with make_client(api_keys=("one",)) as client:
        frontend.salts.clear()
        await client.post("/v1/completions", json={"prompt": "a"}, headers={"authorization": "Bearer one"})
        assert frontend.salts == [""]


async def test_keys_change_while_it_serves(make_app: Callable[..., Any], frontend: Any) -> None:
    """One key in a file that may get more: who has it is a tenant from the start."""
    app = make_app(api_keys=("one",), keys_change=True)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:

        async def status(key: str) -> int:
            headers = {"authorization": f"Bearer {key}"}
            return (await client.post("/v1/completions", json={"prompt": "a"}, headers=headers)).status_code

        assert [await status(key) for key in ("one", "two")] == [200, 401]
        app.set_api_keys(("one", "two"))
        assert [await status(key) for key in ("one", "two")] == [200, 200]
        app.set_api_keys(("two",))
        assert [await status(key) for key in ("one", "two")] == [401, 200]
        one, also_one, two, _ = *frontend.salts[:3], None
        assert one == also_one != two
        assert (await client.get("/explain/r", headers={"authorization": "Bearer two"})).status_code == 403


@pytest.mark.parametrize("prefix", ["", "/llm"], ids=["stripped by the proxy", "as clients sent it"])
async def test_behind_a_proxy_that_has_other_things_too(
    make_client: Callable[..., httpx.AsyncClient], prefix: str
) -> None:
    async with make_client(root_path="/llm", api_keys=("one",)) as client:
        assert (await client.get(f"{prefix}/health")).status_code == 200
        assert (await client.get(f"{prefix}/v1/models")).status_code == 401
        client.headers["authorization"] = "Bearer one"
        assert (await client.get(f"{prefix}/v1/models/org/tiny")).json()["id"] == "org/tiny"
        assert (await client.get("/llmv1/models")).status_code == 404
        document = (await client.get(f"{prefix}/openapi.json")).json()
        assert document["servers"] == [{"url": "/llm"}]


async def test_while_it_drains_it_refuses_what_is_new(client: httpx.AsyncClient, frontend: Any, models: Models) -> None:
    assert "connection" not in (await client.get("/health")).headers
    models.draining = True
    for refused in (
        await client.get("/ready"),
        await client.get("/v1/models"),
        await client.post("/v1/completions", json={"prompt": "a"}),
        await client.post("/v1/completions", content="no JSON"),
    ):
        assert (refused.status_code, error_of(refused)["code"]) == (503, "unavailable")
        assert "shutting down" in error_of(refused)["message"]
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.headers["connection"] == "close"
    assert not frontend.submitted
    health = await client.get("/health")
    assert (health.status_code, health.json()["status"], health.headers["connection"]) == (200, "draining", "close")
    assert (await client.get("/metrics")).status_code == 200


async def test_the_name_that_the_client_used_is_passed_on(client: httpx.AsyncClient, frontend: Any) -> None:
    await client.post("/v1/chat/completions", json=CHAT)
    await client.post("/v1/chat/completions", json=CHAT | {"model": "tiny"})
    await client.post("/v1/completions", json={"prompt": ["a", "b"], "model": "tiny"})
    assert frontend.models == ["org/tiny", "tiny", "tiny"]


async def test_an_engine_that_failed_leaves_no_traceback(
    client: httpx.AsyncClient, frontend: Any, caplog: pytest.LogCaptureFixture
) -> None:
    frontend.script = lambda generation: generation.fail(EngineFailure("engine-1 failed during this request"))
    response = await client.post("/v1/completions", json={"prompt": "a"}, headers={"x-request-id": "r9"})
    assert response.status_code == 500
    assert error_of(response)["message"] == "engine-1 failed during this request (request r9)"
    assert not [record for record in caplog.records if record.name.startswith("penstock")]
    caplog.set_level("DEBUG", "penstock.api")
    await client.post("/v1/completions", json={"prompt": "a"})
    assert "EngineFailure: engine-1" in caplog.text


async def test_our_own_fault_is_logged_with_the_id_and_shows_nothing(
    client: httpx.AsyncClient, frontend: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> None:
        raise KeyError("secret")

    frontend.on_encode = broken
    response = await client.post("/v1/completions", json={"prompt": "a"}, headers={"x-request-id": "r9"})
    assert response.status_code == 500
    assert "r9" in error_of(response)["message"]
    assert "secret" not in response.text
    assert "KeyError: 'secret'" in caplog.text
    assert "r9" in caplog.text


async def test_http_is_counted_by_route_and_status(client: httpx.AsyncClient, exposition: Exposition) -> None:
    await client.get("/v1/models/org/tiny")
    await client.get("/v1/models/big")
    await client.get("/anything/else")
    await client.get("/v1/completions")
    response = await client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=")
    lines = [line for line in response.text.splitlines() if line.startswith("penstock:http_requests_total")]
    assert sorted(line.removeprefix("penstock:http_requests_total") for line in lines) == [
        '{route="/v1/completions",status="405"} 1.0',
        '{route="/v1/models/{model:path}",status="200"} 1.0',
        '{route="/v1/models/{model:path}",status="404"} 1.0',
        '{route="unknown",status="404"} 1.0',
    ]
    assert exposition.render()[0].decode().count('route="/metrics"') >= 1
