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
    overview,
    page,
    responses,
    sleep,
    tokenize,
)
from penstock.api import models as model_cards
from penstock.api.http import Application, Route, json_response
from penstock.api.openapi import document
from penstock.api.response_store import ResponseStore
from penstock.api.schema import AnswerDefaults
from penstock.obs.exposition import Exposition
from penstock.obs.tracing import Tracing

if TYPE_CHECKING:
    from penstock.service.batch_store import BatchStore
    from penstock.service.frontend import Models

SIZES = "vocab_size", "max_model_len", "embedding_size"  # bounds in the OpenAPI document: the widest model's
MAX_FILE_BYTES = 1 << 30
MAX_BODY_BYTES = 8 * 2**20  # a million token ids


def create_app(
    models: Models,
    exposition: Exposition,
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
        models: what serves them.
        exposition: counts responses, and is shown under /metrics.
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
        *chat.routes(models, answer_defaults),
        *chat_batch.routes(models, answer_defaults),
        *completions.routes(models, answer_defaults),
        *responses.routes(models, ResponseStore(kept_responses)),
        *messages.routes(models),
        *embeddings.routes(models),
        *files.routes(batch_store, max_file_bytes),
        *batches.routes(batch_store),
        *tokenize.routes(models, shows_tokenizer=shows_tokenizer),
        *model_cards.routes(models),
        *health.routes(models, exposition, _version()),
        *overview.routes(models, tenants_apart=tenants_apart),
        *(sleep.routes(models) if sleep_mode else ()),
    ]
    routes += invocations.routes(models, routes)

    described = functools.lru_cache(1)(functools.partial(document, routes, _version()))

    async def openapi(request: Request) -> Response:
        sizes = (max(getattr(f, size) for f in models.frontends) for size in SIZES)
        sees = any(frontend.media is not None for frontend in models.frontends)
        found = described(*sizes, keys=keys_change or bool(api_keys), sees=sees)
        return json_response(found | {"servers": [{"url": root_path}]} if root_path else found)

    watched = overview.stream_route(models, tenants_apart=tenants_apart)
    every = [*routes, Route("GET", "/openapi.json", openapi), watched, *page.routes()]
    return Application(every, models, exposition, api_keys, tenants_apart, max_body_bytes, tracing, root_path)


def _version() -> str:
    try:
        return version("penstock")
    except PackageNotFoundError:  # run from a checkout that is not installed
        return "unknown"
