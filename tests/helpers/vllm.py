"""A server that speaks vLLM's HTTP API in vLLM 0.32's shapes, computes nothing, and fails as it is told to."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator

from aiohttp import web

from penstock.service.checkpoint import DEMO
from penstock.text.tokenizer import Tokenizer

METRICS = """# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{engine="0",model_name="m"}} {running}.0
vllm:num_requests_waiting{{engine="0",model_name="m"}} {waiting}.0
vllm:num_requests_waiting_by_reason{{engine="0",model_name="m",reason="capacity"}} 0.0
vllm:kv_cache_usage_perc{{engine="0",model_name="m"}} 0.25
vllm:prefix_cache_queries_total{{engine="0",model_name="m"}} 1.5e+03
vllm:prefix_cache_queries_created{{engine="0",model_name="m"}} 1.795578956624127e+09
vllm:prefix_cache_hits_total{{engine="0",model_name="m"}} 384.0
vllm:prompt_tokens_total{{engine="0",model_name="m"}} 40.0
vllm:generation_tokens_total{{engine="0",model_name="m"}} 2.0
vllm:num_preemptions_total{{engine="0",model_name="m"}} 2.0
vllm:cache_config_info{{block_size="16",enable_prefix_caching="True",engine="0",num_gpu_blocks="{blocks}"}} 1.0
"""


def next_token(tokens: list[int], vocab: int) -> int:
    """Of all tokens before it, so that a continuation shows whether it began where it should."""
    return (sum(tokens) * 31 + len(tokens) * 7) % (vocab - 10) + 5


class FakeVllm:
    """
    Attributes:
        url: where it listens, once it has begun.
        bodies: of the completions that were asked for.
        aborted: that were given up by their client.
        old: it knows no `return_token_ids`.
        priorities: whether it schedules by them.
        refuses: message of the 400 that every completion gets, if any.
        breaks: what happens after so many tokens of a completion: (tokens, "cut" or "error" or "hang").
        pause: seconds between two tokens.
        gate: nothing goes on while it is not set.
        others: requests of other clients.
    """

    def __init__(self, tokenizer: Tokenizer | None = None, blocks: int = 256, longest: int = 2048) -> None:
        self.url, self.port = "", 0
        self.bodies: list[dict] = []
        self.aborted: list[dict] = []
        self.old, self.priorities, self.refuses = False, True, ""
        self.breaks: tuple[int, str] | None = None
        self.pause, self.others, self.silent = 0.0, 0, False
        self.tokenizer = tokenizer or Tokenizer(DEMO)
        self.vocab = 4096
        self._blocks, self._longest, self._running = blocks, longest, 0

    async def begin(self, port: int = 0) -> None:
        self.gate = asyncio.Event()
        self.gate.set()
        app = web.Application()
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_post("/v1/completions", self._complete)
        self._runner = web.AppRunner(app, shutdown_timeout=0.0, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", port)
        await site.start()
        self.port = self._runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{self.port}"

    async def end(self) -> None:
        self.gate.set()
        await self._runner.cleanup()

    async def _alive(self) -> None:
        while self.silent:
            await asyncio.sleep(0.01)

    async def _health(self, request: web.Request) -> web.Response:
        await self._alive()
        return web.Response()

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "m", "max_model_len": self._longest}]})

    async def _metrics(self, request: web.Request) -> web.Response:
        await self._alive()
        return web.Response(text=METRICS.format(running=self._running + self.others, waiting=0, blocks=self._blocks))

    async def _tokenize(self, request: web.Request) -> web.Response:
        tokens = self.tokenizer.encode((await request.json())["prompt"], False)
        return web.json_response({"count": len(tokens), "max_model_len": self._longest, "tokens": tokens})

    def _refuse(self, message: str) -> web.Response:
        error = {"message": message, "type": "BadRequestError", "param": None, "code": 400}
        return web.json_response({"error": error}, status=400)

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        if body.get("priority") and not self.priorities:
            return self._refuse("Got priority 1 but Priority scheduling is not enabled.")
        if self.refuses:
            return self._refuse(self.refuses)
        response = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        self._running += 1
        try:
            await self._stream(body, response)
        except (ConnectionError, asyncio.CancelledError):
            self.aborted.append(body)
            raise
        finally:
            self._running -= 1
        return response

    async def _stream(self, body: dict, response: web.StreamResponse) -> None:
        tokens, made = list(body["prompt"]), 0
        while True:
            await self.gate.wait()
            await asyncio.sleep(self.pause)
            if self.breaks is not None and made == self.breaks[0]:
                how = self.breaks[1]
                if how == "hang":
                    await asyncio.Event().wait()
                if how == "error":
                    await self._say(response, {"error": {"message": "EngineCore died", "code": 500}})
                return
            token = next_token(tokens, self.vocab)
            tokens.append(token)
            made += 1
            stops = token in body.get("stop_token_ids", ()) and made > body.get("min_tokens", 0)
            reason = "stop" if stops else "length" if made == body["max_tokens"] else None
            await self._say(response, self._chunk(body, token, reason, first=made == 1))
            if reason is not None:
                break
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": made}
        usage["prompt_tokens_details"] = {"cached_tokens": 16}
        if body.get("stream_options", {}).get("include_usage"):
            await self._say(response, {"id": "cmpl-1", "choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")

    def _chunk(self, body: dict, token: int, reason: str | None, *, first: bool) -> dict:
        choice = {"index": 0, "text": "x", "logprobs": None, "finish_reason": reason, "stop_reason": None}
        if body.get("return_token_ids") and not self.old:
            choice |= {"token_ids": [token], "prompt_token_ids": body["prompt"] if first else None}
        if (count := body.get("logprobs")) is not None:
            top = {f"token_id:{token + i}": -0.5 - i for i in range(max(1, count))}
            choice["logprobs"] = {"tokens": [f"token_id:{token}"], "token_logprobs": [-0.5], "top_logprobs": [top]}
        return {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "m", "choices": [choice]}

    async def _say(self, response: web.StreamResponse, event: dict) -> None:
        await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")


@contextlib.contextmanager
def fakes(count: int) -> Iterator[list[FakeVllm]]:
    """So many servers on a thread of their own; they can be ended one by one with `kill`."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    servers = [FakeVllm() for _ in range(count)]

    def call(work):
        return asyncio.run_coroutine_threadsafe(work, loop).result(10)

    for server in servers:
        call(server.begin())
        server.kill = lambda server=server: call(server.end())
        server.again = lambda server=server: call(server.begin(int(server.url.rpartition(":")[2])))
    try:
        yield servers
    finally:
        for server in servers:
            with contextlib.suppress(Exception):
                call(server.end())
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
