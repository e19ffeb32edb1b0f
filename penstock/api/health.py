"""GET /health, /ready, /metrics, /version: for operators, without an API key; and /load."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response

from penstock.api.http import MODEL, Route, json_response
from penstock.core.errors import Unavailable
from penstock.obs.exposition import Exposition
from penstock.service.frontend import check_any

if TYPE_CHECKING:
    from penstock.service.frontend import Frontend, Models


def routes(models: Models, exposition: Exposition, version: str) -> list[Route]:
    async def health(request: Request) -> Response:
        """Whether this process and its engines make progress, as a whole and one by one. Where several models are
        served one that does well is enough; `model` asks for one of them."""
        asked = models.asked(request.query_params.get(MODEL))
        check_any(asked, check_healthy)
        instances = [state for frontend in asked for state in frontend.instance_states()]
        told = [{"id": f.served_names[0], "ready": f.ready, "trouble": f.unhealthy_reason} for f in asked]
        status = "draining" if models.draining else "healthy"
        return json_response({"status": status, "models": told, "instances": instances})

    async def ready(request: Request) -> Response:
        """Whether a request would be served now; where several models are served, for one of them, or for `model`."""
        check_any(models.asked(request.query_params.get(MODEL)), lambda frontend: frontend.check_ready())
        return json_response({"status": "ready"})

    async def render_metrics(request: Request) -> Response:
        data, content_type = exposition.render()
        return Response(data, media_type=content_type)

    async def show_version(request: Request) -> Response:
        return json_response({"version": version})

    async def load(request: Request) -> Response:
        """How many requests this process works on, for all models or for `model`."""
        asked = models.asked(request.query_params.get(MODEL))
        return json_response({"server_load": sum(frontend.requests for frontend in asked)})

    return [
        Route("GET", "/health", health),
        Route("GET", "/load", load),
        Route("GET", "/ready", ready),
        Route("GET", "/metrics", render_metrics),
        Route("GET", "/version", show_version),
    ]


def check_healthy(frontend: Frontend) -> None:
    """Raises Unavailable."""
    if not frontend.healthy:
        raise Unavailable(f"unhealthy: {frontend.unhealthy_reason}")
