"""Log-probabilities in the two shapes that OpenAI gave them."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from penstock.core.request import TokenLogprobs
from penstock.service.request_record import LOWEST
from penstock.text.detokenizer import Delta

if TYPE_CHECKING:
    from penstock.text.tokenizer import Tokenizer


def token_names(tokenizer: Tokenizer, by_id: bool | None) -> Callable[[int], str]:
    """What tokens are called: by their text, or, as vLLM does, by their ids."""
    return "token_id:{}".format if by_id else tokenizer.token_text


def chat_logprobs(
    tokenizer: Tokenizer, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs], by_id: bool | None = None
) -> dict[str, Any]:
    """`logprobs` of a chat choice."""
    name = token_names(tokenizer, by_id)

    def entry(token: int, logprob: float) -> dict[str, Any]:
        data = tokenizer.token_bytes(token)
        return {"token": name(token), "logprob": max(logprob, LOWEST), "bytes": list(data)}

    return {
        "content": [
            entry(token, found.chosen) | {"top_logprobs": [entry(other, logprob) for other, logprob in found.top]}
            for token, found in zip(tokens, logprobs, strict=True)
        ]
    }


def prompt_logprobs(
    tokenizer: Tokenizer, prompt: Sequence[int], found: Sequence[TokenLogprobs]
) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: for each of the prompt's tokens, by token id, the likeliest ones and the token itself;
    null for the first."""

    def entry(token: int, logprob: float, rank: int) -> dict[str, Any]:
        return {"logprob": max(logprob, LOWEST), "rank": rank, "decoded_token": tokenizer.token_text(token)}

    entries: list[dict[str, Any] | None] = [None]
    for token, report in zip(prompt[1:], found, strict=True):
        of_token = {str(token): entry(token, report.chosen, report.rank)}
        tops = enumerate(report.top, start=1)
        entries.append(of_token | {str(other): entry(other, logprob, rank) for rank, (other, logprob) in tops})
    return entries


class CompletionLogprobs:
    """`logprobs` of one completion choice, piece by piece: where a token's text begins depends on those before it.

    Args:
        skip_special_tokens: whether special tokens are absent from the text.
        by_id: see `token_names`.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool, by_id: bool | None = None) -> None:
        self._tokenizer = tokenizer
        self._name = token_names(tokenizer, by_id)
        self._silent = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0  # in characters

    def piece(
        self, delta: Delta, logprobs: Sequence[TokenLogprobs], prompt: Sequence[int] = (), echo: str = ""
    ) -> dict[str, Any]:
        """
        Args:
            logprobs: of the delta's tokens.
            prompt, echo: the prompt's tokens and text, with an output's first delta when both come before it.
        """
        before: list[TokenLogprobs | None] = [None, *(delta.prompt_logprobs or ())] if prompt else []
        pairs = list(zip([*prompt, *delta.tokens], [*before, *logprobs], strict=True))
        starts = [self._start_in(echo, token) for token in prompt]
        if prompt:
            self._decoder.reset()
            self._offset = len(echo)
        return {
            "tokens": [self._name(token) for token, _ in pairs],
            "token_logprobs": [None if found is None else max(found.chosen, LOWEST) for _, found in pairs],
            "top_logprobs": [None if found is None else self._likeliest(token, found) for token, found in pairs],
            "text_offset": starts + [self._start_of(token) for token in delta.tokens],
        }

    def _likeliest(self, token: int, found: TokenLogprobs) -> dict[str, float]:
        # the likeliest first, and of two tokens with one text the likelier; the chosen one is always there
        return {
            self._name(other): max(logprob, LOWEST) for other, logprob in reversed([*found.top, (token, found.chosen)])
        }

    def _start_in(self, echo: str, token: int) -> int:
        """The same in the prompt's text, where special tokens show when they were written out."""
        special = token in self._tokenizer.special_ids
        if special and not echo.startswith(self._tokenizer.token_text(token), self._offset):
            return self._offset
        start = self._offset
        self._offset += len(self._decoder.decode(self._tokenizer.token_bytes(token)))
        return start

    def _start_of(self, token: int) -> int:
        start = self._offset
        if token not in self._silent:
            self._offset += len(self._decoder.decode(self._tokenizer.token_bytes(token)))
        return start
