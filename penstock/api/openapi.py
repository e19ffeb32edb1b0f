"""The server's OpenAPI document: every status that occurs, and its schema."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from penstock.api import answers, messages
from penstock.api.body_schema import body_schema
from penstock.api.http import OPEN_ROUTES, Route
from penstock.api.schema import ServedBody

JSON = "application/json"
FORM = "multipart/form-data"
TEMPLATE = "#/components/schemas/{name}"
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
MESSAGE_ERROR = {  # in Anthropic's shape
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
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
OF_BODIES = {413: "the body is too long"}
OF_WORK = {429: "too much is waiting already; see `Retry-After`"}
EVENT = {  # of a stream
    "type": "object",
    "required": ["data"],
    "properties": {
        "data": {"type": "string", "description": "a chunk of the answer, in OpenAI's shape; at last [DONE]"}
    },
}
EMPTY = {"/ping"}  # what says all in its status
ELSEWHERE = {"/invocations"}  # takes what other paths take, and is described there
STREAMS = {"/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"}


def document(
    routes: Iterable[Route],
    version: str,
    vocab_size: int = 0,
    max_model_len: int = 0,
    embedding_size: int = 0,
    *,
    keys: bool = False,
    sees: bool = False,
) -> dict[str, Any]:
    """The OpenAPI document of these routes.

    Args:
        keys: whether requests must bear an API key.
        sees: whether a model takes images.
        vocab_size, max_model_len, embedding_size: of the model; 0 when not known yet.
    """
    answered, named = answers.schemas(TEMPLATE)
    schemas: dict[str, Any] = {"Error": ERROR, "MessageError": MESSAGE_ERROR, **named}
    paths: dict[str, Any] = {}
    for route in routes:
        if route.path in ELSEWHERE:
            continue
        work = route.body is not None and issubclass(route.body, ServedBody)
        answer = answered.get(f"{route.method} {route.path_format}") or answered.get(route.path_format)
        responses = _responses(route, answer, work=work)
        operation: dict[str, Any] = {"operationId": route.name, "responses": responses}
        if route.endpoint.__doc__:
            operation["description"] = route.endpoint.__doc__
        if route.param_convertors:
            text = {"in": "path", "required": True, "schema": {"type": "string"}}
            operation["parameters"] = [{"name": name} | text for name in route.param_convertors]
        if route.body is not None:
            sizes = vocab_size, max_model_len, embedding_size
            schema = body_schema(route.body, *sizes, template="#/components/schemas/{model}", sees=sees)
            schemas |= schema.pop("$defs", {})
            operation["requestBody"] = {"required": True, "content": {JSON: {"schema": schema}}}
        if route.form is not None:
            operation["requestBody"] = {"required": True, "content": {FORM: {"schema": route.form}}}
        if keys and route.path_format in OPEN_ROUTES:
            operation["security"] = []
        paths.setdefault(route.path_format, {})[route.method.lower()] = operation
    info = {"title": "penstock", "version": version}
    components: dict[str, Any] = {"schemas": schemas}
    described: dict[str, Any] = {"openapi": "3.1.0", "info": info, "paths": paths, "components": components}
    if keys:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        described["security"] = [{"key": []}]
    return described


def _responses(route: Route, answer: dict[str, Any] | None, *, work: bool) -> dict[str, Any]:
    path = route.path_format
    kinds: dict[str, Any] = {"text/plain": {}} if path == "/metrics" else {JSON: {"schema": answer} if answer else {}}
    if path in STREAMS:
        kinds["text/event-stream"] = {"schema": EVENT}
    statuses = {**EVERYWHERE, **route.refusals}
    if route.method == "POST" or "{model}" in path:
        statuses |= OF_MODELS
    statuses |= OF_BODIES  # a body may come with any request, and be refused
    if work:
        statuses |= OF_WORK
    name = "MessageError" if route.errors is messages.error_body else "Error"
    error = {JSON: {"schema": {"$ref": TEMPLATE.format(name=name)}}}
    refused = {str(status): {"description": statuses[status], "content": error} for status in sorted(statuses)}
    content: dict[str, Any] = {} if path in EMPTY else {"content": kinds}
    return {"200": {"description": "as asked for", **content}} | refused
