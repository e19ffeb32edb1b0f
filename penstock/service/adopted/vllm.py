"""vLLM's HTTP API in shapes: what a request is there, what a stream's chunks and /metrics say. Checked against 0.32.

Tokens go both ways as ids: `prompt` is a list of them, and `return_token_ids` brings them back with every chunk.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from penstock.core.errors import PenstockError
from penstock.core.plan import BLOCK_TOKENS
from penstock.core.request import FinishReason, Request, TokenLogprobs
from penstock.core.sampling import SEED_BITS
from penstock.core.structured_outputs import StructuredOutputs

TOKEN = "token_id:"  # before the id, where a token is a string
FINISHES = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}  # with others it has not ended well
MOST_SALT = 1024  # characters


class Rejected(PenstockError):
    """The server does not take this request, and never will."""


class Dropped(PenstockError):
    """The server takes this request no further; another may."""


# --- requests


def refusal(request: Request) -> str:
    """What of a request such a server cannot do; "" when it can do all."""
    params = request.params
    if params.use_beam_search:
        return "use_beam_search: true, adopted instances do not search: vLLM streams no beams"
    if request.pooling is not None:
        return "input: adopted instances give no embeddings"
    if params.prompt_logprobs is not None and not request.generated:
        return "prompt_logprobs: adopted instances do not report them: vLLM does not while it streams"
    if request.media:
        return "media: adopted instances take text alone"
    if params.structured_outputs is not None and request.generated:
        return "structured_outputs: an adopted instance begins them anew, and this output had begun elsewhere"
    if params.structured_outputs is not None and params.structured_outputs.structural_tag is not None:
        return "structured_outputs.structural_tag: adopted instances know no such form"
    if params.thinking is not None:
        return "thinking: adopted instances do not tell it from the answer"
    if len(request.cache_salt) > MOST_SALT:
        return f"cache_salt: {len(request.cache_salt)} characters, at most {MOST_SALT} are allowed"
    return ""


def body_of(request: Request, model: str, *, priorities: bool) -> dict[str, Any]:
    """The body for /v1/completions. What was generated elsewhere is part of the prompt, and moves the seed: else what
    follows would be drawn like the beginning.

    Args:
        model: as the server calls it.
        priorities: whether it schedules by them; else it refuses any.
    """
    params, done = request.params, len(request.generated)
    body: dict[str, Any] = {
        "model": model,
        "prompt": list(request.context),
        "max_tokens": request.max_tokens - done,
        "min_tokens": max(0, params.min_tokens - done),
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        "temperature": params.temperature,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "repetition_penalty": params.repetition_penalty,
        "ignore_eos": True,  # the end of a sequence is among these, where it is to end the output
        "stop_token_ids": sorted(request.stop_ids),
        "skip_special_tokens": params.skip_special_tokens,
    }
    if not params.greedy:
        body["seed"] = _moved(request.seed, done)
    if params.logit_bias:
        body["logit_bias"] = {str(token): bias for token, bias in params.logit_bias.items()}
    if params.bad_words:
        body["bad_words"] = list(params.bad_words)
    if params.allowed_token_ids is not None:
        body["allowed_token_ids"] = list(params.allowed_token_ids)
    if params.logprobs is not None:
        body |= {"logprobs": params.logprobs, "return_tokens_as_token_ids": True}
    if params.logprob_token_ids is not None:
        body["logprob_token_ids"] = list(params.logprob_token_ids)
    if params.structured_outputs is not None:
        body["structured_outputs"] = _form(params.structured_outputs)
    if request.cache_salt:
        body["cache_salt"] = request.cache_salt
    if priorities and request.priority:
        body["priority"] = request.priority
    return body


def _moved(seed: int, by: int) -> int:
    """A seed so much further, within vLLM's bounds."""
    half = 1 << SEED_BITS
    return (seed + by + half) % (2 * half) - half


def _form(wanted: StructuredOutputs) -> dict[str, Any]:
    """vLLM's fields have the same names."""
    form: dict[str, Any] = {wanted.kind: getattr(wanted, wanted.kind)}
    if wanted.disable_any_whitespace:
        form["disable_any_whitespace"] = True
    if wanted.whitespace_pattern is not None:
        form["whitespace_pattern"] = wanted.whitespace_pattern
    return form


# --- what comes of them


class _Logprobs(msgspec.Struct):
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None = None


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens_details: _PromptDetails | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: dict[str, Any] | None = None


_decode_chunk = msgspec.json.Decoder(_Chunk).decode


@dataclass(slots=True)
class Piece:
    """What a chunk of a stream brings.

    Attributes:
        logprobs: one per token, where asked for; the rank of one that is not among the most likely is not known, and
            said to be the next.
        finish: with the last tokens.
        cached_tokens: of the prompt, with the last chunk and only where the server is told to report them.
    """

    tokens: list[int]
    logprobs: list[TokenLogprobs] | None = None
    finish: FinishReason | None = None
    cached_tokens: int | None = None


def read_chunk(data: bytes, wanted: int | None) -> Piece:
    """
    Args:
        wanted: most likely tokens to report beside each.

    Raises Dropped when it is none, or says that the request has failed.
    """
    try:
        chunk = _decode_chunk(data)
    except msgspec.DecodeError as error:
        raise Dropped(f"what it sent is no chunk of a completion ({error})") from None
    if chunk.error is not None:
        raise Dropped(f"it failed: {chunk.error.get('message')}")
    cached = None if chunk.usage is None else (chunk.usage.prompt_tokens_details or _PromptDetails()).cached_tokens
    if not chunk.choices:
        return Piece([], cached_tokens=cached)
    choice = chunk.choices[0]
    if choice.token_ids is None:
        raise Dropped("its answers have no token_ids: it is older than vLLM 0.10.2")
    if choice.finish_reason is not None and choice.finish_reason not in FINISHES:
        raise Dropped(f"it ended with {choice.finish_reason!r}")
    finish = None if choice.finish_reason is None else FINISHES[choice.finish_reason]
    logprobs = None if wanted is None else _logprobs(choice, wanted)
    return Piece(choice.token_ids, logprobs, finish, cached)


def _logprobs(choice: _Choice, wanted: int) -> list[TokenLogprobs]:
    told, tokens = choice.logprobs, choice.token_ids or []
    if told is None or len(told.token_logprobs) != len(tokens):
        raise Dropped("its answer lacks the log-probabilities that were asked for")
    tops = told.top_logprobs or [None] * len(tokens)
    return [_logprob(chosen or 0.0, top or {}, wanted) for chosen, top in zip(told.token_logprobs, tops, strict=True)]


def _logprob(chosen: float, top: dict[str, float], wanted: int) -> TokenLogprobs:
    try:
        known = [(int(name.removeprefix(TOKEN)), value) for name, value in top.items()]
    except ValueError:
        raise Dropped("its log-probabilities are not by token id") from None
    known.sort(key=lambda entry: -entry[1])
    likelier = sum(value > chosen for _, value in known)
    return TokenLogprobs(chosen, 1 + likelier, known if wanted < 0 else known[:wanted])


# --- its load


@dataclass(frozen=True, slots=True)
class ServerLoad:
    """
    Attributes:
        running, waiting: requests, of all its clients.
        used: share of its KV blocks that requests hold.
        num_blocks: that it has, in blocks of ours; None where it does not say.
        caches: whether it keeps prefixes.
        tokens: of all prompts and answers so far.
    """

    running: int
    waiting: int
    used: float
    num_blocks: int | None
    caches: bool
    preemptions: int
    prefix_queries: int
    prefix_hits: int
    tokens: int


_SAMPLE = re.compile(r"^(vllm:[a-z_]+)\{([^}]*)\} ([0-9.eE+-]+)", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')
_CACHE = "vllm:cache_config_info"
USED = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")  # the latter is older


def read_metrics(text: str) -> ServerLoad:
    """Of several engines behind one server: their sums, and the mean share. Raises Dropped when these are not vLLM's
    metrics."""
    found: dict[str, list[float]] = {}
    caches: list[dict[str, str]] = []
    for name, labels, value in _SAMPLE.findall(text):
        if name == _CACHE:
            caches.append(dict(_LABEL.findall(labels)))
        else:
            found.setdefault(name, []).append(float(value))
    if "vllm:num_requests_running" not in found:
        raise Dropped("its /metrics has no vllm:num_requests_running")
    used: Sequence[float] = next((found[name] for name in USED if name in found), [0.0])
    return ServerLoad(
        running=_total(found, "vllm:num_requests_running"),
        waiting=_total(found, "vllm:num_requests_waiting"),
        used=sum(used) / len(used),
        num_blocks=_blocks(caches),
        caches=all(cache.get("enable_prefix_caching") != "False" for cache in caches),
        preemptions=_total(found, "vllm:num_preemptions_total"),
        prefix_queries=_total(found, "vllm:prefix_cache_queries_total"),
        prefix_hits=_total(found, "vllm:prefix_cache_hits_total"),
        tokens=_total(found, "vllm:prompt_tokens_total") + _total(found, "vllm:generation_tokens_total"),
    )


def _total(found: dict[str, list[float]], name: str) -> int:
    return int(sum(found.get(name, ())))


def _blocks(caches: Sequence[dict[str, str]]) -> int | None:
    sizes = [(cache.get("num_gpu_blocks", ""), cache.get("block_size", "")) for cache in caches]
    if not sizes or not all(blocks.isdecimal() and size.isdecimal() for blocks, size in sizes):
        return None
    return sum(int(blocks) * int(size) for blocks, size in sizes) // BLOCK_TOKENS
