"""Token ids to text, incrementally, as an output grows, until a stop string or the engine ends it."""

from __future__ import annotations

import codecs
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace

from penstock.core.request import FinishReason, TokenLogprobs, TokenOutput
from penstock.core.sampling import SamplingParams
from penstock.text.stop import StopStrings
from penstock.text.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """One output's text, from its tokens as they are sampled, ended by stop strings.

    Args:
        shown: special tokens that are part of the text all the same.

    Attributes:
        consumed: tokens that were used, up to and including the one that completed a stop string.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, shown: frozenset[int] = frozenset()) -> None:
        self.consumed = 0
        self._stream = DecodeStream(tokenizer, params.skip_special_tokens, shown)
        self._stops = StopStrings(params.stop, params.include_stop_str_in_output) if params.stop else None
        self._min_tokens = params.min_tokens
        self._shows_stop_token = params.include_stop_str_in_output

    @property
    def stop_match(self) -> str | None:
        """The stop string that ended the text, or None."""
        return self._stops.matched if self._stops else None

    def push(self, tokens: Sequence[int], *, last: bool = False, stop_token: int | None = None) -> str:
        """New text, possibly none. Once `stop_match` is set the output is over and further tokens are ignored.

        Args:
            tokens: the next of the output.
            last: no more tokens will come; text that was held back is returned.
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
                parts.append(self._cut(self._stream.push(token)))
        if last and self.stop_match is None:
            parts.append(self._cut(self._stream.flush()))
            if self._stops is not None:
                parts.append(self._stops.flush())
        return "".join(parts)

    def _cut(self, text: str) -> str:
        if self._stops is None or not text:
            return text
        return self._stops.push(text, may_end=self.consumed > self._min_tokens)


class DecodeStream:
    """Takes tokens one at a time; the texts it returns, put together, are exactly `tokenizer.decode` of all of them.

    Text is returned as soon as no later token can change it: at once, except that a character waits for its last byte,
    and a run of byte tokens (`<0xE4>`) for the token after it (see `Vocabulary`). Constant work per token.

    Args:
        shown: special tokens that are not skipped.
    """

    def __init__(
        self, tokenizer: Tokenizer, skip_special_tokens: bool = True, shown: frozenset[int] = frozenset()
    ) -> None:
        self._vocabulary = tokenizer.vocabulary
        self._known = tokenizer.vocabulary.known_bytes
        self._skipped = tokenizer.special_ids - shown if skip_special_tokens else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")  # byte level only
        self._run: list[str] = []  # byte tokens whose text is not known yet
        self._start: list[str] | None = []  # pieces so far, until the first that shows; then None

    def push(self, token: int) -> str:
        """The text that this token makes certain, possibly none."""
        if token in self._skipped:
            return ""
        if self._vocabulary.byte_level:
            spelled = self._known.get(token)
            return self._utf8.decode(self._vocabulary.token_bytes(token) if spelled is None else spelled)
        piece = self._vocabulary.piece(token)
        if piece is None:
            return ""
        if token in self._vocabulary.byte_ids:
            self._run.append(piece)
            return ""
        return self.flush() + self._unit([piece])

    def flush(self) -> str:
        """The text still held back, when no more tokens come."""
        if self._vocabulary.byte_level:
            return self._utf8.decode(b"", final=True)
        run, self._run = self._run, []
        return self._unit(run) if run else ""

    def _unit(self, pieces: list[str]) -> str:
        if self._start is None:
            return self._vocabulary.decode_within(pieces)
        self._start += pieces
        text = self._vocabulary.decode(self._start)
        if text:
            self._start = None
        return text


@dataclass(slots=True)
class Delta:
    """New text of one output.

    Attributes:
        index: which of the request's `n` outputs.
        text: new text, possibly empty (a character may need several tokens; a stop string may be beginning).
        tokens: the new token ids, including those whose text is still held back.
        logprobs: one per token, when asked for.
        prompt_logprobs: with the first token, when asked for: one for every token of the prompt but the first.
        finish_reason: "stop", "length" or "abort" on the output's last delta, else None.
        stop_reason: the stop string or stop token id that ended it, or None (also None for the model's own
            end-of-sequence token).
        embedding: of the prompt, where that is what was asked for: [hidden], neither cut nor normalised. Packed, since
            a list of prompts waits for its last one.
    """

    index: int
    text: str
    tokens: list[int]
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    embedding: array[float] | None = None


def outputs_of(index: int, output: TokenOutput) -> list[tuple[int, TokenOutput]]:
    """What a step brought a sequence, as outputs of its request: its own, number `index`, or from there on all
    those of a beam search, whose results come at once."""
    if output.hypotheses is None:
        return [(index, output)]
    return [
        (index + i, replace(output, tokens=h.tokens, logprobs=h.logprobs, finish=h.finish, stop_token=h.stop_token))
        for i, h in enumerate(output.hypotheses)
    ]


class OutputStream:
    """One output of a request on its way from tokens to text.

    Args:
        shown: special tokens that are part of it all the same.

    Attributes:
        finished: no more deltas will come.
    """

    def __init__(
        self, index: int, tokenizer: Tokenizer, params: SamplingParams, shown: frozenset[int] = frozenset()
    ) -> None:
        self.finished = False
        self._index = index
        self._params = params
        self._detokenizer = IncrementalDetokenizer(tokenizer, params, shown)

    @property
    def length(self) -> int:
        """Tokens so far."""
        return self._detokenizer.consumed

    def feed(self, output: TokenOutput) -> Delta:
        """What an engine step brought this output. When a stop string ends it, the engine does not know yet:
        `finished` is True where `output.finish` is None, and the engine's sequence is to be cancelled."""
        before = self._detokenizer.consumed
        last = output.finish is not None
        text = self._detokenizer.push(output.tokens, last=last, stop_token=output.stop_token)
        count = self._detokenizer.consumed - before
        delta = Delta(
            self._index,
            text,
            output.tokens[:count],
            None if output.logprobs is None else output.logprobs[:count],
            prompt_logprobs=output.prompt_logprobs,
            embedding=None if output.embedding is None else array("d", output.embedding),
        )
        if self._detokenizer.stop_match is not None:
            delta.finish_reason, delta.stop_reason = FinishReason.STOP.value, self._detokenizer.stop_match
        elif output.finish is not None:
            delta.finish_reason = output.finish.value
            if output.stop_token in self._params.stop_token_ids:
                delta.stop_reason = output.stop_token
        self.finished = delta.finish_reason is not None
        return delta
