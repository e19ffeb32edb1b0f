"""Requests to an engine, and their outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from penstock.core.sampling import SamplingParams

Pooling = Literal["last", "mean"]  # which of a prompt's hidden states become its embedding


class FinishReason(StrEnum):
    STOP = "stop"  # an end-of-sequence or stop token, or a stop string; or the prompt is embedded
    LENGTH = "length"  # max_tokens, or the model's length
    ABORT = "abort"  # cancelled; or lost with a hand-off, so that it can continue elsewhere
    ERROR = "error"  # it cannot go on, here or elsewhere: the model computed infinities or NaNs, or a grammar is stuck


MediaKind = Literal["image", "video"]


@dataclass(frozen=True, slots=True)
class MediaSpan:
    """Tokens of a prompt that stand for an image or a video: [start, start + length). Its pixels travel beside it
    (`Request.pixels`), or what the model makes of them.

    Attributes:
        digest: of its content, and of whatever decides what the model makes of it.
        grid: frames, rows and columns of its tokens, where these are one after the other.
        interval: between two frames in time, as positions of a rotation that knows of time count it.
        shape: frames, height and width of its pixels.
        source: height and width of the image that these were made of, where the model wants to know.
        embedded: another engine has looked at it: in place of its pixels there are the bytes of its embeddings,
            [length, hidden] in the model's dtype.
    """

    start: int
    length: int
    digest: bytes
    kind: MediaKind = "image"
    grid: tuple[int, int, int] = (1, 1, 1)
    interval: float = 1.0
    shape: tuple[int, int, int] = (1, 1, 1)
    source: tuple[int, int] = (0, 0)
    embedded: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One sequence to generate, one beam search, or one prompt to embed: tokenised, and checked against the model's
    limits.

    Attributes:
        id: unique among the requests an engine holds.
        prompt: token ids, at least one.
        params: of which the engine reads what concerns sampling and log-probabilities; the rest is resolved below or is
            the frontend's business.
        seed: of this sequence's noise, in [-2**63, 2**63). A draw is a function of (seed, position, token).
        stop_ids: tokens that end the output (the model's own unless `ignore_eos`, and `stop_token_ids`).
        max_tokens: generated tokens at most, at least 1; already cut to the model's length. 0 with `pooling`.
        priority: lower runs first.
        ttft_ms, tpot_ms: latency targets: time to first token, and mean time per token after it; None without a target.
        waited: seconds of the first that had passed when it was sent to the engine.
        offline: it has no targets, and uses the capacity that other requests leave.
        generated: tokens of its output that were sampled already, where it ran before; fewer than `max_tokens`. It goes
            on after them as if it had never been interrupted.
        bad_words: token sequences, none of them empty, that the output never completes.
        cache_salt: cached prefixes are shared among requests with the same one.
        prediction: tokens that much of the output is expected to repeat; it may be the sooner for it, and is the same.
        pooling: nothing is generated: the request ends with the embedding of its prompt. None generates.
        media: of the prompt, in order, none of which overlap.
        pixels: of each of `media`, RGB in bytes, [frames, height, width, 3]; those that are the same are one object.
        alone: as long as its output has fewer tokens than this, its steps compute nothing else, because it may have
            broken an engine. A beam search that is to run alone at all does so to its end.
    """

    id: str
    prompt: Sequence[int]
    params: SamplingParams
    seed: int
    stop_ids: frozenset[int]
    max_tokens: int
    priority: int = 0
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    waited: float = 0.0
    offline: bool = False
    generated: Sequence[int] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    cache_salt: str = ""
    prediction: Sequence[int] = ()
    pooling: Pooling | None = None
    media: tuple[MediaSpan, ...] = ()
    pixels: tuple[bytes, ...] = ()
    alone: int = 0

    @property
    def reads_all(self) -> bool:
        """Whether every position of the prompt is to be computed, whatever the prefix cache holds."""
        return self.pooling == "mean" or (self.params.prompt_logprobs is not None and not self.generated)

    @property
    def context(self) -> Sequence[int]:
        """All that prefill computes before the next token is sampled: the prompt, and what was generated elsewhere."""
        return [*self.prompt, *self.generated] if self.generated else self.prompt


@dataclass(slots=True)
class TokenLogprobs:
    """Log-probabilities of one position, from the model's raw logits (before temperature and penalties).

    Attributes:
        chosen: of the token sampled, or of the prompt's own.
        rank: of that token; 1 is the most likely.
        top: (token, log-probability), most likely first, as many as were asked for.
    """

    chosen: float
    rank: int
    top: list[tuple[int, float]]


@dataclass(slots=True)
class Hypothesis:
    """One result of a beam search.

    Attributes:
        tokens: all of its output.
        logprobs: one per token, when asked for.
        finish: `STOP` or `LENGTH`.
        stop_token: the last of `tokens`, when `finish` is `STOP`.
        cumulative_logprob: of all its tokens.
    """

    tokens: list[int]
    logprobs: list[TokenLogprobs] | None
    finish: FinishReason
    stop_token: int | None
    cumulative_logprob: float


@dataclass(slots=True)
class ImagesSeen:
    """What became of a prompt's images and videos until its first token.

    Attributes:
        count: of them.
        cached: those of which the prefix cache had all tokens.
        looked: those that were looked at where it was prefilled; `brought`: whose embeddings other instances brought.
            The others' embeddings were there.
        encoding: seconds that looking at them took, where it is known, at whichever instance.
        waited: seconds for which the prompt waited for them and could do nothing else.
    """

    count: int
    cached: int = 0
    looked: int = 0
    brought: int = 0
    encoding: float = 0.0
    waited: float = 0.0

    @property
    def found(self) -> int:
        """Those whose embeddings were there."""
        return max(0, self.count - self.cached - self.looked - self.brought)


@dataclass(slots=True)
class Timing:
    """A finished sequence's time in seconds, by phase, as measured by the engine."""

    queue: float  # from arrival to its first step
    prefill: float  # from its first step to its first token
    decode: float  # from its first token to its last
    wait: str = ""  # what the time before the first token went by, in words
    preemptions: int = 0  # how often it lost its KV cache to others there
    images: ImagesSeen | None = None  # where its prompt has any


@dataclass(slots=True)
class TokenOutput:
    """One step's output for one sequence.

    Attributes:
        request_id: whose.
        tokens: new tokens, possibly none when the sequence was cancelled.
        logprobs: one per token, when asked for.
        finish: why it ended, or None while it goes on.
        stop_token: the token that ended it, when `finish` is `STOP`.
        cached_tokens: tokens that came from the prefix cache, of the first admission: of the prompt, and of what was
            generated elsewhere.
        timing: only with `finish`; None for what was interrupted, which no engine saw as a whole.
        start: how many tokens the output had before these.
        generation: which attempt to run the request this comes from.
        prompt_logprobs: with the first token, when asked for: one for every token of the prompt but the first.
        error: why it cannot go on, when `finish` is `ERROR`.
        hypotheses: with `finish`, of a beam search: all its results, the best first. It brings no tokens besides, but
            says with none at all that its prefill is over.
        embedding: with `finish`, where there is `pooling`: [hidden], neither cut nor normalised. It brings no tokens.
    """

    request_id: str
    tokens: list[int]
    logprobs: list[TokenLogprobs] | None = None
    finish: FinishReason | None = None
    stop_token: int | None = None
    cached_tokens: int = 0
    timing: Timing | None = None
    start: int = 0
    generation: int = 0
    prompt_logprobs: list[TokenLogprobs] | None = None
    hypotheses: list[Hypothesis] | None = None
    embedding: list[float] | None = None
    error: str = ""
