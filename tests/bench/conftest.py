"""A small OpenAI-shaped server in a thread, which can be told to be slow, to coalesce tokens, or to fail."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
from aiohttp import web

from penstock.core.digest import offline

FIRST_ID = 100  # the fake vocabulary begins here


class FakeServer:
    """Settings may be changed between requests.

    Attributes:
        first_delay, token_delay: seconds before the first token and before each later event.
        tokens_per_event: how many tokens one event carries.
        first_tokens: how many the first event carries, None for `tokens_per_event`.
        gives_ids, gives_usage, tells_metrics, tokenizes: what it offers. refuses_ids: 400 for `return_token_ids`.
        status: of answers; `fail_every`: every n-th generation gets a 500.
        break_after: closes the connection after so many events; `error_after` sends an error event instead.
        hangs: never answers a generation.
        stop_early: ends answers after so many tokens.
        cached: cached prompt tokens that it reports.
        miscount: output tokens that its metrics leave out of each request.
        drawn: when set, answers are those of the modelled model drawing from these ids.
        spoil: changes the events of such an answer: (number of the generation, tokens, finish reason) -> the same two.
        bodies: of all generations, in order. headers: of the last. in_flight, peak, cancelled: counts.
    """

    def __init__(self) -> None:
        self.first_delay = self.token_delay = 0.0
        self.tokens_per_event = 1
        self.first_tokens: int | None = None
        self.gives_ids = self.gives_usage = self.tells_metrics = self.tokenizes = True
        self.refuses_ids = self.hangs = False
        self.status = 200
        self.fail_every = self.break_after = self.error_after = self.stop_early = 0
        self.cached = self.miscount = 0
        self.drawn: range | None = None
        self.spoil: Callable[[int, list[int], str], tuple[list[int], str]] = lambda _, tokens, finish: (tokens, finish)
        self.models: list[dict[str, Any]] = [{"id": "fake", "max_model_len": 4096}]
        self.bodies: list[dict[str, Any]] = []
        self.headers: dict[str, str] = {}
        self.in_flight = self.peak = 0
        self.cancelled = threading.Event()
        self.started = threading.Event()
        self._counts: dict[str, float] = defaultdict(float)
        self._loop = asyncio.new_event_loop()
        ready = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(ready,), daemon=True)
        self._thread.start()
        assert ready.wait(10)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def stop(self) -> None:
        if self._loop.is_closed():
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def _run(self, ready: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)
        runner = self._loop.run_until_complete(self._start())
        ready.set()
        self._loop.run_forever()
        self._loop.run_until_complete(runner.cleanup())
        self._loop.close()

    async def _start(self) -> web.AppRunner:
        app = web.Application(client_max_size=1 << 26)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_post("/detokenize", self._detokenize)
        app.router.add_post("/v1/completions", self._generate)
        app.router.add_post("/v1/chat/completions", self._generate)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.port = runner.addresses[0][1]
        return runner

    async def _models(self, request: web.Request) -> web.Response:
        modelled = {"first_token_id": self.drawn[0], "last_token_id": self.drawn[-1]} if self.drawn else None
        return web.json_response({"object": "list", "data": [card | {"modelled": modelled} for card in self.models]})

    async def _tokenize(self, request: web.Request) -> web.Response:
        if not self.tokenizes:
            raise web.HTTPNotFound
        body = await request.json()
        words = (body["prompt"] if "prompt" in body else body["messages"][-1]["content"]).split()
        return web.json_response({"tokens": number(words)})

    async def _detokenize(self, request: web.Request) -> web.Response:
        return web.json_response({"prompt": spell((await request.json())["tokens"])})

    async def _metrics(self, request: web.Request) -> web.Response:
        if not self.tells_metrics:
            raise web.HTTPNotFound
        lines = []
        for name, value in self._counts.items():
            family = name.partition("{")[0].removesuffix("_sum").removesuffix("_count")
            lines += [f"# TYPE {family} {'counter' if family.endswith('_total') else 'histogram'}", f"{name} {value}"]
        return web.Response(text="\n".join(lines) + "\n")

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.headers = dict(request.headers)
        self.in_flight += 1
        self.peak = max(self.peak, self.in_flight)
        try:
            return await self._answer(request, body)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        finally:
            self.in_flight -= 1

    async def _answer(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if self.refuses_ids and "return_token_ids" in body:
            return _error(400, "return_token_ids is not known")
        if self.status != 200 or (self.fail_every and len(self.bodies) % self.fail_every == 0):
            return _error(self.status if self.status != 200 else 500, "told to fail")
        if self.hangs:
            self.started.set()
            await asyncio.sleep(3600)
        begin = self._loop.time()
        await asyncio.sleep(self.first_delay)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        said = body.get("prompt") or body["messages"][-1]["content"]
        if isinstance(said, list) and isinstance(said[0], dict):
            said = " ".join(part["text"] for part in said if part["type"] == "text")
        prompt = len(said.split() if isinstance(said, str) else said)
        total = min(body.get("max_tokens", 5), self.stop_early or 10**9)
        tokens, finish = [FIRST_ID] * total, "length"
        if self.drawn:
            tokens, finish = self._modelled(body)
            tokens, finish = self.spoil(len(self.bodies) - 1, tokens, finish)
            total = len(tokens)
        sent, events, first = 0, 0, self._loop.time()
        while sent < total:
            if events and self.token_delay:
                await asyncio.sleep(self.token_delay)
            if events == self.break_after > 0:
                assert request.transport is not None
                request.transport.close()
                return response
            if events == self.error_after > 0:
                await _send(response, {"error": {"message": "told to fail", "type": "server_error"}})
                return response
            size = self.first_tokens if self.first_tokens and not events else self.tokens_per_event
            new = tokens[sent : sent + size]
            sent, events = sent + len(new), events + 1
            await _send(response, self._event(body, new, finish if sent == total else None))
            self.started.set()
        usage = {
            "prompt_tokens": prompt,
            "completion_tokens": sent,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }
        if self.gives_usage and body.get("stream_options", {}).get("include_usage"):
            await _send(response, {"choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")
        self._count(prompt, sent - self.miscount, first - begin, self._loop.time() - first)
        return response

    def _modelled(self, body: dict[str, Any]) -> tuple[list[int], str]:
        assert self.drawn
        prompt = body["prompt"] if "prompt" in body else number(body["messages"][-1]["content"].split())
        return offline(
            prompt,
            max_tokens=body["max_tokens"],
            token_ids=self.drawn,
            seed=body["seed"] if body["temperature"] else None,
            stop_ids=frozenset(body.get("stop_token_ids", [])),
        )

    def _event(self, body: dict[str, Any], tokens: list[int], finish: str | None) -> dict[str, Any]:
        text = spell(tokens[:-1] if finish == "stop" else tokens)
        choice: dict[str, Any] = {"index": 0, "finish_reason": finish}
        choice |= {"delta": {"content": text}} if "messages" in body else {"text": text}
        if self.gives_ids and body.get("return_token_ids"):
            choice["token_ids"] = tokens
        return {"choices": [choice]}

    def _count(self, prompt: int, output: int, ttft: float, decode: float) -> None:
        values: dict[str, float] = {"prompt_tokens_total": prompt, "generation_tokens_total": output}
        values |= {"time_to_first_token_seconds_sum": ttft, "time_to_first_token_seconds_count": 1}
        values |= {'request_success_total{finished_reason="length"}': 1}
        if output > 1:
            name = "request_time_per_output_token_seconds"
            values |= {f"{name}_sum": decode / (output - 1), f"{name}_count": 1}
        for name, value in values.items():
            self._counts[f"penstock:{name}"] += value


def number(words: list[str]) -> list[int]:
    """A tokenizer's way, in which new words have new ids."""
    return [FIRST_ID + len(set(words[: i + 1])) for i in range(len(words))]


def spell(tokens: list[int]) -> str:
    """A detokenizer's."""
    return "".join("word " if token == FIRST_ID else f"word{token} " for token in tokens)


async def _send(response: web.StreamResponse, event: dict[str, Any]) -> None:
    await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "type": "x", "param": None, "code": None}}, status=status)


@pytest.fixture
def server():
    fake = FakeServer()
    yield fake
    fake.stop()
