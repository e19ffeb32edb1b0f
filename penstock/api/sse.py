"""Answers of the routes that generate: whole, or as server-sent events."""

from __future__ import annotations

from typing import Any, Protocol

import msgspec
from starlette.types import Send

from penstock.api.errors import error_row
from penstock.service.generation import Generation, Usage
from penstock.text.detokenizer import Delta

DONE = b"data: [DONE]\n\n"
EVENT_STREAM = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies must not hold tokens back
]

encode = msgspec.json.Encoder().encode


class Shape(Protocol):
    """How a route presents outputs."""

    shows_tokens: bool  # whether the last token is worth an event although it has no text
    counts: bool  # whether its events say how much was used so far

    def count(self, usage: Usage) -> None:
        """Events from here on say that so much was used; only with `counts`."""

    def opening(self) -> list[bytes]:
        """Events that come before anything else."""

    def content(self, delta: Delta) -> bytes:
        """The event of new text or tokens."""

    def finish(self, delta: Delta) -> bytes:
        """The event of an output's end."""

    def closing(self, usage: Usage) -> bytes:
        """Events that come after everything else, `[DONE]` aside."""

    def whole(self, outputs: list[Delta], usage: Usage) -> dict[str, Any]:
        """The answer that is not streamed."""


class Envelope:
    """What all events of one stream have in common, encoded once.

    Args:
        head: id, object, created and model.
        include_usage: whether usage comes at the end; OpenAI's other events then have a null there.
    """

    def __init__(self, head: dict[str, Any], include_usage: bool) -> None:
        self._head = b"data: " + encode(head)[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"
        self._include_usage = include_usage

    def count(self, usage: Usage) -> None:
        """Events from here on have this usage."""
        self._tail = b'],"usage":' + encode(usage_body(usage)) + b"}\n\n"

    def event(self, choice: dict[str, Any], beside: dict[str, Any] | None = None) -> bytes:
        """
        Args:
            beside: fields that this event alone has beside its choices.
        """
        if beside:
            return self._head + encode(choice) + b"]," + encode(beside)[1:-1] + self._tail[1:]
        return self._head + encode(choice) + self._tail

    def closing(self, usage: Usage) -> bytes:
        return self._head + b'],"usage":' + encode(usage_body(usage)) + b"}\n\n" if self._include_usage else b""


def usage_body(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


async def send_whole(send: Send, generation: Generation, shape: Shape) -> None:
    body = encode(shape.whole(await generation.whole(), generation.usage))
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def send_events(send: Send, generation: Generation, shape: Shape, request_id: str) -> None:
    """Stream. Nothing is sent before the first tokens are here, so that earlier errors get a status of their own;
    a later one is the stream's last event."""
    started = False
    try:
        while deltas := await generation.next():
            events = []
            if shape.counts:
                shape.count(generation.usage)
            if not started:
                await send({"type": "http.response.start", "status": 200, "headers": EVENT_STREAM})
                started = True
                events = shape.opening()
            for delta in deltas:
                # a token without text (half a character, say) is an event too: its time is what clients measure
                shown = delta.text or (delta.tokens and (shape.shows_tokens or delta.finish_reason is None))
                if shown or delta.prompt_logprobs is not None:
                    events.append(shape.content(delta))
                if delta.finish_reason is not None:
                    events.append(shape.finish(delta))
            if events:
                await send({"type": "http.response.body", "body": b"".join(events), "more_body": True})
        end = shape.closing(generation.usage) + DONE
    except Exception as error:
        if not started:
            raise
        end = b"data: " + encode(error_row(error, request_id)[1]) + b"\n\n"
    await send({"type": "http.response.body", "body": end})
