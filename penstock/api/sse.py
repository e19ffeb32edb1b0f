"""Answers of the routes that generate: whole, or as server-sent events. What is in them is the API's own (`Shape`)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol

import msgspec
from starlette.types import Send

from penstock.service.generation import Generation, Usage
from penstock.text.detokenizer import Delta

EVENT_STREAM = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies must not hold tokens back
]

encode = msgspec.json.Encoder().encode


class Shape(Protocol):
    """How an API presents outputs: all bytes of its answers come from here."""

    counts: bool  # whether its events say how much was used so far

    def count(self, usage: Usage) -> None:
        """Events from here on say that so much was used; only with `counts`."""

    def opening(self) -> list[bytes]:
        """Events that come before anything else."""

    def content(self, delta: Delta) -> bytes:
        """The event of new text or tokens, and of the output's end where these are its last."""

    def closing(self, usage: Usage) -> bytes:
        """Events that come after everything else, and what says that these are all."""

    def failure(self, error: Exception, request_id: str) -> bytes:
        """What ends a stream that has begun and cannot go on."""

    def whole(self, outputs: list[Delta], usage: Usage) -> dict[str, Any]:
        """The answer that is not streamed."""


async def send_whole(send: Send, generation: Generation, shape: Shape) -> None:
    await send_json(send, shape.whole(await generation.whole(), generation.usage))


async def send_json(send: Send, payload: object) -> None:
    body = encode(payload)
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def send_events(send: Send, generation: Generation, shape: Shape, request_id: str) -> None:
    """Stream. Nothing is sent before the first tokens are here, so that earlier errors get a status of their own;
    a later one is the stream's last event."""
    started = False
    try:
        while deltas := await generation.next():
            events, used = [], generation.usage
            if not started:
                await send({"type": "http.response.start", "status": 200, "headers": EVENT_STREAM})
                started = True
                if shape.counts:
                    shape.count(replace(used, completion_tokens=0))
                events = shape.opening()
            if shape.counts:
                shape.count(used)
            for delta in deltas:
                # a token without text (half a character, say) is an event too: its time is what clients measure
                if delta.text or delta.tokens or delta.prompt_logprobs is not None or delta.finish_reason is not None:
                    events.append(shape.content(delta))
            if events:
                await send({"type": "http.response.body", "body": b"".join(events), "more_body": True})
        end = shape.closing(generation.usage)
    except Exception as error:
        if not started:
            raise
        end = shape.failure(error, request_id)
    await send({"type": "http.response.body", "body": end})
