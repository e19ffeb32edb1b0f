"""Several models behind the same routes: which of them is asked, and what is said of all."""

from __future__ import annotations

import importlib
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from penstock.api.app import create_app
from penstock.core.errors import Unavailable
from penstock.core.wire.master import History
from penstock.obs.exposition import Exposition
from penstock.obs.metrics import Metrics
from penstock.service.frontend import Models

SCRIPTED = importlib.import_module("tests.api.conftest").ScriptedFrontend
pytestmark = pytest.mark.anyio


def scripted(*names: str, engine: str) -> Any:
    frontend = SCRIPTED()
    frontend.served_names = list(names)
    frontend.instance_states = lambda: [{"name": engine, "role": "any", "state": "ready", "trouble": ""}]
    return frontend


@pytest.fixture
def small() -> Any:
    return scripted("small", engine="small/engine-0")


@pytest.fixture
def large() -> Any:
    return scripted("large", "alias", engine="large/engine-0")


@pytest.fixture
async def both(small: Any, large: Any) -> AsyncIterator[httpx.AsyncClient]:
    metrics = [Metrics("small", ["small/engine-0"]), Metrics("large", ["large/engine-0"])]
    app = create_app(Models([small, large]), Exposition(metrics), sleep_mode=True, shows_tokenizer=True)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        yield client


async def test_a_body_names_the_model(both: httpx.AsyncClient, small: Any, large: Any) -> None:
    for model in ("small", "alias", "large"):
        answer = await both.post("/v1/completions", json={"prompt": "a", "model": model})
        assert (answer.status_code, answer.json()["model"]) == (200, model)
    assert (small.models, large.models) == (["small"], ["alias", "large"])


async def test_every_body_names_it(both: httpx.AsyncClient, small: Any, large: Any) -> None:
    talk = [{"role": "user", "content": "a"}]
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/v1/chat/completions", {"messages": talk}),
        ("/v1/chat/completions/batch", {"messages": [talk, talk]}),
        ("/v1/responses", {"input": "a"}),
        ("/v1/responses", {"input": "a", "background": True}),
        ("/invocations", {"messages": talk}),
        ("/invocations", {"prompt": "a"}),
    ]
    for path, body in bodies:
        small.models.clear()
        large.models.clear()
        answer = await both.post(path, json={**body, "model": "alias"})
        assert (answer.status_code, answer.json()["model"]) == (200, "alias"), answer.text
        assert (small.models, {*large.models}) == ([], {"alias"})
        refused = await both.post(path, json=body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "model")


async def test_load_is_that_of_all_or_of_one(both: httpx.AsyncClient, small: Any, large: Any) -> None:
    small.requests, large.requests = 2, 3
    for path, load in (("/load", 5), ("/load?model=small", 2), ("/load?model=alias", 3)):
        assert (await both.get(path)).json() == {"server_load": load}


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/tokenizer_info"),
        ("GET", "/overview"),
        ("GET", "/overview/stream"),
        ("GET", "/is_sleeping"),
        ("POST", "/sleep"),
        ("POST", "/wake_up"),
    ],
)
async def test_what_is_about_one_model_says_which(both: httpx.AsyncClient, method: str, path: str) -> None:
    refused = await both.request(method, path)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "model")
    assert refused.json()["error"]["message"] == "model: missing, allowed are small, large, alias"
    assert (await both.request(method, f"{path}?model=x")).json()["error"]["code"] == "model_not_found"


async def test_one_that_is_down_takes_nothing_from_the_others(both: httpx.AsyncClient, small: Any, large: Any) -> None:
    small.ready = small.healthy = False
    small.unhealthy_reason = "the engine is stuck"
    health = await both.get("/health")
    assert (health.status_code, health.json()["models"]) == (
        200,
        [
            {"id": "small", "ready": False, "trouble": "the engine is stuck"},
            {"id": "large", "ready": True, "trouble": ""},
        ],
    )
    assert [told["name"] for told in health.json()["instances"]] == ["small/engine-0", "large/engine-0"]
    assert [card["id"] for card in (await both.get("/v1/models")).json()["data"]] == ["small", "large", "alias"]
    for path in ("/health", "/ready"):
        asked = [
            (await both.get(path, params=params)).status_code for params in ({}, {"model": "small"}, {"model": "alias"})
        ]
        assert asked == [200, 503, 200]
    assert (await both.get("/ping")).status_code == 200
    large.ready = large.healthy = False
    large.unhealthy_reason = "so is this"
    told = (await both.get("/health")).json()["error"]["message"]
    assert told == "small: unhealthy: the engine is stuck; large: unhealthy: so is this"
    assert (await both.get("/v1/models")).status_code == 503
    assert (await both.get("/ping")).status_code == 503


async def test_whoever_remembers_a_request_explains_it(both: httpx.AsyncClient, small: Any, large: Any) -> None:
    async def silent(request: str) -> History:
        raise Unavailable("the master does not answer")

    async def other(request: str) -> History:
        return History(1, 3, b'[{"id":"here"}]' if request == "mine" else b"")

    large.history = other
    assert (await both.get("/explain/mine")).json()["sequences"] == [{"id": "here"}]
    missing = await both.get("/explain/nobodys")
    assert (missing.status_code, "not among the 10 decisions" in missing.text) == (404, True)
    assert (await both.get("/explain/mine?model=small")).status_code == 404
    small.history = silent
    assert (await both.get("/explain/mine")).status_code == 200
    assert (await both.get("/explain/nobodys")).status_code == 503, "it may be there"


async def test_metrics_of_all_are_one_page(both: httpx.AsyncClient) -> None:
    page = (await both.get("/metrics")).text
    types = [line for line in page.splitlines() if line.startswith("# TYPE")]
    assert len(types) == len(set(types))
    for model in ("small", "large"):
        assert f'penstock:instance_up{{engine="{model}/engine-0",model_name="{model}"}} 0.0' in page


async def test_the_document_allows_what_the_widest_model_does(both: httpx.AsyncClient, small: Any, large: Any) -> None:
    small.vocab_size, large.vocab_size = 100, 1000
    document = (await both.get("/openapi.json")).json()
    body = document["paths"]["/detokenize"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert body["properties"]["tokens"]["items"]["maximum"] == 999
