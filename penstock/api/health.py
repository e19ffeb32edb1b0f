"""GET /health, /ready, /metrics, /version: for operators, without an API key; and /load."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response

from penstock.api.http import Route, json_response
from penstock.core.errors import Unavailable
from penstock.obs.metrics import Metrics

if TYPE_CHECKING:
    from penstock.service.frontend import Frontend


def routes(frontend: Frontend, metrics: Metrics, version: str) -> list[Route]:
    async def health(request: Request) -> Response:
        """Whether this process and its engines make progress, as a whole and one by one."""
        if not frontend.healthy:
            raise Unavailable(f"unhealthy: {frontend.unhealthy_reason}")
        status = "draining" if frontend.draining else "healthy"
        return json_response({"status": status, "instances": frontend.instance_states()})

    async def ready(request: Request) -> Response:
        """Whether a request would be served now."""
        frontend.check_ready()
        return json_response({"status": "ready"})

    async def render_metrics(request: Request) -> Response:
        data, content_type = metrics.render()
        return Response(data, media_type=content_type)

    async def show_version(request: Request) -> Response:
        return json_response({"version": version})

    async def load(request: Request) -> Response:
        """How many requests this process works on."""
        return json_response({"server_load": frontend.requests})

    return [
        Route("GET", "/health", health),
        Route("GET", "/load", load),
        Route("GET", "/ready", ready),
        Route("GET", "/metrics", render_metrics),
        Route("GET", "/version", show_version),
    ]
