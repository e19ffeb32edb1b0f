"""One measurement of a running server: what is sent and when, the warm-up, and both sides' account of it.

Requests are sent on a schedule (open loop) or one after another (closed loop). An open loop models
independent users: it never waits for an answer before it sends the next request. A closed loop models a fixed number of
users who each wait for their answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from penstock.bench import pictures
from penstock.bench.client import Call, Client
from penstock.bench.metrics import ClientRecord, Summary, summarise
from penstock.bench.server import (
    Model,
    ServerView,
    compare_views,
    find_model,
    find_token_ids,
    read_metrics,
    settled_metrics,
)
from penstock.bench.verify import Verification, check_verifiable, verify
from penstock.bench.words import WORDS
from penstock.core.clock import Clock
from penstock.core.errors import ConfigError, Unavailable
from penstock.workload.requests import WorkRequest, limit_context, materialise, reusable_tokens, unrelated

Send = Callable[[Call, float], Awaitable[ClientRecord]]
Progress = Callable[[ClientRecord], None]

CHAT_TEMPLATE_TOKENS = 64  # room left for what a chat template adds to a prompt


@dataclass(frozen=True, kw_only=True)
class RequestOptions:
    """Fields of every request beside its prompt and its number of tokens.

    Attributes:
        model: None asks for the first that the server lists.
        vocab_size: draw prompt ids from all below it; None takes ids of common words from the server.
        ignore_eos: go on after the end of sequence, so that an answer has the length that the workload gives it.
        extra_body: fields added to every body.
        image_size: width and height in pixels of the images of a workload, as PNGs of noise.
        verify: compute every answer of a modelled model offline, and compare.
    """

    model: str | None = None
    vocab_size: int | None = None
    temperature: float = 0.0
    ignore_eos: bool = True
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    image_size: tuple[int, int] = (256, 256)
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

    records: list[ClientRecord]
    summary: Summary
    server: ServerView
    cut: int
    reusable_tokens: int
    failed_warmups: int
    verification: Verification | None = None


class Bench:
    """A client together with what it found out about its server. Made by `connect`."""

    def __init__(
        self, client: Client, model: Model, ids: npt.NDArray[np.int64], options: RequestOptions, counts: bool
    ) -> None:
        self.client = client
        self.model = model
        self.counts_tokens = counts  # the server reports token ids, so tokens are counted event by event
        self._ids = ids
        self._options = options

    @classmethod
    async def connect(cls, client: Client, options: RequestOptions) -> Bench:
        """Asks the server what it serves and sends one short request. Raises `ConfigError` when the server refuses
        it, `Unavailable` when it fails otherwise."""
        model = await find_model(client, options.model)
        if options.verify:
            check_verifiable(model, options.extra_body, client.base_url)
        chat = client.endpoint == "chat"
        ids = np.arange(len(WORDS)) if chat else await find_token_ids(client, model.name, options.vocab_size)
        bench = cls(client, model, ids, options, counts=True)
        trial = WorkRequest(number=0, at=0.0, prompt_tokens=4, output_tokens=4)
        record, bench.counts_tokens = await client.send_trial(bench.call(trial, seed=0))
        if record.error == "http 400":  # perhaps only because it does not know `return_token_ids`
            record, bench.counts_tokens = await client.send_trial(bench.call(trial, seed=0))
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
            text = " ".join(WORDS[i] for i in ids)
            body["messages"] = [{"role": "user", "content": self._with_images(text, request, seed)}]
        else:
            body["prompt"] = ids
        body |= {"temperature": self._options.temperature, "stream_options": {"include_usage": True}}
        body |= {"ignore_eos": True} if self._options.ignore_eos else {}
        body |= {"return_token_ids": True} if self.counts_tokens else {}
        body |= {"seed": (seed + request.number) % 2**63} if self._options.verify else {}
        return {**body, **self._options.extra_body}

    def _with_images(self, text: str, request: WorkRequest, seed: int) -> str | list[dict[str, Any]]:
        """A message's content. Images that have tokens of the prompt, as those of traces, are in it as text."""
        sent = [image.number for image in request.images if not image.tokens]
        if not sent:
            return text
        urls = [pictures.data_url(seed, number, self._options.image_size) for number in sent]
        parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
        return [*parts, {"type": "text", "text": text}]

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
            verification=await self._verify(fitting, records, shape.seed) if self._options.verify else None,
        )

    async def _verify(
        self, requests: Sequence[WorkRequest], records: Sequence[ClientRecord], seed: int
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


async def open_loop(
    calls: Sequence[Call],
    send: Send,
    clock: Clock,
    *,
    max_concurrency: int | None = None,
    progress: Progress | None = None,
) -> list[ClientRecord]:
    """Sends each call when it is due; returns the records in the order of `calls`, which ascend in `at`.

    A record's `start` is when the call was due, so a late client, or a wait for one of `max_concurrency` slots,
    counts as latency and shows as lag; the schedule itself never slips.
    """
    slots = asyncio.Semaphore(max_concurrency or len(calls) or 1)

    async def one(call: Call, due: float) -> ClientRecord:
        async with slots:
            record = await send(call, due)
        if progress:
            progress(record)
        return record

    origin = clock.now()
    async with asyncio.TaskGroup() as group:
        tasks = []
        for call in calls:
            due = origin + call.at
            while (wait := due - clock.now()) > 0:  # timers may fire early by part of a millisecond
                await asyncio.sleep(wait)
            tasks.append(group.create_task(one(call, due)))
    return [task.result() for task in tasks]


async def closed_loop(
    calls: Sequence[Call],
    send: Send,
    clock: Clock,
    *,
    concurrency: int,
    progress: Progress | None = None,
) -> list[ClientRecord]:
    """Keeps `concurrency` calls in flight until all were sent; returns the records in the order of `calls`."""
    records: dict[int, ClientRecord] = {}
    waiting = iter(enumerate(calls))

    async def user() -> None:
        for index, call in waiting:  # shared by all users: each takes the next call
            record = records[index] = await send(call, clock.now())
            if progress:
                progress(record)

    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, len(calls))):
            group.create_task(user())
    return [records[index] for index in range(len(calls))]
