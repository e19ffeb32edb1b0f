"""Tokens to text as they come."""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.text.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """Takes tokens one at a time; the texts it returns, put together, are exactly `tokenizer.decode` of all of them.

    Text is returned as soon as no later token can change it: at once, except that a character waits for its last byte,
    and a run of byte tokens (`<0xE4>`) for the token after it (see `pieces`). Constant work per token.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._pieces = tokenizer.pieces
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")  # byte level only
        self._run: list[str] = []  # byte tokens whose text is not known yet
        self._start: list[str] | None = []  # pieces so far, until the first that shows; then None

    def push(self, token: int) -> str:
        """The text that is certain now and was not before."""
        if token in self._skipped:
            return ""
        if self._pieces.byte_level:
            return self._utf8.decode(self._pieces.spelled(token))
        piece = self._pieces.piece(token)
        if piece is None:
            return ""
        if token in self._pieces.byte_ids:
            self._run.append(piece)
            return ""
        return self.flush() + self._unit([piece])

    def flush(self) -> str:
        """What was still held back, at the end of the text."""
        if self._pieces.byte_level:
            return self._utf8.decode(b"", final=True)
        run, self._run = self._run, []
        return self._unit(run) if run else ""

    def _unit(self, pieces: list[str]) -> str:
        if self._start is None:
            return self._pieces.decode_within(pieces)
        self._start += pieces
        text = self._pieces.decode(self._start)
        if text:
            self._start = None
        return text
