"""GET /v1/models"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from penstock.api.http import Route, json_response
from penstock.core.request import MediaKind
from penstock.service.frontend import check_any

if TYPE_CHECKING:
    from penstock.service.frontend import Frontend, Models


def routes(models: Models) -> list[Route]:
    async def list_models(request: Request) -> Response:
        check_any(models.frontends, lambda frontend: frontend.check_known())
        cards = [_card(frontend, name) for frontend in models.frontends for name in frontend.served_names]
        return json_response({"object": "list", "data": cards})

    async def get_model(request: Request) -> Response:
        name = request.path_params["model"]
        frontend = models.of(name)
        frontend.check_known()
        return json_response(_card(frontend, name))

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
        "input_modalities": _modalities(frontend),
    }


def _modalities(frontend: Frontend) -> list[str]:
    """What prompts may have in them."""
    loader = frontend.media
    kinds: tuple[MediaKind, ...] = ("image", "video")
    return ["text", *(kind for kind in kinds if loader is not None and loader.processor.token_of(kind) is not None)]
