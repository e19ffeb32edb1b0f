"""Log-probabilities in the two shapes that OpenAI gave them."""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING, Any

from penstock.service.output import Delta

if TYPE_CHECKING:
    from penstock.text.tokenizer import Tokenizer

LOWEST = -9999.0  # stands for minus infinity, which JSON has not


def chat_logprobs(tokenizer: Tokenizer, delta: Delta) -> dict[str, Any] | None:
    """`logprobs` of a chat choice."""
    if delta.logprobs is None:
        return None

    def entry(token: int, logprob: float) -> dict[str, Any]:
        data = tokenizer.token_bytes(token)
        return {"token": tokenizer.token_text(token), "logprob": max(logprob, LOWEST), "bytes": list(data)}

    return {
        "content": [
            entry(token, found.chosen) | {"top_logprobs": [entry(other, logprob) for other, logprob in found.top]}
            for token, found in zip(delta.tokens, delta.logprobs, strict=True)
        ]
    }


class CompletionLogprobs:
    """`logprobs` of one completion choice, piece by piece: where a token's text begins depends on those before it.

    Args:
        skip_special_tokens: whether special tokens are absent from the text.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._silent = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0  # in characters

    def piece(self, delta: Delta) -> dict[str, Any] | None:
        if delta.logprobs is None:
            return None
        text = self._tokenizer.token_text
        pairs = list(zip(delta.tokens, delta.logprobs, strict=True))
        return {
            "tokens": [text(token) for token, _ in pairs],
            "token_logprobs": [max(found.chosen, LOWEST) for _, found in pairs],
            "top_logprobs": [
                # the likeliest first, and of two tokens with one text the likelier; the chosen one is always there
                {text(other): max(logprob, LOWEST) for other, logprob in reversed([*found.top, (token, found.chosen)])}
                for token, found in pairs
            ],
            "text_offset": [self._start_of(token) for token, _ in pairs],
        }

    def _start_of(self, token: int) -> int:
        start = self._offset
        if token not in self._silent:
            self._offset += len(self._decoder.decode(self._tokenizer.token_bytes(token)))
        return start
