"""GET /overview, /explain/{request}: for operators, of all requests, so with an API key."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from penstock.api.http import Route, json_response

if TYPE_CHECKING:
    from penstock.service.frontend import Frontend

APART = "requests of several API keys are kept apart, and this is about all: read the file of the flight recorder"
REFUSALS = {403: "requests of several API keys are kept apart", 404: "the master does not remember such a request"}


def routes(frontend: Frontend, *, tenants_apart: bool) -> list[Route]:
    """
    Args:
        tenants_apart: no one is told of single requests, as they may be another's.
    """

    async def overview(request: Request) -> Response:
        """What `penstock top` shows: instances, queues and the latest decisions as the master sees them, attainment and
        throughput of this frontend."""
        content = await frontend.overview()
        if tenants_apart:
            for told in (*content["master"]["decisions"], *content["master"]["relocations"]):
                told["request_id"] = None
        return json_response(content)

    async def explain(request: Request) -> Response:
        """Why a request ran where it did, as far as the master remembers: what `penstock explain` shows."""
        if tenants_apart:
            raise HTTPException(403, APART)
        wanted = request.path_params["request"]
        found = await frontend.history(wanted)
        if not found.sequences:
            raise HTTPException(404, f"{wanted!r} is not among the {found.decisions} decisions that are remembered")
        return json_response({"request": wanted, "policy": None, "sequences": msgspec.Raw(found.sequences)})

    return [
        Route("GET", "/overview", overview),
        Route("GET", "/explain/{request:path}", explain, refusals=REFUSALS),
    ]
