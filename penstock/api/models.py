"""GET /v1/models"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from penstock.api.http import Route, json_response

if TYPE_CHECKING:
    from penstock.service.frontend import Frontend


def routes(frontend: Frontend) -> list[Route]:
    async def list_models(request: Request) -> Response:
        frontend.check_known()
        cards = [_card(frontend, name) for name in frontend.served_names]
        return json_response({"object": "list", "data": cards})

    async def get_model(request: Request) -> Response:
        frontend.check_known()
        return json_response(_card(frontend, frontend.served_model(request.path_params["model"])))

    return [Route("GET", "/v1/models", list_models), Route("GET", "/v1/models/{model:path}", get_model)]


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
        "fingerprint": frontend.fingerprint,
    }
