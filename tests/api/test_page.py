"""The page's files, and the overview that it watches."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.api import overview
from penstock.core.errors import Unavailable
from penstock.service.frontend import Models

pytestmark = pytest.mark.anyio
PAGES = 50
WEB = Path(overview.__file__).parent / "web"


async def test_the_page_needs_no_key_and_names_nobody_else(make_client: Callable[..., Any]) -> None:
    async with make_client(api_keys=("one",)) as client:
        page = await client.get("/")
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        assert "default-src 'none'" in page.headers["content-security-policy"]
        named = re.findall(r'(?:src|href)="([^"#]+)"', page.text)
        assert {"page/main.js", "page/style.css"} <= set(named)
        for path in named:
            assert (await client.get(f"/{path}")).status_code == 200
        for file in WEB.iterdir():
            shown = await client.get(f"/page/{file.name}")
            assert shown.content == file.read_bytes()
            again = await client.get(f"/page/{file.name}", headers={"if-none-match": shown.headers["etag"]})
            assert (again.status_code, again.content) == (304, b"")
            if file.suffix == ".js":
                assert shown.headers["content-type"].startswith("text/javascript")
                for imported in re.findall(r'from "(.+?)"', shown.text):
                    assert (file.parent / imported).exists()
            other = r"(?:src|href|url\(|import|fetch)\W{1,3}(?:https?:)?//"
            assert not re.search(other, shown.text)
        for missing in ("/page/no.js", "/page/..%2F__init__.py", "/page/a/b"):
            assert (await client.get(missing)).status_code == 404
        assert (await client.get("/overview/stream")).status_code == 401


def events(text: str) -> list[tuple[str, Any]]:
    found = re.findall(r"(?:event: (.+)\n)?data: (.+)\n\n", text)
    return [(event, json.loads(data)) for event, data in found]


async def test_many_who_watch_cost_one_look_a_second(
    url: str, frontend: Any, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks, trouble, answer = 0, 0, frontend.overview

    async def look() -> dict[str, Any]:
        nonlocal looks
        looks += 1
        if looks == trouble:
            raise Unavailable("the master does not answer")
        return {**await answer(), "number": looks}

    frontend.overview = look
    monkeypatch.setattr(overview, "INTERVAL", 0.2)
    async with AsyncExitStack() as stack:
        limits = httpx.Limits(max_connections=None)
        client = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=30, limits=limits))
        pages = [await stack.enter_async_context(client.stream("GET", "/overview/stream")) for _ in range(PAGES)]
        assert all(page.headers["content-type"].startswith("text/event-stream") for page in pages)
        texts = [page.aiter_text() for page in pages]
        opened, trouble = looks, looks + 2

        async def watch(text: AsyncIterator[str]) -> list[tuple[str, Any]]:
            said = ""
            async for part in text:
                said += part
                found = events(said)
                if found and found[-1][1].get("number", 0) > trouble:
                    return found
            raise AssertionError(said)

        for found in await asyncio.gather(*(watch(text) for text in texts)):
            assert ("trouble", {"message": "the master does not answer"}) in found
        assert looks - opened < PAGES  # three, but for what a slow machine makes of it; each alone would be 150
        models.draining = True  # a stream that never ended would keep the server from ending
        for text in texts:
            async for _ in text:
                pass
