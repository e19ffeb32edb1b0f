"""GET /overview, /overview/stream, /explain/{request}: for operators, of all requests, so with an API key."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Send

from penstock.api.http import MODEL, Route, UntilDisconnect, json_response
from penstock.api.sse import EVENT_STREAM
from penstock.core.errors import PenstockError, Unavailable
from penstock.core.wire.master import History

if TYPE_CHECKING:
    from penstock.service.frontend import Frontend, Models

APART = "requests of several API keys are kept apart, and this is about all: read the file of the flight recorder"
INTERVAL = 1.0  # seconds between two looks
REFUSALS = {403: "requests of several API keys are kept apart", 404: "the master does not remember such a request"}


def routes(models: Models, *, tenants_apart: bool) -> list[Route]:
    """
    Args:
        tenants_apart: no one is told of single requests, as they may be another's.
    """

    async def overview(request: Request) -> Response:
        """What `penstock top` shows: instances, queues and the latest decisions as the master sees them, attainment and
        throughput of this frontend. `model` says of which model, where there are several."""
        return json_response(await _look(models.of(request.query_params.get(MODEL)), tenants_apart))

    async def explain(request: Request) -> Response:
        """Why a request ran where it did, as far as its model's master remembers: what `penstock explain` shows."""
        if tenants_apart:
            raise HTTPException(403, APART)
        wanted = request.path_params["request"]
        found = await _remembered(models.asked(request.query_params.get(MODEL)), wanted)
        return json_response({"request": wanted, "policy": None, "sequences": msgspec.Raw(found.sequences)})

    return [
        Route("GET", "/overview", overview),
        Route("GET", "/explain/{request:path}", explain, refusals=REFUSALS),
    ]


def stream_route(models: Models, *, tenants_apart: bool) -> Route:
    """/overview/stream, which has no end."""
    looks = {id(frontend): _Looks(partial(_look, frontend, tenants_apart)) for frontend in models.frontends}

    async def overview_stream(request: Request) -> ASGIApp:
        """The overview again and again, as server-sent events: once a second, however many watch. An event `trouble`
        says why there is nothing to be seen now. `model` says of which model, where there are several."""
        watched = looks[id(models.of(request.query_params.get(MODEL)))]

        async def show(send: Send) -> None:
            event = await watched.now()
            await send({"type": "http.response.start", "status": 200, "headers": EVENT_STREAM})
            while not models.draining:
                await send({"type": "http.response.body", "body": event, "more_body": True})
                event = await watched.next()
            await send({"type": "http.response.body", "body": b""})

        return UntilDisconnect(show)

    return Route("GET", "/overview/stream", overview_stream)


async def _remembered(frontends: Sequence[Frontend], wanted: str) -> History:
    """What the first knows that knows the request. Raises HTTPException, 404, and Unavailable where one that may know
    it does not answer."""
    decisions, trouble = 0, None
    for frontend in frontends:
        try:
            found = await frontend.history(wanted)
        except Unavailable as error:
            trouble = error
            continue
        if found.sequences:
            return found
        decisions += found.decisions
    if trouble is not None:
        raise trouble
    raise HTTPException(404, f"{wanted!r} is not among the {decisions} decisions that are remembered")


async def _look(frontend: Frontend, tenants_apart: bool) -> dict[str, Any]:
    content = await frontend.overview()
    if tenants_apart:
        for told in (*content["master"]["decisions"], *content["master"]["relocations"]):
            told["request_id"] = None
    return content


class _Looks:
    """One look after another, as events; all that wait for the next one get the same."""

    def __init__(self, look: Callable[[], Awaitable[dict[str, Any]]]) -> None:
        self._look = look
        self._coming: asyncio.Task[bytes] | None = None

    async def now(self) -> bytes:
        try:
            return b"data: " + msgspec.json.encode(await self._look()) + b"\n\n"
        except PenstockError as error:
            return b"event: trouble\ndata: " + msgspec.json.encode({"message": str(error)}) + b"\n\n"

    async def next(self) -> bytes:
        if self._coming is None:
            self._coming = asyncio.create_task(self._later())
        return await asyncio.shield(self._coming)

    async def _later(self) -> bytes:
        await asyncio.sleep(INTERVAL)
        self._coming = None
        return await self.now()
