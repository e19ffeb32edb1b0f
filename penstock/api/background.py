"""Responses that are made while nobody waits for them: `background: true` of /v1/responses."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from starlette.types import Message, Send

from penstock.api.message import Fields
from penstock.api.response_shape import ResponseShape
from penstock.api.response_store import ResponseStore
from penstock.core.errors import Unavailable

LOOK = 0.25  # seconds between looks at whether it is cancelled, which says that it is still worked on, too
LOST = 30.0  # seconds without one, after which nobody works on it any more
RUNNING = ("queued", "in_progress")

Run = Callable[[Send], Awaitable[None]]


class Background:
    """Those that this process makes. What there is to know of them is in the store, so that all that share it tell the
    same, and cancel each other's."""

    def __init__(self, store: ResponseStore) -> None:
        self._store = store
        self._tasks: set[asyncio.Task[None]] = set()

    async def begin(self, run: Run, begun: asyncio.Future[ResponseShape]) -> Fields:
        """The response, queued. Raises what `run` raises before it has begun, and Unavailable where it cannot be kept.

        Args:
            run: makes the answer, and has its shape keep it.
            begun: done as soon as there is a shape.
        """
        work = asyncio.ensure_future(run(_nowhere))
        both: set[asyncio.Future[Any]] = {work, begun}
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if not begun.done():
            await work
            raise AssertionError("it ended before it began")
        shape = begun.result()
        try:
            queued = shape.queued()
        except Unavailable:  # nobody could ask for it
            work.cancel()
            raise
        task = asyncio.create_task(self._watch(work, shape))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return queued

    def cancel(self, tenant: str, name: str) -> Fields | None:
        """The response, cancelled unless it had ended; None where none is kept. Raises ValueError where it does not run
        in the background."""
        found = self.get(tenant, name)
        if found is None:
            return None
        if not found["background"]:
            raise ValueError(name)
        if found["status"] in RUNNING:
            found["status"] = "cancelled"
            self._store.update(tenant, name, msgspec.json.encode(found))
        return found

    def get(self, tenant: str, name: str) -> Fields | None:
        """The response as it is now; None where none is kept."""
        kept = self._store.get(tenant, name)
        if kept is None:
            return None
        found: Fields = msgspec.json.decode(kept.response)
        if found["background"] and found["status"] in RUNNING and time.time() - kept.at > LOST:
            error = {"code": "server_error", "message": "the process that made it has ended"}
            return found | {"status": "failed", "error": error}
        return found

    async def _watch(self, work: asyncio.Future[Any], shape: ResponseShape) -> None:
        """Until it is made, has failed, or is cancelled."""
        tenant, name = shape.place
        while not work.done():
            await asyncio.wait({work}, timeout=LOOK)
            found = self.get(tenant, name)
            if found is None or found["status"] == "cancelled":  # deleted, or cancelled by whoever was asked
                work.cancel()
            elif found["status"] in RUNNING and not work.done():
                with contextlib.suppress(Unavailable):  # it may be kept again by the time that it is made
                    self._store.update(tenant, name, msgspec.json.encode(found | {"status": "in_progress"}))
        with contextlib.suppress(asyncio.CancelledError, Unavailable):  # who asks learns after `LOST` that it failed
            error = work.exception()
            if isinstance(error, Exception):
                self._store.update(tenant, name, msgspec.json.encode(shape.failed(error)))


async def _nowhere(message: Message) -> None:
    pass
