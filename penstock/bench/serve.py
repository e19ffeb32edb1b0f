"""One measurement of a running server: what is sent, the warm-up, the load, and both accounts of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from penstock.bench.client import Call, Client
from penstock.bench.load import Progress, closed_loop, open_loop
from penstock.bench.record import RequestRecord
from penstock.bench.server import (
    Model,
    ServerView,
    compare_views,
    find_model,
    find_token_ids,
    read_metrics,
    settled_metrics,
)
from penstock.bench.summary import Summary, summarise
from penstock.bench.verify import Verification, check_verifiable, verify
from penstock.bench.words import WORDS
from penstock.core.errors import ConfigError, Unavailable
from penstock.workload.requests import WorkRequest, limit_context, materialise, reusable_tokens, unrelated

CHAT_TEMPLATE_TOKENS = 64  # room left for what a chat template adds to a prompt


@dataclass(frozen=True, kw_only=True)
class Asking:
    """What every request says besides its prompt and its number of tokens.

    Attributes:
        model: None asks for the first that the server lists.
        vocab_size: draw prompt ids from all below it; None takes ids of common words from the server.
        ignore_eos: go on after the end of sequence, so that an answer has the length the workload says.
        extra_body: fields added to every body.
        verify: compute every answer of a modelled model offline, and compare.
    """

    model: str | None = None
    vocab_size: int | None = None
    temperature: float = 0.0
    ignore_eos: bool = True
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    verify: bool = False


@dataclass(frozen=True, kw_only=True)
class LoadShape:
    """How the requests are sent.

    Attributes:
        scheduled: send when each is due (open loop); otherwise keep `concurrency` in flight (closed loop).
        concurrency: most requests in flight, None for no limit; needed when not scheduled.
        warmups: requests sent and awaited before the run; they share no token with it.
        seed: of the tokens.
    """

    scheduled: bool
    concurrency: int | None
    warmups: int = 0
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Attributes are of the run alone, without its warm-up.

    Attributes:
        cut: requests that were shortened to fit the model.
        reusable_tokens: prompt tokens that an unlimited prefix cache, empty at the start, could have served.
        failed_warmups: how many of the warm-up requests failed.
        verification: None when it was not asked for.
    """

    records: list[RequestRecord]
    summary: Summary
    server: ServerView
    cut: int
    reusable_tokens: int
    failed_warmups: int
    verification: Verification | None = None


class Bench:
    """A client together with what it found out about its server. Made by `connect`."""

    def __init__(self, client: Client, model: Model, ids: npt.NDArray[np.int64], asking: Asking, counts: bool) -> None:
        self.client = client
        self.model = model
        self.counts_tokens = counts  # the server reports token ids, so tokens are counted event by event
        self._ids = ids
        self._asking = asking

    @classmethod
    async def connect(cls, client: Client, asking: Asking) -> Bench:
        """Asks the server what it serves and sends one short request. Raises `ConfigError` when the server refuses
        it, `Unavailable` when it fails otherwise."""
        model = await find_model(client, asking.model)
        if asking.verify:
            check_verifiable(model, asking.extra_body, client.base_url)
        chat = client.endpoint == "chat"
        ids = np.arange(len(WORDS)) if chat else await find_token_ids(client, model.name, asking.vocab_size)
        bench = cls(client, model, ids, asking, counts=True)
        trial = WorkRequest(number=0, at=0.0, prompt_tokens=4, output_tokens=4)
        record, bench.counts_tokens = await client.try_out(bench.call(trial, seed=0))
        if record.error == "http 400":  # perhaps only because it does not know `return_token_ids`
            record, bench.counts_tokens = await client.try_out(bench.call(trial, seed=0))
        if record.error is not None:
            kind = ConfigError if record.error.startswith("http 4") or record.error == "uncounted" else Unavailable
            raise kind(f"{client.base_url}: a trial request failed, {record.error}: {record.detail}")
        return bench

    def call(self, request: WorkRequest, seed: int) -> Call:
        """The request as JSON, with its tokens."""
        body = msgspec.json.encode(self.body(request, seed))
        return Call(request.number, request.at, body, request.prompt_tokens, request.output_tokens)

    def body(self, request: WorkRequest, seed: int) -> dict[str, Any]:
        """The same, before it is JSON."""
        ids = materialise(request, seed, self._ids).tolist()
        body: dict[str, Any] = {"model": self.model.name, "max_tokens": request.output_tokens, "stream": True}
        if self.client.endpoint == "chat":
            body["messages"] = [{"role": "user", "content": " ".join(WORDS[i] for i in ids)}]
        else:
            body["prompt"] = ids
        body |= {"temperature": self._asking.temperature, "stream_options": {"include_usage": True}}
        body |= {"ignore_eos": True} if self._asking.ignore_eos else {}
        body |= {"return_token_ids": True} if self.counts_tokens else {}
        body |= {"seed": (seed + request.number) % 2**63} if self._asking.verify else {}
        return {**body, **self._asking.extra_body}

    async def measure(
        self,
        requests: Sequence[WorkRequest],
        shape: LoadShape,
        limits_ms: Mapping[str, float] | None = None,
        progress: Progress | None = None,
    ) -> Measurement:
        """Warm-up, then one run. All bodies are made before the first request is due."""
        fitting, cut = self._fit(requests)
        calls = [self.call(request, shape.seed) for request in fitting]
        failed_warmups = await self._warm_up(fitting, shape)
        before = await read_metrics(self.client)
        client = self.client
        if shape.scheduled:
            records = await open_loop(
                calls, client.send, client.clock, max_concurrency=shape.concurrency, progress=progress
            )
        else:
            assert shape.concurrency is not None, "a closed loop has a number of users"
            records = await closed_loop(
                calls, client.send, client.clock, concurrency=shape.concurrency, progress=progress
            )
        summary = summarise(records, limits_ms)
        after = await settled_metrics(client, before, summary.completed)
        return Measurement(
            records=records,
            summary=summary,
            server=compare_views(before, after, summary),
            cut=cut,
            reusable_tokens=reusable_tokens(fitting),
            failed_warmups=failed_warmups,
            verification=await self._verify(fitting, records, shape.seed) if self._asking.verify else None,
        )

    async def _verify(
        self, requests: Sequence[WorkRequest], records: Sequence[RequestRecord], seed: int
    ) -> Verification:
        bodies = (self.body(request, seed) for request in requests)
        return await verify(self.client, self.model, bodies, records)

    def _fit(self, requests: Sequence[WorkRequest]) -> tuple[list[WorkRequest], int]:
        if self.model.max_model_len is None:
            return list(requests), 0
        margin = CHAT_TEMPLATE_TOKENS if self.client.endpoint == "chat" else 0
        if self.model.max_model_len < margin + 2:
            raise ConfigError(f"--model: {self.model.name} takes {self.model.max_model_len} tokens, too few to measure")
        return limit_context(requests, self.model.max_model_len - margin)

    async def _warm_up(self, requests: Sequence[WorkRequest], shape: LoadShape) -> int:
        """Sends `shape.warmups` requests that are like the workload's; returns how many failed."""
        calls = [self.call(request, shape.seed) for request in unrelated(requests, shape.warmups)]
        records = await open_loop(calls, self.client.send, self.client.clock, max_concurrency=shape.concurrency)
        return sum(record.error is not None for record in records)
