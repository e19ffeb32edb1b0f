"""GET /health, /ready, /metrics, /version: for those who operate the server. No key is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import FastAPI
from starlette.responses import Response

from penstock.api.exchange import json_response
from penstock.core.errors import Unavailable
from penstock.obs.metrics import Metrics

if TYPE_CHECKING:
    from penstock.service.frontend import Frontend


def add_routes(app: FastAPI, frontend: Frontend, metrics: Metrics) -> None:
    @app.get("/health")
    async def health() -> Response:
        """Whether this process and its engines make progress, as a whole and one by one."""
        if not frontend.healthy:
            raise Unavailable(f"unhealthy: {frontend.unhealthy_reason}")
        status = "draining" if frontend.draining else "healthy"
        return json_response({"status": status, "instances": frontend.instance_states()})

    @app.get("/ready")
    async def ready() -> Response:
        """Whether a request would be served now."""
        frontend.check_ready()
        return json_response({"status": "ready"})

    @app.get("/metrics")
    async def render_metrics() -> Response:
        data, content_type = metrics.render()
        return Response(data, media_type=content_type)

    @app.get("/version")
    async def version() -> Response:
        return json_response({"version": app.version})
