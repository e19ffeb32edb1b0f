"""What OpenAI's routes have in common: the envelope of choices, usage, errors in a stream, and its end."""

from __future__ import annotations

from typing import Any

from penstock.api.errors import error_row
from penstock.api.sse import encode
from penstock.service.generation import Usage

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

    def closing(self, usage: Usage, reasoning: int | None = None) -> bytes:
        """
        Args:
            reasoning: see `usage_body`.
        """
        if not self._include_usage:
            return DONE
        return self._head + b'],"usage":' + encode(usage_body(usage, reasoning)) + b"}\n\n" + DONE

    def failure(self, error: Exception, request_id: str) -> bytes:
        return b"data: " + encode(error_row(error, request_id)[1]) + b"\n\n"


def usage_body(usage: Usage, reasoning: int | None = None) -> dict[str, Any]:
    """
    Args:
        reasoning: tokens of what the model thought; None where nothing tells them from others.
    """
    body: dict[str, Any] = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
    if reasoning is not None:
        body["completion_tokens_details"] = {"reasoning_tokens": reasoning}
    return body
