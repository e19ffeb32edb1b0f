"""What all routes have in common: the application around them, their requests' bodies, and work that ends when its
client leaves."""

from __future__ import annotations

import asyncio
import hmac
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from hashlib import blake2b
from types import MappingProxyType
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import msgspec
from starlette import routing
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.api.errors import ErrorShape, error_body, error_response
from penstock.api.schema import Body, BodyType, parse
from penstock.core.errors import InvalidRequest, Unauthorized, Unavailable
from penstock.core.memory import give_back_memory
from penstock.obs.exposition import Exposition
from penstock.obs.tracing import Tracing
from penstock.service.batch_runner import Answer

if TYPE_CHECKING:
    from penstock.service.frontend import Models

OPEN_ROUTES = {"/", "/docs", "/health", "/ping", "/ready", "/metrics", "/version"}  # need no key
PAGE_FILES = "/page/"  # neither does what is below it
WHILE_DRAINING = {"/health", "/metrics", "/version"}  # served while draining
MODEL = "model"  # query parameter of what is about one model, where there are several
MAX_REQUEST_ID_CHARS = 128
MAX_LISTED_FIELDS = 32
MAX_LISTED_CHARS = 64  # of one field's name
LARGE_BODY = 1 << 18  # bytes
CLIENT_GONE = 499  # counted, never sent

Endpoint = Callable[[Request], Awaitable[ASGIApp]]


class Route(routing.Route):
    """One method of one path; with GET also HEAD, whose body the server leaves out.

    Args:
        endpoint: a coroutine function from the request to what sends the response.
        body: what `read_body` makes of the request's body there; None without one.
        errors: how it says them.
        refusals: statuses that only it answers with, and when.
        form: the schema of the form that it takes in pieces, however long that takes, instead of a body.

    Attributes:
        allowed: methods of its path, those of other routes included.
    """

    def __init__(
        self,
        method: str,
        path: str,
        endpoint: Endpoint,
        body: type[Body] | None = None,
        errors: ErrorShape = error_body,
        refusals: Mapping[int, str] = MappingProxyType({}),
        form: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(path, endpoint, methods=[method])
        self.method = method
        self.methods: set[str] = {method, "HEAD"} if method == "GET" else {method}
        self.allowed = self.methods
        self.body = body
        self.errors = errors
        self.refusals = refusals
        self.form = form

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["route"] = self  # for metrics and traces; older versions of Starlette do not set it
        if scope["method"] not in self.methods:
            allowed = ", ".join(sorted(self.allowed))
            message = f"{scope['path']}: {scope['method']}, allowed is {allowed}"
            raise HTTPException(405, message, {"allow": allowed})
        scope["state"]["in_pieces"] = self.form is not None
        if self.form is None:
            _check_length(Headers(scope=scope), scope["state"]["max_body_bytes"])
        response = await self.endpoint(Request(scope, receive))
        await response(scope, receive, send)


class Application:
    """The ASGI application: request ids, traces, keys, sizes, refusing while the server drains, routing, and an answer
    to every error. A slash at the end of a path changes nothing, nor does the root path at its beginning.

    Requests have `request.state.request_id`; `request.state.tenant`, see `Body.came_from`; and `request.state.headers`,
    a list of headers for the response.
    """

    def __init__(
        self,
        routes: Sequence[Route],
        models: Models,
        exposition: Exposition,
        api_keys: tuple[str, ...],
        tenants_apart: bool,
        max_body_bytes: int,
        tracing: Tracing | None,
        root_path: str = "",
    ) -> None:
        for route in routes:
            route.allowed = set().union(*(each.methods for each in routes if each.path == route.path))
        self.routes = routes
        self._router = routing.Router(routes, redirect_slashes=False, default=_no_route)
        self._models = models
        self._exposition = exposition
        self._tenants_apart = tenants_apart
        self._max_body_bytes = max_body_bytes
        self._tracing = tracing
        self._root_path = root_path
        self.set_api_keys(api_keys)

    def set_api_keys(self, keys: Sequence[str]) -> None:
        """From now on requests must bear one of these, if there are any; those that run go on."""
        self._tenants = {key.encode(): tenant_name(key) if self._tenants_apart else "" for key in keys}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._root_path and f"{scope['path']}/".startswith(f"{self._root_path}/"):
            scope["path"] = scope["path"][len(self._root_path) :] or "/"
        if scope["path"].endswith("/") and scope["path"] != "/":
            scope["path"] = scope["path"][:-1]
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
        state = {"request_id": request_id, "headers": headers, "max_body_bytes": self._max_body_bytes}
        scope["state"] = state
        status = 0

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                close = [(b"connection", b"close")] if self._models.draining else []  # the client reconnects elsewhere
                message = {**message, "headers": [*message["headers"], *headers, *close]}
            await send(message)

        try:
            state["tenant"] = self._check(scope["path"], given, wanted_id)
            await self._router.app(scope, receive, answer)
        except ClientDisconnect:
            pass
        except Exception as error:
            if status:
                raise
            shape = getattr(scope.get("route"), "errors", error_body)
            await error_response(error, request_id, shape)(scope, receive, answer)
        finally:
            route = getattr(scope.get("route"), "path", "unknown")
            self._exposition.observe_http(route, status or CLIENT_GONE)
            if scope["state"].get("body_bytes", 0) > LARGE_BODY:
                asyncio.get_running_loop().call_soon(give_back_memory)  # when nothing of the request is left
            if trace is not None:
                trace.end(route, status or CLIENT_GONE)

    async def ask(self, path: str, body: bytes, tenant: str, request_id: str) -> Answer:
        """What is answered to a POST of JSON that came over no connection: of a batch."""
        state = {"request_id": request_id, "headers": [], "max_body_bytes": self._max_body_bytes, "tenant": tenant}
        scope = {"type": "http", "method": "POST", "path": path, "root_path": "", "query_string": b"", "state": state}
        scope["headers"] = [(b"content-type", b"application/json")]
        messages = [{"type": "http.request", "body": body, "more_body": False}]
        sent: list[Message] = []

        async def receive() -> Message:
            if not messages:
                await asyncio.Event().wait()  # nobody leaves
            return messages.pop()

        async def send(message: Message) -> None:
            sent.append(message)

        try:
            await self._router.app(scope, receive, send)
        except Exception as error:
            sent.clear()
            await error_response(error, request_id)(scope, receive, send)
        headers = dict(sent[0]["headers"])
        said = b"".join(message["body"] for message in sent[1:])
        final = headers.get(b"x-should-retry") == b"false"
        return Answer(sent[0]["status"], said, float(headers.get(b"retry-after", 1)), final)

    def _check(self, path: str, headers: Headers, request_id: str | None) -> str:
        """Check a request before its body is read, its key first. Returns the tenant.

        Raises:
            Unavailable: the server drains.
            Unauthorized: it has none of the keys.
            InvalidRequest: its request id cannot be one.
        """
        if self._models.draining and path not in WHILE_DRAINING:
            raise Unavailable("the server is shutting down: it finishes what runs, and takes nothing new")
        tenant = self._tenant_of(path, headers)
        if request_id is not None and not _valid_id(request_id):
            raise InvalidRequest(
                f"x-request-id: allowed are 1 to {MAX_REQUEST_ID_CHARS} printable ASCII characters", "x-request-id"
            )
        return tenant

    def _tenant_of(self, path: str, headers: Headers) -> str:
        """Who sends it, by its key. Raises Unauthorized when it has none of the keys."""
        if not self._tenants or path in OPEN_ROUTES or path.startswith(PAGE_FILES):
            return ""
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if "x-api-key" in headers:  # as Anthropic's clients send it
            scheme, given = "bearer", headers["x-api-key"]
        key = given.strip().encode("latin-1")
        found = [tenant for known, tenant in self._tenants.items() if hmac.compare_digest(key, known)]
        if scheme.lower() != "bearer" or not found:
            raise Unauthorized("authorization: the API key is missing or wrong, send 'Authorization: Bearer KEY'")
        return found[0]


def _check_length(headers: Headers, most: int) -> None:
    """Raises HTTPException, 413, when a body is announced as too long."""
    length = headers.get("content-length", "")
    if length.isdecimal() and int(length) > most:
        raise HTTPException(413, f"the body has {length} bytes, at most {most} are allowed")


def tenant_name(key: str) -> str:
    """What travels instead of an API key: 32 hexadecimal digits, the same in every frontend and every run."""
    return blake2b(key.encode(), digest_size=16, person=b"penstock.tenant").hexdigest()


async def _no_route(scope: Scope, receive: Receive, send: Send) -> None:
    raise HTTPException(404, f"{scope['path']}: there is no such route")


def _valid_id(text: str) -> bool:
    return 1 <= len(text) <= MAX_REQUEST_ID_CHARS and text.isascii() and text.isprintable()


async def read_body(request: Request, model: type[BodyType]) -> BodyType:
    """The request's body. Fields that are ignored will be listed in a response header.

    Raises:
        InvalidRequest, UnsupportedField: not JSON, or not such a body.
        HTTPException: 413, longer than the application allows.
        ClientDisconnect: the client left.
    """
    body, ignored = parse(await read_data(request), model)
    body.came_from(request.state.tenant)
    if ignored:
        names = (quote(name[:MAX_LISTED_CHARS], safe="") for name in ignored[:MAX_LISTED_FIELDS])
        request.state.headers.append((b"x-penstock-ignored-fields", ", ".join(names).encode()))
    return body


async def read_data(request: Request) -> bytes:
    """The request's body as it came, however often it is asked for. Raises as `read_body` does."""
    found: bytes | None = getattr(request.state, "data", None)
    if found is not None:
        return found
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise InvalidRequest(f"content-type: {kind!r}, allowed is application/json", "content-type")
    limit: int = request.state.max_body_bytes
    data = bytearray()
    async for chunk in request.stream():
        data += chunk
        request.state.body_bytes = len(data)
        if len(data) > limit:
            raise HTTPException(413, f"the body is too long, at most {limit} bytes are allowed")
    request.state.data = bytes(data)
    return bytes(data)


def json_response(payload: object) -> Response:
    return Response(msgspec.json.encode(payload), media_type="application/json")


class UntilDisconnect:
    """Does the work that sends the response, and cancels it as soon as the client leaves, in whatever phase it is.

    Args:
        work: sends the response; errors that it raises before it has sent anything are answered as usual.
    """

    def __init__(self, work: Callable[[Send], Coroutine[Any, Any, None]]) -> None:
        self._work = work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = asyncio.current_task()
        assert work is not None
        working, left = True, False

        def leave(gone: asyncio.Task[None]) -> None:
            nonlocal left
            if working and not gone.cancelled():
                left = True
                work.cancel()

        gone = asyncio.create_task(_disconnected(receive))
        gone.add_done_callback(leave)
        try:
            await self._work(send)
        except asyncio.CancelledError:
            if not left or work.uncancel():  # cancelled from elsewhere, too
                raise
        finally:
            working = False
            gone.cancel()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
