"""The HTTP application: what vLLM's clients expect, over a `service.Frontend`."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from fastapi import FastAPI
from starlette.exceptions import HTTPException

from penstock.api import chat, completions, health, models, tokenize
from penstock.api.edge import Edge
from penstock.api.errors import on_http_exception
from penstock.api.reference import describe
from penstock.obs.metrics import Metrics
from penstock.obs.tracing import Tracing

if TYPE_CHECKING:
    from penstock.service.frontend import Frontend

MAX_BODY_BYTES = 8 * 2**20  # a million token ids


def create_app(
    frontend: Frontend,
    metrics: Metrics,
    *,
    api_keys: tuple[str, ...] = (),
    max_body_bytes: int = MAX_BODY_BYTES,
    tracing: Tracing | None = None,
) -> FastAPI:
    """All routes.

    Args:
        frontend: what serves them.
        metrics: counts responses, and is shown under /metrics.
        api_keys: when there are any, requests must bear one of them.
        max_body_bytes: longer bodies get a 413.
        tracing: where traces of requests go.
    """
    app = FastAPI(
        title="penstock",
        version=_version(),
        redirect_slashes=False,
        exception_handlers={HTTPException: on_http_exception},
    )
    app.state.max_body_bytes = max_body_bytes
    app.add_middleware(
        Edge,
        frontend=frontend,
        metrics=metrics,
        api_keys=api_keys,
        max_body_bytes=max_body_bytes,
        tracing=tracing,
    )
    chat.add_routes(app, frontend)
    completions.add_routes(app, frontend)
    tokenize.add_routes(app, frontend)
    models.add_routes(app, frontend)
    health.add_routes(app, frontend, metrics)
    describe(app)
    return app


def _version() -> str:
    try:
        return version("penstock")
    except PackageNotFoundError:  # run from a checkout that is not installed
        return "unknown"
