"""One HTTP exchange: its body in, and its work stopped when the client leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any
from urllib.parse import quote

import msgspec
from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from penstock.api.schema import Body, BodyType, parse
from penstock.core.errors import InvalidRequest

Endpoint = Callable[[Request], Coroutine[Any, Any, Response]]

MAX_LISTED_FIELDS = 32
MAX_LISTED_CHARS = 64  # of one field's name


async def read_body(request: Request, model: type[BodyType]) -> BodyType:
    """The request's body. Fields that are ignored will be listed in a response header.

    Raises:
        InvalidRequest, UnsupportedField: not JSON, or not such a body.
        HTTPException: 413, longer than the application allows.
        ClientDisconnect: the client left.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise InvalidRequest(f"content-type: {kind!r}, allowed is application/json", "content-type")
    limit: int = request.app.state.max_body_bytes
    length = request.headers.get("content-length", "")
    too_long = length.isdigit() and int(length) > limit
    data = bytearray()
    if not too_long:
        async for chunk in request.stream():
            data += chunk
            if len(data) > limit:
                too_long = True
                break
    if too_long:
        raise HTTPException(413, f"the body is too long, at most {limit} bytes are allowed")
    body, ignored = parse(bytes(data), model)
    if ignored:
        names = (quote(name[:MAX_LISTED_CHARS], safe="") for name in ignored[:MAX_LISTED_FIELDS])
        request.state.headers.append((b"x-penstock-ignored-fields", ", ".join(names).encode()))
    return body


class _Route(APIRoute):
    """Hands the request to the endpoint as it is: FastAPI's own reading of parameters takes longer than all of ours,
    and each of its layers would see every event of a stream."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.methods and scope["method"] not in self.methods:
            await super().handle(scope, receive, send)
            return
        response = await self.endpoint(Request(scope, receive))
        await response(scope, receive, send)


def add_post(app: FastAPI, path: str, body: type[Body], endpoint: Endpoint) -> None:
    """A route that reads such a body by itself; see `read_body`."""
    schema = {"required": True, "content": {"application/json": {"schema": body.model_json_schema()}}}
    app.router.add_api_route(
        path, endpoint, methods=["POST"], openapi_extra={"requestBody": schema}, route_class_override=_Route
    )


def json_response(payload: object) -> Response:
    return Response(msgspec.json.encode(payload), media_type="application/json")


class UntilDisconnect(Response):
    """Does the work that sends the response, and cancels it as soon as the client leaves, in whatever phase it is.

    Args:
        work: sends the response; errors that it raises before it has sent anything are answered as usual.
    """

    def __init__(self, work: Callable[[Send], Coroutine[Any, Any, None]]) -> None:
        super().__init__()
        self._work = work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = asyncio.current_task()
        assert work is not None
        working, left = True, False

        def leave(gone: asyncio.Task[None]) -> None:
            nonlocal left
            if working and not gone.cancelled():
                left = True
                work.cancel()

        gone = asyncio.create_task(_disconnected(receive))
        gone.add_done_callback(leave)
        try:
            await self._work(send)
        except asyncio.CancelledError:
            if not left or work.uncancel():  # somebody else wants an end, too
                raise
        finally:
            working = False
            gone.cancel()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
