"""POST /sleep, POST /wake_up, GET /is_sleeping: engines give their memory back for a while, by vLLM's routes. There
only with `--enable-sleep-mode`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from starlette.requests import Request
from starlette.responses import Response

from penstock.api.http import MODEL, Route, json_response
from penstock.core.errors import InvalidRequest
from penstock.core.memory import PARTS, Part

if TYPE_CHECKING:
    from penstock.service.frontend import Frontend, Models

LEVELS: dict[str, Literal[1, 2]] = {"1": 1, "2": 2}
REFUSALS = {409: "an engine cannot do so in the state that it is in"}


def routes(models: Models) -> list[Route]:
    async def sleep(request: Request) -> Response:
        """Takes no new requests, lets the running ones end, and then has all engines give their memory back. `level` 1
        forgets the KV cache and keeps weights in the host's memory, 2 forgets both. `model` says which, of several."""
        level = request.query_params.get("level", "1")
        if level not in LEVELS:
            raise InvalidRequest(f"level: {level!r}, allowed are 1, 2", "level")
        mode = request.query_params.get("mode", "wait")
        if mode != "wait":
            raise InvalidRequest(f"mode: {mode!r}, allowed is wait", "mode")
        await _asked(models, request).engine_client.sleep(LEVELS[level])
        return Response()

    async def wake_up(request: Request) -> Response:
        """Has all engines take up memory again; with `tags`, which may be repeated, only `weights` or `kv_cache`."""
        await _asked(models, request).engine_client.wake_up(_parts(request.query_params.getlist("tags")))
        return Response()

    async def is_sleeping(request: Request) -> Response:
        """Whether all engines sleep, or will when what runs has ended."""
        return json_response({"is_sleeping": _asked(models, request).asleep})

    return [
        Route("POST", "/sleep", sleep, refusals=REFUSALS),
        Route("POST", "/wake_up", wake_up, refusals=REFUSALS),
        Route("GET", "/is_sleeping", is_sleeping),
    ]


def _asked(models: Models, request: Request) -> Frontend:
    """Raises ModelNotFound, or InvalidRequest where there are several models and none is named."""
    return models.of(request.query_params.get(MODEL))


def _parts(tags: list[str]) -> list[Part]:
    """All without any."""
    for tag in tags:
        if tag not in PARTS:
            raise InvalidRequest(f"tags: {tag!r}, allowed are {', '.join(PARTS)}", "tags")
    return [part for part in PARTS if part in tags or not tags]
