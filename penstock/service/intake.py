"""A user's request to the sequences that engines run: checked against the model, seeded, one per output."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from penstock.core.errors import InvalidRequest, PromptTooLong
from penstock.core.request import Request
from penstock.core.sampling import SEED_BITS, SamplingParams
from penstock.core.service_level import NO_LEVEL, ServiceLevel


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """
    Attributes:
        max_model_len: prompt and output tokens of one sequence together.
        vocab_size: token ids are below it.
        eos_ids: tokens that end an output unless `ignore_eos`.
    """

    max_model_len: int
    vocab_size: int
    eos_ids: frozenset[int]


def make_sequences(
    request_id: str,
    prompt: Sequence[int],
    params: SamplingParams,
    limits: ModelLimits,
    rng: random.Random,
    level: ServiceLevel = NO_LEVEL,
) -> list[Request]:
    """One `Request` per output; output i is drawn with seed + i.

    Args:
        rng: gives the seed where the user gave none.

    Raises:
        InvalidRequest: the prompt is empty or has a token the model does not know; so have stop ids and biases.
        PromptTooLong: it leaves no room for one output token.
    """
    _check_prompt(prompt, limits)
    for field, ids in (("stop_token_ids", params.stop_token_ids), ("logit_bias", params.logit_bias)):
        _check_ids(field, ids, limits)
    room = limits.max_model_len - len(prompt)
    seed = rng.getrandbits(SEED_BITS) if params.seed is None else params.seed
    return [
        Request(
            id=request_id if params.n == 1 else f"{request_id}-{i}",
            prompt=prompt,
            params=params,
            seed=_wrap(seed + i),
            stop_ids=frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else limits.eos_ids),
            max_tokens=room if params.max_tokens is None else min(room, params.max_tokens),
            priority=level.priority,
            ttft_ms=level.ttft_ms,
            tpot_ms=level.tpot_ms,
            offline=level.offline,
        )
        for i in range(params.n)
    ]


def _check_prompt(prompt: Sequence[int], limits: ModelLimits) -> None:
    if not prompt:
        raise InvalidRequest("prompt: empty, at least one token is needed", "prompt")
    _check_ids("prompt", prompt, limits)
    if len(prompt) >= limits.max_model_len:
        raise PromptTooLong(
            f"prompt: {len(prompt)} tokens, at most {limits.max_model_len - 1} fit beside one output token",
            "prompt",
        )


def _check_ids(field: str, ids: Collection[int], limits: ModelLimits) -> None:
    if ids and not (min(ids) >= 0 and max(ids) < limits.vocab_size):
        wrong = next(i for i in ids if not 0 <= i < limits.vocab_size)
        raise InvalidRequest(f"{field}: token id {wrong}, allowed are 0 to {limits.vocab_size - 1}", field)


def _wrap(seed: int) -> int:
    """Into [-2**63, 2**63)."""
    return (seed + (1 << SEED_BITS)) % (1 << (SEED_BITS + 1)) - (1 << SEED_BITS)
