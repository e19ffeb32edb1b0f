"""/v1/batches: many requests in one file, answered within a day by what capacity others leave."""

from __future__ import annotations

import json
import re
from typing import Any, Literal, NoReturn

from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from penstock.api.files import KEPT_SECONDS, PURPOSE, opened, page, page_of
from penstock.api.http import Route, json_response, read_body
from penstock.api.schema import Body
from penstock.core.errors import InvalidRequest
from penstock.service.batch_store import Batch, BatchStore

DEFAULT_PAGE, MOST_BATCHES = 20, 100  # on a page
MOST_METADATA, MOST_KEY, MOST_VALUE = 16, 64, 512  # entries; characters of a key and of a value
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
LONGEST = 30 * UNITS["d"]
WINDOW = re.compile(r"^[1-9][0-9]{0,6}[smhd]$")
REFUSALS = {404: "there is no such batch, or files and batches are off", 409: "it is over already"}
TIMES = (
    *("created_at", "in_progress_at", "expires_at", "finalizing_at", "completed_at"),
    *("failed_at", "expired_at", "cancelling_at", "cancelled_at"),
)


class Kept(BaseModel):
    """For how long output files are kept."""

    model_config = ConfigDict(extra="forbid", strict=True)

    anchor: Literal["created_at"]
    seconds: int = Field(ge=KEPT_SECONDS[0], le=KEPT_SECONDS[1])


class BatchBody(Body):
    """POST /v1/batches"""

    input_file_id: str
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings"]
    completion_window: str
    metadata: dict[str, str] | None = None
    output_expires_after: Kept | None = None

    @property
    def seconds(self) -> int:
        """Of the completion window."""
        return int(self.completion_window[:-1]) * UNITS[self.completion_window[-1]]

    def check(self) -> None:
        if not WINDOW.match(self.completion_window) or not 1 <= self.seconds <= LONGEST:
            raise InvalidRequest(
                f"completion_window: {self.completion_window[:64]!r}, allowed is 24h, or another number of s, m, h "
                "or d up to 30d",
                "completion_window",
            )
        entries = self.metadata or {}
        if len(entries) > MOST_METADATA or any(len(k) > MOST_KEY or len(v) > MOST_VALUE for k, v in entries.items()):
            raise InvalidRequest(
                f"metadata: allowed are {MOST_METADATA} entries, with keys of {MOST_KEY} and values of {MOST_VALUE} "
                "characters at most",
                "metadata",
            )


def routes(store: BatchStore | None) -> list[Route]:
    """
    Args:
        store: None where they are off.
    """

    async def create_batch(request: Request) -> Response:
        """Has the requests of a file answered. Its lines are checked first, and then run as offline work."""
        kept = opened(store)
        body = await read_body(request, BatchBody)
        owner = request.state.tenant
        file = await kept.asked(kept.file, owner, body.input_file_id)
        if file is None or file.purpose != PURPOSE:
            shown = body.input_file_id[:64]
            raise InvalidRequest(
                f"input_file_id: {shown!r}, allowed is a file that was uploaded with purpose {PURPOSE}", "input_file_id"
            )
        batch = await kept.asked(
            kept.create,
            owner,
            body.endpoint,
            file.id,
            window=body.completion_window,
            seconds=body.seconds,
            metadata=body.metadata,
            keep_seconds=None if body.output_expires_after is None else body.output_expires_after.seconds,
        )
        return json_response(shown_batch(batch))

    async def list_batches(request: Request) -> Response:
        """A page of them, the newest first: `after` a batch's id, and `limit`."""
        kept = opened(store)
        after, limit = page_of(request, DEFAULT_PAGE, MOST_BATCHES)
        found, more = await kept.asked(kept.batches, request.state.tenant, after, limit)
        return page([shown_batch(batch) for batch in found], more)

    async def retrieve_batch(request: Request) -> Response:
        kept, batch_id = opened(store), request.path_params["batch"]
        batch = await kept.asked(kept.batch, request.state.tenant, batch_id)
        return json_response(shown_batch(batch)) if batch is not None else _missing(batch_id)

    async def cancel_batch(request: Request) -> Response:
        """Ends it: what is answered is kept in its output file."""
        kept, batch_id = opened(store), request.path_params["batch"]
        batch = await kept.asked(kept.cancel, request.state.tenant, batch_id)
        return json_response(shown_batch(batch)) if batch is not None else _missing(batch_id)

    return [
        Route("POST", "/v1/batches", create_batch, BatchBody, refusals=REFUSALS),
        Route("GET", "/v1/batches", list_batches, refusals=REFUSALS),
        Route("GET", "/v1/batches/{batch}", retrieve_batch, refusals=REFUSALS),
        Route("POST", "/v1/batches/{batch}/cancel", cancel_batch, refusals=REFUSALS),
    ]


def _missing(batch_id: str) -> NoReturn:
    raise HTTPException(404, f"batch_id: there is no batch {batch_id!r}")


def shown_batch(batch: Batch) -> dict[str, Any]:
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "model": batch.model,
        "errors": batch.errors and {"object": "list", "data": json.loads(batch.errors)},
        "input_file_id": batch.input_file_id,
        "completion_window": batch.completion_window,
        "status": batch.status,
        "output_file_id": batch.output_file_id,
        "error_file_id": batch.error_file_id,
        **{name: getattr(batch, name) for name in TIMES},
        "request_counts": {"total": batch.total, "completed": batch.completed, "failed": batch.failed},
        "usage": {
            "input_tokens": batch.input_tokens,
            "input_tokens_details": {"cached_tokens": batch.cached_tokens},
            "output_tokens": batch.output_tokens,
            "output_tokens_details": {"reasoning_tokens": batch.reasoning_tokens},
            "total_tokens": batch.input_tokens + batch.output_tokens,
        },
        "metadata": batch.metadata and json.loads(batch.metadata),
    }
