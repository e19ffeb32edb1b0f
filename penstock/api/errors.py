"""Errors as HTTP answers; in OpenAI's shape, where a route has no other."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

import msgspec
from starlette.exceptions import HTTPException
from starlette.responses import Response

from penstock.core.errors import PenstockError, http_row

logger = logging.getLogger("penstock.api")

ErrorShape = Callable[[str, str, str | None, str], dict[str, object]]  # of message, kind, field, code: the body
HTTP_CODES = {404: "not_found", 405: "method_not_allowed", 413: "request_too_large"}


def error_body(message: str, kind: str, param: str | None, code: str) -> dict[str, object]:
    """In OpenAI's shape."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_row(error: Exception, request_id: str, shape: ErrorShape = error_body) -> tuple[int, dict[str, object]]:
    """(HTTP status, body). An unexpected error is logged with its traceback, and the client gets only the request
    id."""
    if isinstance(error, HTTPException):
        code = HTTP_CODES.get(error.status_code, "invalid_request")
        return error.status_code, shape(error.detail, "invalid_request_error", None, code)
    status, kind, code = http_row(error)
    message = str(error) if isinstance(error, PenstockError) else "internal error"
    if status == 500:
        # for a `PenstockError` the cause was logged where it was raised, once for all requests that it ended
        level = logging.DEBUG if isinstance(error, PenstockError) else logging.ERROR
        logger.log(level, "request %s failed: %s", request_id, error, exc_info=error)
        message = f"{message} (request {request_id})"
    return status, shape(message, kind, getattr(error, "field", None), code)


def error_response(error: Exception, request_id: str, shape: ErrorShape = error_body) -> Response:
    status, body = error_row(error, request_id, shape)
    headers = dict(getattr(error, "headers", None) or {})
    if status in {429, 503}:
        headers["retry-after"] = str(max(1, math.ceil(getattr(error, "retry_after", 1.0))))
    return Response(msgspec.json.encode(body), status, headers, media_type="application/json")
