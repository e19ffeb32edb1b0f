"""A user's request to sequences, one per output: checks it against the model and resolves seeds."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from penstock.core.errors import InvalidRequest, PromptTooLong
from penstock.core.request import Pooling, Request
from penstock.core.sampling import ALL_LOGPROBS, SEED_BITS, SamplingParams
from penstock.core.service_level import NO_LEVEL, ServiceLevel
from penstock.sched.local.beams import check_length, check_width, most_beam_tokens

MAX_SALT_BYTES = 1024
MOST_NAMED = 1 << 18  # tokens in the log-probabilities of a request for all of them: tens of megabytes, 1 s of work


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """
    Attributes:
        max_model_len: prompt and output tokens of one sequence together.
        vocab_size: token ids are below it.
        eos_ids: tokens that end an output unless `ignore_eos`.
        max_sequences: that run at once.
        search_blocks: of KV for a beam search.
    """

    max_model_len: int
    vocab_size: int
    eos_ids: frozenset[int]
    max_sequences: int
    search_blocks: int


def make_sequences(
    request_id: str,
    prompt: Sequence[int],
    params: SamplingParams,
    limits: ModelLimits,
    rng: random.Random,
    level: ServiceLevel = NO_LEVEL,
    *,
    bad_words: tuple[tuple[int, ...], ...] = (),
    cache_salt: str = "",
    prediction: Sequence[int] = (),
) -> list[Request]:
    """One `Request` per output; output i is sampled with seed + i. A beam search is one request for all.

    Args:
        rng: gives the seed where the user gave none.
        bad_words: `params.bad_words` as token sequences, none of them empty.
        cache_salt: cached prefixes are shared among requests with the same one.
        prediction: see `Request`.

    Raises:
        InvalidRequest: the prompt is empty or has a token the model does not know; so have stop ids, biases and the
            like; a state without any allowed token is possible; a beam search is too wide or too long; or no token
            ends structured outputs.
        PromptTooLong: it leaves no room for one output token.
    """
    _check_prompt(prompt, limits)
    for field, ids in (
        ("stop_token_ids", params.stop_token_ids),
        ("logit_bias", params.logit_bias),
        ("allowed_token_ids", params.allowed_token_ids or ()),
        ("logprob_token_ids", params.logprob_token_ids or ()),
        ("thinking", () if params.thinking is None else params.thinking.start + params.thinking.end),
    ):
        _check_ids(field, ids, limits)
    structured = params.structured_outputs is not None  # then even an output that ignores it ends some time
    ignored = params.ignore_eos and not structured
    stop_ids = frozenset(params.stop_token_ids) | (frozenset() if ignored else limits.eos_ids)
    if structured and not stop_ids:
        raise InvalidRequest(
            "structured_outputs: given, but nothing could end the output: this model names no end-of-sequence token; "
            "allowed only with stop_token_ids",
            "structured_outputs",
        )
    _check_choice(params, stop_ids, bad_words, limits)
    room = limits.max_model_len - len(prompt)
    if params.use_beam_search:
        room = _beam_room(len(prompt), params, limits, room)
    count = 1 if params.use_beam_search else params.n
    seed = rng.getrandbits(SEED_BITS) if params.seed is None else params.seed
    return [
        Request(
            id=request_id if count == 1 else f"{request_id}-{i}",
            prompt=prompt,
            params=params,
            seed=_wrap(seed + i),
            stop_ids=stop_ids,
            max_tokens=room if params.max_tokens is None else min(room, params.max_tokens),
            priority=level.priority,
            ttft_ms=level.ttft_ms,
            tpot_ms=level.tpot_ms,
            offline=level.offline,
            bad_words=bad_words,
            cache_salt=cache_salt,
            prediction=prediction,
        )
        for i in range(count)
    ]


def make_embedding(
    request_id: str,
    prompt: Sequence[int],
    params: SamplingParams,
    pooling: Pooling,
    limits: ModelLimits,
    level: ServiceLevel = NO_LEVEL,
    *,
    cache_salt: str = "",
) -> Request:
    """The `Request` that embeds a prompt.

    Args:
        params: nothing is sampled; they only say how the prompt was cut.

    Raises:
        InvalidRequest: the prompt is empty or has a token the model does not know.
        PromptTooLong: see `ModelLimits.max_model_len`, which it may take as a whole.
    """
    _check_prompt(prompt, limits, output=0)
    return Request(
        id=request_id,
        prompt=prompt,
        params=params,
        seed=0,
        stop_ids=frozenset(),
        max_tokens=0,
        priority=level.priority,
        ttft_ms=level.ttft_ms,
        tpot_ms=level.tpot_ms,
        offline=level.offline,
        cache_salt=cache_salt,
        pooling=pooling,
    )


def _beam_room(prompt_tokens: int, params: SamplingParams, limits: ModelLimits, room: int) -> int:
    """Tokens that each beam may have. Raises InvalidRequest when more were asked for than a KV cache holds."""
    check_width(params.n, limits.max_sequences)
    if params.n > limits.vocab_size:
        raise InvalidRequest(f"n: {params.n} beams, the model knows only {limits.vocab_size} tokens", "n")
    asked = params.max_tokens
    check_length(prompt_tokens, params.n, min(room, 1 if asked is None else asked), limits.search_blocks)
    if asked is None:
        return min(room, most_beam_tokens(prompt_tokens, params.n, limits.search_blocks))
    return room


def _check_prompt(prompt: Sequence[int], limits: ModelLimits, output: int = 1) -> None:
    if not prompt:
        raise InvalidRequest("prompt: empty, at least one token is needed", "prompt")
    _check_ids("prompt", prompt, limits)
    if len(prompt) + output > limits.max_model_len:
        raise PromptTooLong.of(len(prompt), limits.max_model_len, output)


def check_salt(salt: object) -> None:
    """Raises `InvalidRequest` unless `salt` is a valid `cache_salt`."""
    try:
        fits = isinstance(salt, str) and 1 <= len(salt.encode()) <= MAX_SALT_BYTES
    except UnicodeEncodeError:
        fits = False
    if not fits:
        text = ascii(salt)
        shown = text if len(text) <= 60 else text[:57] + "..."
        raise InvalidRequest(
            f"cache_salt: {shown}, allowed is a string of 1 to {MAX_SALT_BYTES} bytes of UTF-8", "cache_salt"
        )


def check_room(prompt_tokens: int, asked: int | None, max_model_len: int, field: str = "max_tokens") -> None:
    """Raises `InvalidRequest` when more output was asked for than fits beside the prompt.

    Args:
        asked: what the request brought; None when it brought nothing: a default is cut to what fits.
        field: where it brought it.
    """
    if asked is not None and prompt_tokens < max_model_len < prompt_tokens + asked:
        raise InvalidRequest(
            f"{field}: {asked} is too large, this model's maximum context length is {max_model_len} tokens and the "
            f"request has {prompt_tokens} input tokens ({asked} > {max_model_len} - {prompt_tokens})",
            field,
        )


def check_named(prompts: Sequence[Sequence[int]], params: SamplingParams, max_model_len: int, vocab_size: int) -> None:
    """Raises `InvalidRequest` when log-probabilities of the whole vocabulary are asked for at too many positions."""
    rooms = [max(0, max_model_len - len(prompt)) for prompt in prompts]
    for field, wanted, places in (
        ("prompt_logprobs", params.prompt_logprobs, [len(prompt) - 1 for prompt in prompts]),
        ("logprobs", params.logprobs, [min(params.max_tokens or room, room) for room in rooms]),
    ):
        count = params.n * sum(places)
        if wanted == ALL_LOGPROBS and count * vocab_size > MOST_NAMED:
            raise InvalidRequest(
                f"{field}: -1 would name all {vocab_size} tokens of the vocabulary in {count} places, at most "
                f"{MOST_NAMED // vocab_size} places are allowed; ask for fewer tokens, or for at most the 20 likeliest",
                field,
            )


def longest_whole(params: SamplingParams, max_model_len: int) -> int | None:
    """As many tokens are too many in a prompt as it comes; None when any number may be cut to what fits."""
    return max_model_len if params.truncate_prompt_tokens is None else None


def truncated(
    prompt: Sequence[int], params: SamplingParams, max_model_len: int, *, generates: bool = True
) -> Sequence[int]:
    """As many of its tokens as `params.truncate_prompt_tokens` says, the last or the first. Raises InvalidRequest.

    Args:
        generates: room is needed beside it.
    """
    count = params.truncate_prompt_tokens
    if count is None:
        return prompt
    if count > max_model_len:
        raise InvalidRequest(
            f"truncate_prompt_tokens: {count}, allowed is -1 (what fits) or a whole number from 1 to {max_model_len}",
            "truncate_prompt_tokens",
        )
    if count == -1:
        count = max(1, max_model_len - (params.max_tokens or 1)) if generates else max_model_len
    return prompt[-count:] if params.truncation_side == "left" else prompt[:count]


def _check_choice(
    params: SamplingParams, stop_ids: frozenset[int], bad_words: tuple[tuple[int, ...], ...], limits: ModelLimits
) -> None:
    """Check that some token is always allowed."""
    if not params.min_tokens and not bad_words:
        return
    banned = {word[-1] for word in bad_words} | (stop_ids if params.min_tokens else set())
    allowed = range(limits.vocab_size) if params.allowed_token_ids is None else params.allowed_token_ids
    if all(token in banned for token in allowed):
        field = "bad_words" if params.allowed_token_ids is None else "allowed_token_ids"
        raise InvalidRequest(
            f"{field}: beside bad_words and min_tokens there may be no token left to draw, at least one is needed that "
            "neither ends the output nor a bad word",
            field,
        )


def _check_ids(field: str, ids: Collection[int], limits: ModelLimits) -> None:
    if ids and not (min(ids) >= 0 and max(ids) < limits.vocab_size):
        wrong = next(i for i in ids if not 0 <= i < limits.vocab_size)
        raise InvalidRequest(f"{field}: token id {wrong}, allowed are 0 to {limits.vocab_size - 1}", field)


def _wrap(seed: int) -> int:
    """Into [-2**63, 2**63)."""
    return (seed + (1 << SEED_BITS)) % (1 << (SEED_BITS + 1)) - (1 << SEED_BITS)
