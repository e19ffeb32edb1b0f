"""The outermost layer of the application: request ids, traces, keys, sizes, counting, refusing at the end, answers to
all errors."""

from __future__ import annotations

import hmac
import uuid
from typing import TYPE_CHECKING

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.api.errors import error_response
from penstock.core.errors import InvalidRequest, Unauthorized, Unavailable
from penstock.obs.metrics import Metrics
from penstock.obs.tracing import Tracing

if TYPE_CHECKING:
    from penstock.service.frontend import Frontend

OPEN_ROUTES = {"/health", "/ready", "/metrics", "/version"}  # need no key
TO_THE_END = {"/health", "/metrics", "/version"}  # are answered while the server drains
MAX_REQUEST_ID_CHARS = 128
CLIENT_GONE = 499  # counted, never sent


class Edge:
    """ASGI middleware. Sets `request.state.request_id` and `request.state.headers`, a list of response headers."""

    def __init__(
        self,
        app: ASGIApp,
        frontend: Frontend,
        metrics: Metrics,
        api_keys: tuple[str, ...],
        max_body_bytes: int,
        tracing: Tracing | None,
    ) -> None:
        self._app = app
        self._frontend = frontend
        self._metrics = metrics
        self._keys = [key.encode() for key in api_keys]
        self._max_body_bytes = max_body_bytes
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope)
        wanted_id = given.get("x-request-id")
        request_id = wanted_id if wanted_id and _valid_id(wanted_id) else uuid.uuid4().hex
        headers = [(b"x-request-id", request_id.encode())]
        trace = None
        if self._tracing is not None and scope["path"] not in OPEN_ROUTES:
            trace = self._tracing.begin(scope["method"], scope["path"], given)
            headers.append((b"traceparent", trace.traceparent.encode()))
        else:
            headers += [(name, value) for name, value in given.raw if name == b"traceparent"]
        scope.setdefault("state", {}).update(request_id=request_id, headers=headers)
        status = 0

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                close = [(b"connection", b"close")] if self._frontend.draining else []  # the next one goes elsewhere
                message = {**message, "headers": [*message["headers"], *headers, *close]}
            await send(message)

        try:
            self._check(scope["path"], given)
            await self._app(scope, receive, answer)
        except ClientDisconnect:
            pass
        except Exception as error:
            if status:
                raise
            await error_response(error, request_id)(scope, receive, answer)
        finally:
            route = getattr(scope.get("route"), "path", "unknown")
            self._metrics.observe_http(route, status or CLIENT_GONE)
            if trace is not None:
                trace.end(route, status or CLIENT_GONE)

    def _check(self, path: str, headers: Headers) -> None:
        """Before anything of the body is read.

        Raises:
            Unavailable: nothing new is taken any more.
            Unauthorized: it has none of the keys.
            HTTPException: 413, its body is announced as too long.
            InvalidRequest: its request id cannot be one.
        """
        if self._frontend.draining and path not in TO_THE_END:
            raise Unavailable("the server is shutting down: it finishes what runs, and takes nothing new")
        if self._keys and path not in OPEN_ROUTES:
            scheme, _, key = headers.get("authorization", "").partition(" ")
            good = [hmac.compare_digest(key.strip().encode("latin-1"), known) for known in self._keys]
            if scheme.lower() != "bearer" or not any(good):
                raise Unauthorized("authorization: the API key is missing or wrong, send 'Authorization: Bearer KEY'")
        length = headers.get("content-length", "")
        if length.isdecimal() and int(length) > self._max_body_bytes:
            raise HTTPException(413, f"the body has {length} bytes, at most {self._max_body_bytes} are allowed")
        request_id = headers.get("x-request-id")
        if request_id is not None and not _valid_id(request_id):
            raise InvalidRequest(
                f"x-request-id: allowed are 1 to {MAX_REQUEST_ID_CHARS} printable ASCII characters", "x-request-id"
            )


def _valid_id(text: str) -> bool:
    return 1 <= len(text) <= MAX_REQUEST_ID_CHARS and text.isascii() and text.isprintable()
