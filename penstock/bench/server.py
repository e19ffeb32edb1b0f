"""What a server reports about itself: its model, token ids that are safe to send, and its own view of a run."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from penstock.bench.client import Client, error_message
from penstock.bench.metrics import Summary
from penstock.bench.words import WORDS
from penstock.core.errors import ConfigError, Unavailable
from penstock.workload.requests import safe_ids

METRIC_PREFIXES = ("penstock:", "vllm:")
COUNTERS = ("request_success_total", "prompt_tokens_total", "generation_tokens_total")
HISTOGRAMS = ("time_to_first_token_seconds", "request_time_per_output_token_seconds")
Metrics = Mapping[str, float]  # samples of /metrics summed over their labels, by name without the prefix

SETTLE_SECONDS = 2.0  # a server may count a request shortly after its client saw the end


@dataclass(frozen=True, slots=True)
class Model:
    """
    Attributes:
        max_model_len: in tokens, None when the server does not say.
        sampled_ids: token ids that a modelled model draws from; None when the model is a real one, or does not say.
    """

    name: str
    max_model_len: int | None
    sampled_ids: range | None = None


async def find_model(client: Client, name: str | None) -> Model:
    """The served model of that name, or the first one. Raises `Unavailable`, or `ConfigError` when it is not served."""
    status, text = await client.get("/v1/models")
    if status != 200:
        raise ConfigError(f"--base-url: {client.base_url}/v1/models answered {status}: {error_message(text)[:200]}")
    try:
        served = {item["id"]: _model(item) for item in msgspec.json.decode(text)["data"]}
    except (msgspec.DecodeError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"--base-url: {client.base_url}/v1/models is not OpenAI's shape") from error
    if not served or (name is not None and name not in served):
        raise ConfigError(f"--model: {name}, served at {client.base_url}: {', '.join(served) or 'none'}", "model")
    return served[name if name is not None else next(iter(served))]


def _model(card: dict[str, Any]) -> Model:
    modelled = card.get("modelled")
    drawn = range(modelled["first_token_id"], modelled["last_token_id"] + 1) if modelled else None
    return Model(card["id"], card.get("max_model_len") or None, drawn)


async def find_token_ids(client: Client, model: str, vocab_size: int | None) -> npt.NDArray[np.int64]:
    """Token ids to make prompts of: all below `vocab_size` when given, else those of a list of common words in the
    server's own vocabulary, so that every id is ordinary text to it. Raises `ConfigError`."""
    if vocab_size is not None:
        return safe_ids(vocab_size)
    body = {"model": model, "prompt": " ".join(WORDS), "add_special_tokens": False}
    status, text = await client.post("/tokenize", body)
    try:
        tokens = msgspec.json.decode(text, type=dict[str, Any])["tokens"] if status == 200 else []
    except (msgspec.DecodeError, KeyError):
        tokens = []
    if not tokens:
        raise ConfigError(
            f"--vocab-size: not given, and {client.base_url}/tokenize (status {status}) gave no token ids instead",
            "vocab_size",
        )
    return np.unique(np.array(tokens, dtype=np.int64))


async def chat_tokens(client: Client, model: str, messages: list[dict[str, str]]) -> list[int]:
    """A conversation's token ids as the server makes them. Raises `Unavailable` when it does not."""
    return (await _post(client, "/tokenize", {"model": model, "messages": messages}))["tokens"]


async def text_of(client: Client, model: str, tokens: list[int]) -> str:
    """Their text as the server makes it. Raises `Unavailable` when it does not."""
    return (await _post(client, "/detokenize", {"model": model, "tokens": tokens}))["prompt"]


async def _post(client: Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
    status, text = await client.post(path, body)
    if status != 200:
        raise Unavailable(f"{client.base_url}{path} answered {status}: {error_message(text)[:200]}")
    return msgspec.json.decode(text, type=dict[str, Any])


async def read_metrics(client: Client) -> Metrics | str:
    """The server's counters, or one line on why there are none."""
    try:
        status, text = await client.get("/metrics")
    except Unavailable as error:
        return str(error)
    if status != 200:
        return f"{client.base_url}/metrics answered {status}"
    return parse_metrics(text) or f"{client.base_url}/metrics has none of {', '.join(COUNTERS + HISTOGRAMS)}"


def parse_metrics(text: str) -> Metrics | None:
    """The counters and histograms that are compared; None when the text has none of them or is not Prometheus'."""
    from prometheus_client.parser import text_string_to_metric_families

    names = {*COUNTERS, *(f"{name}_{part}" for name in HISTOGRAMS for part in ("sum", "count"))}
    by_prefix: dict[str, dict[str, float]] = {prefix: {} for prefix in METRIC_PREFIXES}
    try:
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    except ValueError:
        return None
    for sample in samples:
        for prefix, values in by_prefix.items():
            name = sample.name.removeprefix(prefix)
            if name != sample.name and name in names:
                values[name] = values.get(name, 0.0) + sample.value
    return next((values for values in by_prefix.values() if values), None)


async def settled_metrics(client: Client, before: Metrics | str, completed: int) -> Metrics | str:
    """The metrics once the server has counted `completed` more requests than `before`, or after `SETTLE_SECONDS`."""
    deadline = client.clock.now() + SETTLE_SECONDS
    while True:
        after = await read_metrics(client)
        if isinstance(before, str) or isinstance(after, str) or client.clock.now() >= deadline:
            return after
        if _difference(before, after, "request_success_total") >= completed:
            return after
        await asyncio.sleep(0.05)


@dataclass(frozen=True, slots=True)
class ComparedValue:
    """One quantity as the server (in `metric`) and the client saw it; None where a side has no value."""

    name: str
    metric: str
    unit: str
    server: float | None
    client: float | None

    @property
    def difference(self) -> float | None:
        """Client minus server."""
        return None if self.server is None or self.client is None else self.client - self.server


@dataclass(frozen=True, slots=True)
class ServerView:
    """The server's own account of a run beside the client's, or why there is none."""

    missing: str | None
    rows: tuple[ComparedValue, ...] = ()


def compare_views(before: Metrics | str, after: Metrics | str, summary: Summary) -> ServerView:
    """Counts that the server made between two readings beside those of the client. Traffic of others, and requests
    that the client gave up on, are in the server's numbers too."""
    if isinstance(before, str) or isinstance(after, str):
        return ServerView(missing=before if isinstance(before, str) else str(after))
    counts = (
        ("requests", "requests", summary.completed),
        ("prompt tokens", "tokens", summary.prompt_tokens),
        ("output tokens", "tokens", summary.output_tokens),
    )
    means = (("TTFT mean", summary.ttft_ms), ("TPOT mean", summary.tpot_ms))
    rows = []
    for metric, (name, unit, count) in zip(COUNTERS, counts, strict=True):
        seen = _difference(before, after, metric) if metric in after else None
        rows.append(ComparedValue(name, metric, unit, seen, count))
    for metric, (name, stats) in zip(HISTOGRAMS, means, strict=True):
        rows.append(ComparedValue(name, metric, "ms", _mean_ms(before, after, metric), stats.mean if stats else None))
    return ServerView(missing=None, rows=tuple(rows))


def _difference(before: Metrics, after: Metrics, name: str) -> float:
    return after.get(name, 0.0) - before.get(name, 0.0)


def _mean_ms(before: Metrics, after: Metrics, name: str) -> float | None:
    count = _difference(before, after, f"{name}_count")
    return 1e3 * _difference(before, after, f"{name}_sum") / count if count > 0 else None
