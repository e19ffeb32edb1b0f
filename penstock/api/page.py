"""GET /, /docs and their files: pages for people, which need no build and ask no other server for anything."""

from __future__ import annotations

from hashlib import blake2b
from importlib.resources import files
from mimetypes import guess_type

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from penstock.api.http import PAGE_FILES, Route

# Whatever a model writes, and whoever named a request: the page runs no script but its own, and talks to nobody else.
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data: blob:",
        "connect-src 'self'",
        "form-action 'none'",
        "base-uri 'none'",
        "frame-ancestors 'none'",
    )
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",  # a new version is seen at once; what is unchanged is not sent again
}
KINDS = {".js": "text/javascript"}  # some systems' tables say otherwise, and browsers then refuse it


def routes() -> list[Route]:
    kept = {entry.name: entry.read_bytes() for entry in (files("penstock.api") / "web").iterdir() if entry.is_file()}
    tags = {name: f'"{blake2b(data, digest_size=12).hexdigest()}"' for name, data in kept.items()}

    def answer(request: Request, name: str) -> Response:
        headers = HEADERS | {"etag": tags[name]}
        if request.headers.get("if-none-match") == tags[name]:
            return Response(status_code=304, headers=headers)
        suffix = name[name.rindex(".") :]
        kind = KINDS.get(suffix) or guess_type(name)[0]
        return Response(kept[name], media_type=kind, headers=headers)

    async def page(request: Request) -> Response:
        """The page: chat, cluster, requests."""
        return answer(request, "index.html")

    async def docs(request: Request) -> Response:
        """The API, readable."""
        return answer(request, "docs.html")

    async def page_file(request: Request) -> Response:
        """A file of the page."""
        name = request.path_params["name"]
        if name not in kept:
            raise HTTPException(404, f"{request.url.path}: there is no such file")
        return answer(request, name)

    return [Route("GET", "/", page), Route("GET", "/docs", docs), Route("GET", PAGE_FILES + "{name}", page_file)]
