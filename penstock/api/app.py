"""The HTTP application: what vLLM's clients expect, over a `service.Frontend`."""

from __future__ import annotations

import functools
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response

from penstock.api import (
    batches,
    chat,
    chat_batch,
    completions,
    embeddings,
    files,
    health,
    invocations,
    messages,
    models,
    overview,
    page,
    responses,
    sleep,
    tokenize,
)
from penstock.api.http import Application, Route, json_response
from penstock.api.openai import AnswerDefaults
from penstock.api.openapi import document
from penstock.api.response_store import ResponseStore
from penstock.obs.metrics import Metrics
from penstock.obs.tracing import Tracing

if TYPE_CHECKING:
    from penstock.service.batch_store import BatchStore
    from penstock.service.frontend import Frontend

MAX_FILE_BYTES = 1 << 30
MAX_BODY_BYTES = 8 * 2**20  # a million token ids


def create_app(
    frontend: Frontend,
    metrics: Metrics,
    *,
    api_keys: tuple[str, ...] = (),
    keys_change: bool = False,
    share_prefixes: bool = False,
    max_body_bytes: int = MAX_BODY_BYTES,
    tracing: Tracing | None = None,
    kept_responses: Path | None = None,
    sleep_mode: bool = False,
    root_path: str = "",
    batch_store: BatchStore | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
    answer_defaults: AnswerDefaults = AnswerDefaults(),  # noqa: B008  (it is immutable)
    shows_tokenizer: bool = False,
) -> Application:
    """All routes.

    Args:
        frontend: what serves them.
        metrics: counts responses, and is shown under /metrics.
        api_keys: when there are any, requests must bear one of them.
        keys_change: whether others come later (`Application.set_api_keys`): tenants are apart from the start.
        share_prefixes: whether requests with different keys share cached prefixes, and conversations.
        max_body_bytes: longer bodies get a 413.
        tracing: where traces of requests go.
        kept_responses: a file that all frontends of the host share; None is this process's memory.
        sleep_mode: whether there are routes that put engines to sleep.
        root_path: what paths may begin with, for a proxy in front that has other things too.
        batch_store: files and batches, which who runs them looks for there; None refuses them.
        max_file_bytes: longer uploads get a 413.
        answer_defaults: what chats and completions have in their answers.
        shows_tokenizer: see `tokenize.routes`.
    """
    tenants_apart = (keys_change or len(set(api_keys)) > 1) and not share_prefixes
    routes = [
        *chat.routes(frontend, answer_defaults),
        *chat_batch.routes(frontend, answer_defaults),
        *completions.routes(frontend, answer_defaults),
        *responses.routes(frontend, ResponseStore(kept_responses)),
        *messages.routes(frontend),
        *embeddings.routes(frontend),
        *files.routes(batch_store, max_file_bytes),
        *batches.routes(batch_store),
        *tokenize.routes(frontend, shows_tokenizer=shows_tokenizer),
        *models.routes(frontend),
        *health.routes(frontend, metrics, _version()),
        *overview.routes(frontend, tenants_apart=tenants_apart),
        *(sleep.routes(frontend) if sleep_mode else ()),
    ]
    routes += invocations.routes(frontend, routes)

    described = functools.lru_cache(1)(functools.partial(document, routes, _version()))

    async def openapi(request: Request) -> Response:
        sizes = frontend.vocab_size, frontend.max_model_len, frontend.embedding_size
        found = described(*sizes, keys=keys_change or bool(api_keys))
        return json_response(found | {"servers": [{"url": root_path}]} if root_path else found)

    watched = overview.stream_route(frontend, tenants_apart=tenants_apart)
    every = [*routes, Route("GET", "/openapi.json", openapi), watched, *page.routes()]
    return Application(every, frontend, metrics, api_keys, tenants_apart, max_body_bytes, tracing, root_path)


def _version() -> str:
    try:
        return version("penstock")
    except PackageNotFoundError:  # run from a checkout that is not installed
        return "unknown"
