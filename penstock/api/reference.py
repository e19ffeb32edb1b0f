"""The server's OpenAPI document: every status that occurs, and its schema."""

from __future__ import annotations

import json
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

JSON = "application/json"
ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"], "description": "the field that is wrong"},
                "code": {"type": "string"},
            },
        }
    },
}
EVERYWHERE = {  # status -> when
    400: "something in the request is wrong; `param` names the field",
    401: "the API key is missing or wrong",
    408: "the request took too long to arrive",
    431: "the headers are too many or too long",
    500: "a fault of the server, under the request's id in its log",
    503: "it is not ready, or about to end; see `Retry-After`",
}
OF_MODELS = {404: "no such model is served here"}
OF_BODIES = {413: "the body, or the prompt in it, is too long"}
OF_WORK = {429: "too much is waiting already; see `Retry-After`"}
GENERATES = {"/v1/chat/completions", "/v1/completions"}


def describe(app: FastAPI) -> None:
    """Add to /openapi.json what the routes do not declare."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _document(app)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's own way to change it


def _document(app: FastAPI) -> dict[str, Any]:
    document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    schemas: dict[str, Any] = {"Error": ERROR}
    for path, item in document["paths"].items():
        for method, operation in item.items():
            operation["responses"] = _responses(path, method)
            _share_definitions(operation, schemas)
    document["components"] = {"schemas": schemas}
    # pydantic's references are to the schema that they stand in
    return json.loads(json.dumps(document).replace('"#/$defs/', '"#/components/schemas/'))


def _responses(path: str, method: str) -> dict[str, Any]:
    kinds: dict[str, Any] = {"text/plain": {}} if path == "/metrics" else {JSON: {}}
    if path in GENERATES:
        kinds["text/event-stream"] = {}
    statuses = dict(EVERYWHERE)
    if method == "post" or "{model}" in path:
        statuses |= OF_MODELS
    statuses |= OF_BODIES  # a body may come with any request, and be refused
    if path in GENERATES:
        statuses |= OF_WORK
    error = {JSON: {"schema": {"$ref": "#/components/schemas/Error"}}}
    refused = {str(status): {"description": statuses[status], "content": error} for status in sorted(statuses)}
    return {"200": {"description": "as asked for", "content": kinds}} | refused


def _share_definitions(operation: dict[str, Any], schemas: dict[str, Any]) -> None:
    for content in operation.get("requestBody", {}).get("content", {}).values():
        schemas.update(content["schema"].pop("$defs", {}))
