"""Sampling parameters."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any, Literal

from penstock.core.errors import InvalidRequest
from penstock.core.structured_outputs import StructuredOutputs
from penstock.core.thinking import Thinking

MAX_LOGPROBS = 20
ALL_LOGPROBS = -1  # as many as the vocabulary has
MAX_LOGPROB_TOKENS = 128  # that may be named, as in vLLM
MAX_N = 128
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 1024
MOST_TOKENS = 2**31 - 1  # more than any model takes
MAX_BAD_WORDS = 256
MAX_BAD_WORD_CHARS = 256
SEED_BITS = 63
GREEDY_BELOW = 1e-5
MAX_LENGTH_PENALTY = 16.0


# Fields that a beam search does not support, and fields of beam searches only -> the values that have no effect.
NOT_WITH_BEAMS: dict[str, object] = {
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "logit_bias": {},
    "stop": (),
    "prompt_logprobs": None,
    "logprob_token_ids": None,
}
BEAMS_ONLY: dict[str, object] = {"length_penalty": 1.0, "early_stopping": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are sampled. Raises `InvalidRequest` naming the first wrong field.

    The order is vLLM's: what may not be sampled, `logit_bias`, penalties, temperature, `min_p`, `top_k`, `top_p`, then
    one draw.

    Attributes:
        temperature: 0 (and anything under 1e-5) is greedy; otherwise logits are divided by it. At least 0.
        top_k: keep the k most likely tokens; 0 or -1 keeps all.
        top_p: keep the smallest set of tokens whose probability reaches it; in (0, 1].
        min_p: drop tokens less likely than min_p times the most likely one; in [0, 1].
        presence_penalty, frequency_penalty: subtracted from the logits of tokens already generated, once or per
            occurrence; in [-2, 2].
        repetition_penalty: divides positive and multiplies negative logits of tokens seen in the prompt or the output;
            above 0, 1 is off.
        logit_bias: token id -> a number in [-100, 100] added to its logit.
        stop: the text ends before the first of these strings.
        stop_token_ids: the output ends with the first of these tokens.
        ignore_eos: go on after the model's end-of-sequence token.
        min_tokens: before so many are generated, nothing ends the output: neither an end-of-sequence nor a stop token
            is sampled, and stop strings are passed over. At most `max_tokens`.
        bad_words: the output never completes one of these, as the tokenizer spells them with and without a space in
            front. Another spelling of the same text is not noticed.
        allowed_token_ids: draw from these alone; None is all.
        structured_outputs: what form the output has, also as an object with its fields; None is any. Where that allows
            nothing but an end, the output ends, whatever `ignore_eos` and `min_tokens` say.
        thinking: what may come before the output proper, to which alone `structured_outputs` apply then, and when it
            ends at the latest, also as an object with its fields; None is nothing.
        max_tokens: at most this many generated tokens; None means as many as the model's length allows.
        seed: makes the draw repeatable; None lets the server choose one. In [-2**63, 2**63).
        n: how many independent outputs; output i is sampled with seed + i. Of a beam search: how many beams live at a
            time, and how many of its results are wanted.
        use_beam_search: search for the outputs of the highest score instead of drawing. The score is the sum of the
            log-probabilities divided by length ** length_penalty; the length is that of prompt and output together
            without a stop token. Log-probabilities are the model's own: `temperature`, `top_k`, `top_p`, `min_p` and
            `seed` change nothing.
        length_penalty: 0 compares the sums, above 0 favours longer outputs; in [-16, 16].
        early_stopping: when a beam search ends before `max_tokens`, as soon as n beams have ended: True is at once,
            False once the best live one, as long as it is, scores no better than them, "never" once none can come to.
        logprobs: None, or how many of the most likely tokens to report beside each chosen one; 0 to 20, or -1 for all.
        logprob_token_ids: report these tokens, and the chosen one, instead of the likeliest; only with `logprobs`. At
            least one, and at most 128; None is none.
        prompt_logprobs: the same for every token of the prompt but the first. The prompt is then computed as a whole,
            whatever the prefix cache holds.
        truncate_prompt_tokens: read only so many of the prompt's tokens; -1 is as many as fit beside `max_tokens`,
            None is all.
        truncation_side: what goes then: "left" keeps the last tokens, "right" the first.
        skip_special_tokens: leave special tokens out of the text.
        include_stop_str_in_output: keep the stop string at the end of the text.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    bad_words: tuple[str, ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    structured_outputs: StructuredOutputs | None = None
    thinking: Thinking | None = None
    max_tokens: int | None = 16
    seed: int | None = None
    n: int = 1
    logprobs: int | None = None
    logprob_token_ids: tuple[int, ...] | None = None
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] = "left"
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    use_beam_search: bool = False
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False

    def __post_init__(self) -> None:
        stop = (
            (self.stop,) if isinstance(self.stop, str) else _tuple(self.stop, "stop", "a string or a list of strings")
        )
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", _tuple(self.stop_token_ids, "stop_token_ids", "a list of token ids"))
        object.__setattr__(self, "bad_words", _tuple(self.bad_words, "bad_words", "a list of strings"))
        if self.allowed_token_ids is not None:
            allowed = _tuple(self.allowed_token_ids, "allowed_token_ids", "a list of token ids")
            object.__setattr__(self, "allowed_token_ids", allowed)
        if self.logprob_token_ids is not None:
            named = _tuple(self.logprob_token_ids, "logprob_token_ids", "a list of token ids")
            object.__setattr__(self, "logprob_token_ids", named)
        if self.structured_outputs is not None:
            object.__setattr__(self, "structured_outputs", StructuredOutputs.of(self.structured_outputs))
        if self.thinking is not None:
            object.__setattr__(self, "thinking", Thinking.of(self.thinking))
        object.__setattr__(self, "logit_bias", {} if self.logit_bias is None else self.logit_bias)
        object.__setattr__(self, "top_k", 0 if self.top_k == -1 else self.top_k)
        _number(self, "temperature", 0.0, math.inf)
        _number(self, "top_p", 0.0, 1.0, open_low=True)
        _number(self, "min_p", 0.0, 1.0)
        _number(self, "presence_penalty", -2.0, 2.0)
        _number(self, "frequency_penalty", -2.0, 2.0)
        _number(self, "repetition_penalty", 0.0, math.inf, open_low=True)
        _integer(self, "top_k", 0, None, note="0 or -1 keeps all")
        _integer(self, "n", 1, MAX_N)
        _integer(self, "max_tokens", 1, None, optional=True)
        _integer(self, "min_tokens", 0, MOST_TOKENS)
        _integer(self, "logprobs", ALL_LOGPROBS, MAX_LOGPROBS, optional=True, note="-1 is all of the vocabulary")
        _integer(self, "prompt_logprobs", ALL_LOGPROBS, MAX_LOGPROBS, optional=True, note="-1 is all of the vocabulary")
        _integer(self, "truncate_prompt_tokens", -1, MOST_TOKENS, optional=True, note="-1 keeps what fits")
        _integer(self, "seed", -(2**SEED_BITS), 2**SEED_BITS - 1, optional=True)
        _number(self, "length_penalty", -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY)
        self._check_lengths()
        self._check_stops()
        self._check_words()
        self._check_bias()
        self._check_named()
        self._check_beams()

    def _check_lengths(self) -> None:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"min_tokens: {_short(self.min_tokens)}, allowed is at most max_tokens, which is {self.max_tokens}",
                "min_tokens",
            )
        if self.truncation_side not in ("left", "right"):
            raise InvalidRequest(
                f"truncation_side: {_short(self.truncation_side)}, allowed are 'left' and 'right'", "truncation_side"
            )
        if self.truncate_prompt_tokens == 0:
            raise InvalidRequest(
                "truncate_prompt_tokens: 0, allowed is -1 (what fits) or a whole number at least 1",
                "truncate_prompt_tokens",
            )

    def _check_stops(self) -> None:
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidRequest(f"stop: {len(self.stop)} strings, at most {MAX_STOP_STRINGS} are allowed", "stop")
        for text in self.stop:
            if not isinstance(text, str) or not 1 <= len(text) <= MAX_STOP_STRING_CHARS:
                raise InvalidRequest(
                    f"stop: each must be a string of 1 to {MAX_STOP_STRING_CHARS} characters, got {_short(text)}",
                    "stop",
                )
        _check_ids(self.stop_token_ids, "stop_token_ids")

    def _check_words(self) -> None:
        if len(self.bad_words) > MAX_BAD_WORDS:
            raise InvalidRequest(
                f"bad_words: {len(self.bad_words)} strings, at most {MAX_BAD_WORDS} are allowed", "bad_words"
            )
        for word in self.bad_words:
            if not isinstance(word, str) or not word.strip() or len(word) > MAX_BAD_WORD_CHARS:
                raise InvalidRequest(
                    f"bad_words: each must be a string of 1 to {MAX_BAD_WORD_CHARS} characters, not all of them "
                    f"blank, got {_short(word)}",
                    "bad_words",
                )
        if self.allowed_token_ids is not None:
            _check_ids(self.allowed_token_ids, "allowed_token_ids")
            if not self.allowed_token_ids:
                raise InvalidRequest(
                    "allowed_token_ids: empty, at least one token id is needed, or null for all", "allowed_token_ids"
                )

    def _check_bias(self) -> None:
        if not isinstance(self.logit_bias, Mapping):
            raise InvalidRequest(
                f"logit_bias: {_short(self.logit_bias)}, allowed is a mapping of token ids to numbers", "logit_bias"
            )
        for token, bias in self.logit_bias.items():
            if type(token) is not int or token < 0:
                raise InvalidRequest(f"logit_bias: {_short(token)} is not a token id", "logit_bias")
            if type(bias) not in (int, float) or not -100 <= bias <= 100:
                raise InvalidRequest(
                    f"logit_bias: {_short(bias)} for token {token}, allowed is a number from -100 to 100", "logit_bias"
                )

    def _check_named(self) -> None:
        name, tokens = "logprob_token_ids", self.logprob_token_ids
        if tokens is None:
            return
        _check_ids(tokens, name)
        if not 1 <= len(tokens) <= MAX_LOGPROB_TOKENS:
            raise InvalidRequest(f"{name}: {len(tokens)} token ids, allowed are 1 to {MAX_LOGPROB_TOKENS}", name)
        if self.logprobs is None:
            raise InvalidRequest(f"{name}: given, allowed only with logprobs", name)

    def _check_beams(self) -> None:
        if type(self.use_beam_search) is not bool:
            raise InvalidRequest(
                f"use_beam_search: {_short(self.use_beam_search)}, allowed is true or false", "use_beam_search"
            )
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise InvalidRequest(
                f'early_stopping: {_short(self.early_stopping)}, allowed is true, false or "never"', "early_stopping"
            )
        if not self.use_beam_search:
            for name, unused in BEAMS_ONLY.items():
                if getattr(self, name) != unused:
                    raise InvalidRequest(
                        f"{name}: {_short(getattr(self, name))}, allowed only with use_beam_search: true", name
                    )
            return
        for name, unused in NOT_WITH_BEAMS.items():
            value = getattr(self, name)
            if value != unused:
                raise InvalidRequest(f"{name}: {_short(value)}, allowed only without use_beam_search: true", name)
        if self.logprobs == ALL_LOGPROBS:
            raise InvalidRequest("logprobs: -1, allowed with use_beam_search: true is 0 to 20", "logprobs")

    @property
    def greedy(self) -> bool:
        """Also where dividing by the temperature would leave float32's range, and with it the order of the logits."""
        return self.temperature < GREEDY_BELOW


def _check_ids(tokens: tuple[Any, ...], name: str) -> None:
    if tokens and set(map(type, tokens)) == {int} and min(tokens) >= 0:
        return  # there may be as many as a vocabulary has
    for token in tokens:
        if type(token) is not int or token < 0:
            raise InvalidRequest(f"{name}: {_short(token)} is not a token id", name)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _tuple(value: Any, name: str, allowed: str) -> tuple[Any, ...]:
    if value is None:
        return ()
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise InvalidRequest(f"{name}: {_short(value)}, allowed is {allowed}", name)
    return tuple(value)


def _number(params: SamplingParams, name: str, low: float, high: float, open_low: bool = False) -> None:
    given = getattr(params, name)
    try:
        value = float(given) if isinstance(given, Real) and not isinstance(given, bool) else math.nan
    except OverflowError:
        value = math.nan
    if not (math.isfinite(value) and low <= value <= high) or (open_low and value == low):
        start = f"above {low:g}" if open_low else f"at least {low:g}"
        end = "" if math.isinf(high) else f" and at most {high:g}"
        raise InvalidRequest(f"{name}: {_short(given)}, allowed is a number {start}{end}", name)
    object.__setattr__(params, name, value)


def _integer(
    params: SamplingParams, name: str, low: int, high: int | None, optional: bool = False, note: str = ""
) -> None:
    given = getattr(params, name)
    if given is None and optional:
        return
    whole = isinstance(given, Integral) and not isinstance(given, bool)
    if not whole or given < low or (high is not None and given > high):
        allowed = f"at least {low}" if high is None else f"from {low} to {high}"
        raise InvalidRequest(
            f"{name}: {_short(given)}, allowed is a whole number {allowed}{f' ({note})' if note else ''}", name
        )
    object.__setattr__(params, name, int(given))
