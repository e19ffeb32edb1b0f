"""GET /v1/models"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from starlette.responses import Response

from penstock.api.exchange import json_response

if TYPE_CHECKING:
    from penstock.service.frontend import Frontend


def add_routes(app: FastAPI, frontend: Frontend) -> None:
    @app.get("/v1/models")
    async def list_models() -> Response:
        frontend.check_ready()
        cards = [_card(frontend, name) for name in frontend.served_names]
        return json_response({"object": "list", "data": cards})

    @app.get("/v1/models/{model:path}")
    async def get_model(model: str) -> Response:
        frontend.check_ready()
        return json_response(_card(frontend, frontend.served_model(model)))


def _card(frontend: Frontend, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": frontend.created,
        "owned_by": "penstock",
        "root": frontend.served_names[0],
        "parent": None,
        "max_model_len": frontend.max_model_len,
        "modelled": frontend.modelled,
    }
