"""POST /invocations and GET or POST /ping: how Amazon SageMaker, and what is like it, calls the server of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from penstock.api.health import check_healthy
from penstock.api.http import Route, read_data
from penstock.core.errors import InvalidRequest
from penstock.service.frontend import check_any

if TYPE_CHECKING:
    from penstock.service.frontend import Models

PATHS: Mapping[str, str] = {  # what a body has -> where it would have been sent
    "encoding_format": "/v1/embeddings",
    "messages": "/v1/chat/completions",
    "prompt": "/v1/completions",
    "input": "/v1/embeddings",
    "query": "/v1/rerank",
    "text_1": "/v1/score",
}


def routes(models: Models, served: Sequence[Route]) -> list[Route]:
    """
    Args:
        served: the routes of these paths, among others.
    """
    by_path = {route.path: route for route in served}

    async def invocations(request: Request) -> ASGIApp:
        """What another route answers to this body: of chats, completions, embeddings, rerank or score, told apart by
        its fields."""
        data = await read_data(request)
        try:
            given = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise InvalidRequest(f"the body is not valid JSON, or no object: {error}") from None
        for field, path in PATHS.items():
            if field in given:
                return await by_path[path].endpoint(request)
        raise InvalidRequest(f"the body: allowed is one with a field of {', '.join(PATHS)}")

    async def ping(request: Request) -> Response:
        """Whether this process and its engines make progress; where several models are served, those of one do."""
        check_any(models.frontends, check_healthy)
        return Response()

    async def post_ping(request: Request) -> Response:
        """The same."""
        return await ping(request)

    return [
        Route("POST", "/invocations", invocations, refusals={429: "too much is waiting already; see `Retry-After`"}),
        Route("GET", "/ping", ping),
        Route("POST", "/ping", post_ping),
    ]
