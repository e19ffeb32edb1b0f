"""What a frontend hands to the HTTP routes: a request's outputs as they grow, and what it used."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.core.request import TokenLogprobs


@dataclass(slots=True)
class Delta:
    """New text of one output.

    Attributes:
        index: which of the request's `n` outputs.
        text: new text, possibly empty (a character may need several tokens; a stop string may be beginning).
        tokens: the new token ids, including those whose text is still held back.
        logprobs: one per token, when asked for.
        finish_reason: "stop", "length" or "abort" on the output's last delta, else None.
        stop_reason: the stop string or stop token id that ended it, or None (also None for the model's own
            end-of-sequence token).
    """

    index: int
    text: str
    tokens: list[int]
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class Usage:
    """Tokens of one request, in all its outputs together."""

    prompt_tokens: int
    cached_tokens: int = 0
    completion_tokens: int = 0
