"""What OpenAI's routes have in common: the envelope of choices, usage, errors in a stream, and its end."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from penstock.api.errors import error_row
from penstock.api.schema import GenerationBody
from penstock.api.sse import encode
from penstock.service.generation import Usage

if TYPE_CHECKING:
    from penstock.service.frontend import Frontend

DONE = b"data: [DONE]\n\n"


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

    def closing(self, last: dict[str, Any]) -> bytes:
        """
        Args:
            last: what the last event has beside choices, of which there are none: usage, and perhaps more.
        """
        if not self._include_usage:
            return DONE
        return self._head + b"]," + encode(last)[1:] + b"\n\n" + DONE

    def failure(self, error: Exception, request_id: str) -> bytes:
        return b"data: " + encode(error_row(error, request_id)[1]) + b"\n\n"


def head(identity: str, kind: str, model: str, body: GenerationBody) -> dict[str, Any]:
    """What an answer and all of its events begin with."""
    tier = {} if body.service_tier is None else {"service_tier": body.served_tier}
    return {"id": identity, "object": kind, "created": int(time.time()), "model": model, **tier}


def beside(frontend: Frontend, body: GenerationBody) -> dict[str, Any]:
    """What a whole answer has beside its choices, as vLLM has it, and their log-probabilities."""
    return {
        "service_tier": body.served_tier,
        "system_fingerprint": frontend.fingerprint,
        "kv_transfer_params": None,
    }


def timing_body(usage: Usage) -> dict[str, Any]:
    """vLLM's `metrics` of a request: milliseconds, what is not known left out."""
    tokens, decode = usage.completion_tokens, usage.decode
    found = {
        "time_to_first_token_ms": usage.first,
        "generation_time_ms": decode,
        "queue_time_ms": usage.queue,
        "mean_itl_ms": None if decode is None or tokens < 2 else decode / (tokens - 1),
    }
    body = {name: seconds * 1e3 for name, seconds in found.items() if seconds is not None}
    if usage.first is not None and tokens:
        body["tokens_per_second"] = tokens / max(usage.first + (decode or 0.0), 1e-9)
    return {"metrics": body}


def usage_body(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
