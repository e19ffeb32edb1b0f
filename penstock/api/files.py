"""/v1/files: what batches read, and what comes of them. Contents go to disk and come from there in pieces."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, NoReturn

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, Response

from penstock.api.http import Route, json_response
from penstock.core.errors import InvalidRequest
from penstock.service.batch_store import BatchStore, StoredFile, Upload

PURPOSE = "batch"
MAX_FIELD_BYTES = 1024  # of a field that is not the file
MAX_NAME_CHARS = 255
MAX_FORM_BYTES = 1 << 16  # of all that is not the file
PIECE = 1 << 20  # bytes that are written at a time
MOST_FILES = 10_000  # on a page
KEPT_SECONDS = (3600, 2_592_000)  # for which a file may be kept, at least and at most
OFF = "files and batches are off here, as they need a folder: start the server with --batch-dir FOLDER"
REFUSALS = {404: "there is no such file, or files and batches are off", 409: "a batch that is not over needs it"}
FORM: dict[str, Any] = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {
        "file": {"type": "string", "format": "binary"},
        "purpose": {"enum": [PURPOSE]},
        "expires_after[anchor]": {"enum": ["created_at"]},
        "expires_after[seconds]": {"type": "integer", "minimum": KEPT_SECONDS[0], "maximum": KEPT_SECONDS[1]},
    },
    "dependentRequired": {
        "expires_after[anchor]": ["expires_after[seconds]"],
        "expires_after[seconds]": ["expires_after[anchor]"],
    },
}


def routes(store: BatchStore | None, max_file_bytes: int) -> list[Route]:
    """
    Args:
        store: None where they are off.
        max_file_bytes: of one that is uploaded.
    """

    async def upload_file(request: Request) -> Response:
        """Keeps a file for batches: JSONL, one request a line."""
        kept = opened(store)
        upload = await kept.asked(kept.begin_upload)
        try:
            form = _Form(request, upload, max_file_bytes)
            with kept.for_client():
                await form.receive()
            keep_seconds = form.check()
            file = await kept.asked(
                kept.keep_upload,
                upload,
                owner=request.state.tenant,
                purpose=PURPOSE,
                filename=form.filename or "",
                keep_seconds=keep_seconds,
            )
        finally:
            await kept.asked(upload.discard)
        return json_response(_shown(file))

    async def list_files(request: Request) -> Response:
        """A page of them: with `purpose`, `after` a file's id, `limit`, `order` asc or desc."""
        kept = opened(store)
        order = request.query_params.get("order", "desc")
        if order not in ("asc", "desc"):
            raise InvalidRequest(f"order: {order!r}, allowed are asc, desc", "order")
        after, limit = page_of(request, MOST_FILES, MOST_FILES)
        purpose = request.query_params.get("purpose")
        found, more = await kept.asked(
            kept.files, request.state.tenant, purpose, after, limit, newest_first=order == "desc"
        )
        return page([_shown(file) for file in found], more)

    async def retrieve_file(request: Request) -> Response:
        return json_response(_shown(await _found(opened(store), request)))

    async def file_content(request: Request) -> Response:
        kept = opened(store)
        file = await _found(kept, request)
        return FileResponse(kept.path(file.id), media_type="application/octet-stream", filename=file.filename)

    async def delete_file(request: Request) -> Response:
        kept, file_id = opened(store), request.path_params["file"]
        if not await kept.asked(kept.delete_file, request.state.tenant, file_id):
            _missing(file_id)
        return json_response({"id": file_id, "object": "file", "deleted": True})

    return [
        Route("POST", "/v1/files", upload_file, refusals=REFUSALS, form=FORM),
        Route("GET", "/v1/files", list_files, refusals=REFUSALS),
        Route("GET", "/v1/files/{file}", retrieve_file, refusals=REFUSALS),
        Route("DELETE", "/v1/files/{file}", delete_file, refusals=REFUSALS),
        Route("GET", "/v1/files/{file}/content", file_content, refusals=REFUSALS),
    ]


def opened(store: BatchStore | None) -> BatchStore:
    """Raises HTTPException, 404, where files and batches are off."""
    if store is None:
        raise HTTPException(404, OFF)
    return store


def page_of(request: Request, default: int, most: int) -> tuple[str | None, int]:
    """After which entry the page begins that is asked for, and how many it may have. Raises InvalidRequest."""
    given = request.query_params.get("limit", str(default))
    if not (given.isascii() and given.isdecimal() and 1 <= len(given) <= 9 and 1 <= int(given) <= most):
        raise InvalidRequest(f"limit: {given!r}, allowed is a whole number from 1 to {most}", "limit")
    return request.query_params.get("after"), int(given)


def page(entries: list[dict[str, Any]], more: bool) -> Response:
    first, last = (entries[0]["id"], entries[-1]["id"]) if entries else (None, None)
    return json_response({"object": "list", "data": entries, "first_id": first, "last_id": last, "has_more": more})


async def _found(store: BatchStore, request: Request) -> StoredFile:
    file_id = request.path_params["file"]
    file = await store.asked(store.file, request.state.tenant, file_id)
    return file if file is not None else _missing(file_id)


def _missing(file_id: str) -> NoReturn:
    raise HTTPException(404, f"file_id: there is no file {file_id!r}")


def _shown(file: StoredFile) -> dict[str, Any]:
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.bytes,
        "created_at": file.created_at,
        "expires_at": file.expires_at,
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
        "status_details": None,
    }


class _Form:
    """A form on its way in: its file goes to the upload, in pieces, and its fields are kept.

    Attributes:
        filename: None until the file has begun.
    """

    def __init__(self, request: Request, upload: Upload, max_file_bytes: int) -> None:
        self.filename: str | None = None
        self._request, self._upload, self._limit = request, upload, max_file_bytes
        self._fields: dict[str, bytes] = {}
        self._headers: dict[bytes, bytes] = {}
        self._header = [b"", b""]  # name and value of the one that comes
        self._name: str | None = None  # of the field that comes; None in the file
        self._pieces: list[bytes] = []  # of the file, not written yet
        self._waiting = self._size = 0  # bytes of these, and of the whole file so far
        self._ended = False

    async def receive(self) -> None:
        """
        Raises:
            InvalidRequest: it is no such form.
            HTTPException: 413, the file is longer than is allowed.
            ClientDisconnect: the client left.
        """
        state = self._request.state
        state.body_bytes = 0
        parser = self._parser()
        async for chunk in self._request.stream():
            state.body_bytes += len(chunk)
            try:
                parser.write(chunk)
            except FormParserError as error:
                raise InvalidRequest(f"body: this is no multipart/form-data ({error})", "body") from None
            if self._size > self._limit:
                raise HTTPException(413, f"the file is too long, at most {self._limit} bytes are allowed")
            if state.body_bytes - self._size > MAX_FORM_BYTES:
                raise HTTPException(413, f"the form is too long, at most {MAX_FORM_BYTES} bytes beside its file")
            if self._waiting >= PIECE:
                await self._write()
        if not self._ended:
            raise InvalidRequest("body: the form does not end, it was cut off", "body")
        await self._write()

    def check(self) -> int | None:
        """For how many seconds the file is to be kept; None for ever. Raises InvalidRequest naming the field."""
        fields = {name: value.decode("utf-8", "replace") for name, value in self._fields.items()}
        if (purpose := fields.get("purpose")) != PURPOSE:
            problem = "missing" if purpose is None else repr(purpose[:64])
            raise InvalidRequest(f"purpose: {problem}, allowed is {PURPOSE}", "purpose")
        if self.filename is None:
            raise InvalidRequest("file: missing, it is required, with a filename", "file")
        anchor, seconds = fields.get("expires_after[anchor]"), fields.get("expires_after[seconds]")
        if anchor is None and seconds is None:
            return None
        return checked_keep(anchor, int(seconds) if seconds and seconds.isdecimal() else seconds)

    async def _write(self) -> None:
        data = b"".join(self._pieces)
        self._pieces.clear()
        self._waiting = 0
        if data:
            await asyncio.to_thread(self._upload.write, data)

    def _parser(self) -> MultipartParser:
        kind, options = parse_options_header(self._request.headers.get("content-type"))
        if kind != b"multipart/form-data" or not options.get(b"boundary"):
            shown = kind.decode("latin-1")[:64]
            raise InvalidRequest(f"content-type: {shown!r}, allowed is multipart/form-data", "content-type")
        heads: dict[str, Callable[..., None]] = {
            "on_part_begin": self._begin_part,
            "on_header_field": lambda data, start, end: self._add_head(0, data[start:end]),
            "on_header_value": lambda data, start, end: self._add_head(1, data[start:end]),
            "on_header_end": self._end_head,
            "on_headers_finished": self._end_heads,
            "on_part_data": lambda data, start, end: self._add(data[start:end]),
            "on_end": self._end,
        }
        try:
            return MultipartParser(options[b"boundary"], heads)  # type: ignore[arg-type]  # a TypedDict of these
        except FormParserError as error:
            raise InvalidRequest(f"content-type: {error}", "content-type") from None

    def _begin_part(self) -> None:
        self._headers = {}

    def _add_head(self, place: int, data: bytes) -> None:
        self._header[place] += data

    def _end_head(self) -> None:
        self._headers[self._header[0].lower()] = self._header[1]
        self._header = [b"", b""]

    def _end_heads(self) -> None:
        _, options = parse_options_header(self._headers.get(b"content-disposition"))
        name = options.get(b"name", b"").decode("utf-8", "replace")
        if name == "file" and b"filename" in options:
            if self.filename is not None:
                raise InvalidRequest("file: comes twice, allowed is one", "file")
            self.filename = options[b"filename"].decode("utf-8", "replace")[:MAX_NAME_CHARS]
            self._name = None
        else:
            self._name = name
            self._fields[name] = b""

    def _add(self, data: bytes) -> None:
        if self._name is None:
            self._pieces.append(data)
            self._waiting += len(data)
            self._size += len(data)
            return
        self._fields[self._name] += data
        if len(self._fields[self._name]) > MAX_FIELD_BYTES:
            shown = self._name[:64]
            raise InvalidRequest(f"{shown}: at most {MAX_FIELD_BYTES} bytes are allowed, but for the file", shown)

    def _end(self) -> None:
        self._ended = True


def checked_keep(anchor: object, seconds: object, field: str = "expires_after") -> int:
    """For how many seconds a file is kept, as OpenAI has it said. Raises InvalidRequest."""
    if anchor != "created_at":
        raise InvalidRequest(f"{field}.anchor: {str(anchor)[:64]!r}, allowed is created_at", f"{field}.anchor")
    low, high = KEPT_SECONDS
    if not isinstance(seconds, int) or isinstance(seconds, bool) or not low <= seconds <= high:
        shown = str(seconds)[:64]
        raise InvalidRequest(
            f"{field}.seconds: {shown!r}, allowed is a whole number from {low} to {high}", f"{field}.seconds"
        )
    return seconds
