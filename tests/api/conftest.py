"""A frontend that says what a test tells it to say; the routes over it, in process and behind a real server."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any, cast

import httpx
import pytest
import uvicorn
from fastapi import FastAPI

from penstock.api.app import create_app
from penstock.core.clock import ManualClock
from penstock.core.errors import InvalidRequest
from penstock.core.request import TokenLogprobs
from penstock.core.sampling import SamplingParams
from penstock.core.service_level import ServiceLevel
from penstock.obs.metrics import Metrics
from penstock.service.output import Delta, Usage
from penstock.text.chat import normalise

EOS = 256


class ByteTokenizer:
    """A token is a byte of UTF-8; one more ends the text."""

    special_ids = frozenset({EOS})

    def token_bytes(self, token: int) -> bytes:
        return b"<eos>" if token == EOS else bytes([token])

    def token_text(self, token: int) -> str:
        return self.token_bytes(token).decode("utf-8", "replace")

    def decode(self, tokens: list[int]) -> str:
        return bytes(token for token in tokens if token != EOS).decode("utf-8", "replace")


class ScriptedGeneration:
    def __init__(self, prompt: list[int], params: SamplingParams, request_id: str, level: ServiceLevel) -> None:
        self.prompt, self.params, self.request_id, self.level = prompt, params, request_id, level
        self.usage = Usage(prompt_tokens=len(prompt), cached_tokens=min(2, len(prompt)))
        self.cancelled = asyncio.Event()
        self._deltas: list[Delta] = []
        self._error: Exception | None = None
        self._unfinished = params.n
        self._scored: set[int] = set()  # outputs that have said what they know of the prompt
        self._tell: Callable[[], object] = lambda: None

    def say(self, text: str, index: int = 0, finish: str | None = None, stop: int | str | None = None) -> None:
        """A delta of this text; the generation ends with the last output's finish."""
        tokens = list(text.encode())
        self.put(Delta(index, text, tokens, self.logprobs(tokens), finish, stop))

    def put(self, delta: Delta) -> None:
        self.usage.completion_tokens += len(delta.tokens)
        if self.params.prompt_logprobs is not None and delta.tokens and delta.index not in self._scored:
            self._scored.add(delta.index)
            delta.prompt_logprobs = [
                TokenLogprobs(-0.25 * token, 2, [(EOS, -0.125)][: self.params.prompt_logprobs])
                for token in self.prompt[1:]
            ]
        self._deltas.append(delta)
        self._unfinished -= delta.finish_reason is not None
        self._tell()

    def logprobs(self, tokens: list[int]) -> list[TokenLogprobs] | None:
        if self.params.logprobs is None:
            return None
        return [
            TokenLogprobs(-0.5, 1, [(token, -0.5), (EOS, float("-inf"))][: self.params.logprobs]) for token in tokens
        ]

    def fail(self, error: Exception) -> None:
        self._error, self._unfinished = error, 0
        self._tell()

    def cancel(self) -> None:
        self.cancelled.set()

    def listen(self, tell: Callable[[], object]) -> None:
        self._tell = tell

    def take(self) -> list[Delta]:
        if not self._deltas and self._error is not None:
            raise self._error
        taken, self._deltas = self._deltas, []
        return taken

    @property
    def over(self) -> bool:
        return not self._unfinished and not self._deltas


def hello(generation: ScriptedGeneration) -> None:
    """The default script: every output says "Hello" and stops."""
    for index in range(generation.params.n):
        generation.say("Hel", index)
        generation.say("lo", index)
        generation.put(Delta(index, "", [EOS], generation.logprobs([EOS]), "stop"))


class ScriptedFrontend:
    served_names = ["org/tiny", "tiny"]  # noqa: RUF012
    max_model_len = 128
    vocab_size = 257
    created = 1_700_000_000
    unhealthy_reason = ""
    modelled: dict[str, int] | None = None

    def __init__(self) -> None:
        self.tokenizer = ByteTokenizer()
        self.default_sampling: dict[str, object] = {}
        self.ready = self.healthy = True
        self.draining = False
        self.script: Callable[[ScriptedGeneration], object] = hello
        self.clock = ManualClock()
        self.arrivals: list[float] = []
        self.models: list[str] = []
        self.salts: list[str] = []
        self.submitted: list[ScriptedGeneration] = []
        self.on_encode: Callable[[], object] = lambda: None
        self.encoding_blocked = False
        self.on_block: Callable[[], object] = lambda: None
        self.encoding_cancelled = asyncio.Event()

    def instance_states(self) -> list[dict[str, str]]:
        return [{"name": "engine-0", "role": "any", "state": "ready", "trouble": ""}]

    async def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        if self.encoding_blocked:
            self.on_block()
            try:
                await asyncio.Event().wait()
            finally:
                self.encoding_cancelled.set()
        self.on_encode()
        return list(text.encode()) + ([EOS] if add_special_tokens and text.startswith("special") else [])

    async def encode_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool = False,
        template_kwargs: dict[str, Any] | None,
    ) -> list[int]:
        text = "".join(f"{m['role']}:{m.get('content', '')}\n" for m in normalise(messages))
        if template_kwargs:
            text += repr(template_kwargs)
        text = text.rstrip("\n") if continue_final_message else text
        return await self.encode(text + ("assistant:" if add_generation_prompt else ""), False)

    async def decode(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens)

    def submit(
        self,
        prompt: list[int],
        params: SamplingParams,
        *,
        request_id: str,
        model: str,
        level,
        arrival: float,
        cache_salt: str = "",
    ) -> ScriptedGeneration:
        self.salts.append(cache_salt)
        self.models.append(model)
        self.arrivals.append(arrival)
        if not prompt:
            raise InvalidRequest("prompt: empty", "prompt")
        generation = ScriptedGeneration(prompt, params, request_id, level)
        self.submitted.append(generation)
        self.script(generation)
        return generation


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def frontend() -> ScriptedFrontend:
    return ScriptedFrontend()


@pytest.fixture
def metrics() -> Metrics:
    return Metrics("org/tiny", ["engine-0"])


@pytest.fixture
def make_app(frontend: ScriptedFrontend, metrics: Metrics) -> Callable[..., FastAPI]:
    return lambda **options: create_app(cast(Any, frontend), metrics, **options)


@pytest.fixture
def make_client(make_app: Callable[..., FastAPI]) -> Callable[..., httpx.AsyncClient]:
    """A client of the application in this process; an error that nothing answers raises in the test."""

    def make(**options: Any) -> httpx.AsyncClient:
        return httpx.AsyncClient(transport=httpx.ASGITransport(make_app(**options)), base_url="http://test")

    return make


@pytest.fixture
async def client(make_client: Callable[..., httpx.AsyncClient]) -> AsyncIterator[httpx.AsyncClient]:
    async with make_client() as client:
        yield client


@pytest.fixture
async def url(make_app: Callable[..., FastAPI]) -> AsyncIterator[str]:
    """The address of a real server on loopback."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    config = uvicorn.Config(make_app(), log_level="warning", lifespan="off", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"  # connections wait in the listener's queue until it serves
    server.should_exit = True
    await serving
