"""One output's text, from its tokens."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.core.sampling import SamplingParams
from penstock.text.detokenizer import IncrementalDetokenizer
from penstock.text.stop import StopStrings
from penstock.text.tokenizer import Tokenizer


class TextAssembler:
    """Detokenizer and stop strings in a row.

    Attributes:
        consumed: tokens that were used, up to and including the one that completed a stop string.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self.consumed = 0
        self._detokenizer = IncrementalDetokenizer(tokenizer, params.skip_special_tokens)
        self._stops = StopStrings(params.stop, params.include_stop_str_in_output) if params.stop else None
        self._min_tokens = params.min_tokens
        self._shows_stop_token = params.include_stop_str_in_output
        self._shown: list[str] = []

    @property
    def text(self) -> str:
        """Everything returned so far."""
        return "".join(self._shown)

    @property
    def stop_match(self) -> str | None:
        """The stop string that ended the text, or None."""
        return self._stops.matched if self._stops else None

    def push(self, tokens: Sequence[int], *, last: bool = False, stop_token: int | None = None) -> str:
        """New text, possibly none. Once `stop_match` is set the output is over and further tokens are left alone.

        Args:
            tokens: the next of the output.
            last: no more will come, so that nothing is held back any longer.
            stop_token: equal to tokens[-1] if the output ends because of it, which leaves it out of the text unless
                `include_stop_str_in_output`. Only with `last`.
        """
        assert stop_token is None or (last and tokens and tokens[-1] == stop_token), "a stop token that is not the last"
        unseen = len(tokens) - 1 if stop_token is not None and not self._shows_stop_token else len(tokens)
        parts: list[str] = []
        for i, token in enumerate(tokens):
            if self.stop_match is not None:
                break
            self.consumed += 1
            if i < unseen:
                parts.append(self._cut(self._detokenizer.push(token)))
        if last and self.stop_match is None:
            parts.append(self._cut(self._detokenizer.flush()))
            if self._stops is not None:
                parts.append(self._stops.flush())
        text = "".join(parts)
        self._shown.append(text)
        return text

    def _cut(self, text: str) -> str:
        if self._stops is None or not text:
            return text
        return self._stops.push(text, may_end=self.consumed > self._min_tokens)
