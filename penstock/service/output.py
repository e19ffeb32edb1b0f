"""A request's outputs as they grow: an engine's tokens in, text out, ended by stop strings."""

from __future__ import annotations

from dataclasses import dataclass, replace

from penstock.core.request import FinishReason, TokenLogprobs, TokenOutput
from penstock.core.sampling import SamplingParams
from penstock.text.detokenizer import IncrementalDetokenizer
from penstock.text.tokenizer import Tokenizer


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
    """

    index: int
    text: str
    tokens: list[int]
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None


@dataclass(slots=True)
class Usage:
    """Tokens of one request, in all its outputs together."""

    prompt_tokens: int
    cached_tokens: int = 0
    completion_tokens: int = 0


def merge(deltas: list[Delta]) -> list[Delta]:
    """One delta per output, in the order of their first ones."""
    if len(deltas) == 1:
        return deltas
    by_output: dict[int, list[Delta]] = {}
    for delta in deltas:
        by_output.setdefault(delta.index, []).append(delta)
    return [_joined(parts) for parts in by_output.values()]


def _joined(parts: list[Delta]) -> Delta:
    last = parts[-1]
    wants_logprobs = any(part.logprobs is not None for part in parts)
    return Delta(
        index=last.index,
        text="".join(part.text for part in parts),
        tokens=[token for part in parts for token in part.tokens],
        logprobs=[entry for part in parts for entry in part.logprobs or ()] if wants_logprobs else None,
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        prompt_logprobs=next((part.prompt_logprobs for part in parts if part.prompt_logprobs is not None), None),
    )


def outputs_of(index: int, output: TokenOutput) -> list[tuple[int, TokenOutput]]:
    """What a step brought a sequence, as outputs of its request: its own, number `index`, or all those of a beam
    search, whose results come at once."""
    if output.hypotheses is None:
        return [(index, output)]
    return [
        (i, replace(output, tokens=h.tokens, logprobs=h.logprobs, finish=h.finish, stop_token=h.stop_token))
        for i, h in enumerate(output.hypotheses)
    ]


class OutputStream:
    """One output of a request on its way from tokens to text.

    Attributes:
        finished: no more deltas will come.
    """

    def __init__(self, index: int, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self.finished = False
        self._index = index
        self._params = params
        self._detokenizer = IncrementalDetokenizer(tokenizer, params)

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
        )
        if self._detokenizer.stop_match is not None:
            delta.finish_reason, delta.stop_reason = FinishReason.STOP.value, self._detokenizer.stop_match
        elif output.finish is not None:
            delta.finish_reason = output.finish.value
            if output.stop_token in self._params.stop_token_ids:
                delta.stop_reason = output.stop_token
        self.finished = delta.finish_reason is not None
        return delta
