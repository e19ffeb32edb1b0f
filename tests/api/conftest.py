"""A frontend that says what a test tells it to say; the routes over it, in process and behind a real server."""

from __future__ import annotations

import asyncio
import socket
from array import array
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, cast

import httpx
import pytest
import uvicorn

from penstock.api.app import create_app
from penstock.api.http import Application
from penstock.core.clock import ManualClock
from penstock.core.errors import InvalidRequest, PromptTooLong
from penstock.core.request import TokenLogprobs
from penstock.core.sampling import SamplingParams
from penstock.core.service_level import ServiceLevel
from penstock.core.wire.master import History
from penstock.media.loader import MediaLoader
from penstock.obs.exposition import Exposition
from penstock.obs.metrics import Metrics
from penstock.service.embedding import EmbeddingDefaults
from penstock.service.frontend import Frontend, Models
from penstock.service.generation import Generation, Usage
from penstock.text import grammar
from penstock.text.chat import normalise
from penstock.text.detokenizer import Delta
from penstock.text.dialect import PLAIN

EOS = 256


class ByteTokenizer:
    """A token is a byte of UTF-8; one more ends the text."""

    pad_id = 0
    info = {"tokenizer_class": "ByteTokenizer", "chat_template": "{{ messages }}"}  # noqa: RUF012

    special_ids = frozenset({EOS})

    def token_bytes(self, token: int) -> bytes:
        return b"<eos>" if token == EOS else bytes([token])

    def token_piece(self, token: int) -> str:
        return f"<{token:#04x}>"

    def token_text(self, token: int) -> str:
        return self.token_bytes(token).decode("utf-8", "replace")

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: list[int], skip_special_tokens: bool = True) -> str:
        return bytes(token for token in tokens if token != EOS).decode("utf-8", "replace")


class ScriptedRequest(Generation):
    """What a request submits; the scripts of its prompts say what comes of it."""

    def __init__(self, parts: list[ScriptedGeneration], params: SamplingParams, prompts_only: bool) -> None:
        super().__init__(cast(Any, None), params, 0.0, "tiny", prompts_only)
        self._parts = cast(Any, parts)
        self._open = len(parts) * params.n

    def put(self, delta: Delta) -> None:
        self._deltas.append(delta)
        self._open -= delta.finish_reason is not None
        self._tell()

    def fail(self, error: Any) -> None:
        self._error, self._open = error, 0
        self._tell()

    def cancel(self) -> None:
        for part in cast(Any, self._parts):
            part.cancelled.set()


class ScriptedGeneration:
    """One prompt of a request."""

    request: ScriptedRequest
    pooling: str | None

    def __init__(self, first: int, prompt: list[int], params: SamplingParams, level: ServiceLevel) -> None:
        self.first, self.prompt, self.params, self.level = first, prompt, params, level
        self.usage = Usage(prompt_tokens=len(prompt), cached_tokens=min(2, len(prompt)))
        self.timings = {"ttft": 0.25, "queue": 0.125, "decode": 0.5}
        self.cancelled = asyncio.Event()
        self._scored: set[int] = set()  # outputs that have said what they know of the prompt

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
        delta.index += self.first
        self.request.put(delta)

    def logprobs(self, tokens: list[int]) -> list[TokenLogprobs] | None:
        if self.params.logprobs is None:
            return None
        return [
            TokenLogprobs(-0.5, 1, [(token, -0.5), (EOS, float("-inf"))][: self.params.logprobs]) for token in tokens
        ]

    def fail(self, error: Exception) -> None:
        self.request.fail(error)


def hello(generation: ScriptedGeneration) -> None:
    """The default script: every output says "Hello" and stops."""
    for index in range(generation.params.n):
        generation.say("Hel", index)
        generation.say("lo", index)
        generation.put(Delta(index, "", [EOS], generation.logprobs([EOS]), "stop"))


def embedded(generation: ScriptedGeneration) -> None:
    """The default script of embeddings: by how many tokens of each kind a prompt has."""
    counts = [float(sum(token % 4 == kind for token in generation.prompt)) for kind in range(4)]
    generation.put(Delta(0, "", [], finish_reason="stop", embedding=array("d", counts)))


class ScriptedFrontend:
    served_names = ["org/tiny", "tiny"]  # noqa: RUF012
    max_model_len = 128
    vocab_size = 257
    embedding_size = 4
    embedding = EmbeddingDefaults()
    created = 1_700_000_000
    unhealthy_reason = ""
    asleep = False
    requests = 3
    modelled: dict[str, int] | None = None
    modelled_some = False
    dialect = PLAIN
    media: MediaLoader | None = None
    fingerprint: str | None = "f00d"

    def __init__(self) -> None:
        self.tokenizer = ByteTokenizer()
        self.default_sampling: dict[str, object] = {}
        self.ready = self.healthy = True
        self.script: Callable[[ScriptedGeneration], object] = hello
        self.embed: Callable[[ScriptedGeneration], object] = embedded
        self.clock = ManualClock()
        self.arrivals: list[float] = []
        self.models: list[str] = []
        self.salts: list[str] = []
        self.predictions: list[str] = []
        self.request_ids: list[str] = []
        self.conversations: list[list[dict[str, Any]]] = []
        self.submitted: list[ScriptedGeneration] = []
        self.on_encode: Callable[[], object] = lambda: None
        self.encoding_blocked = False
        self.on_block: Callable[[], object] = lambda: None
        self.encoding_cancelled = asyncio.Event()

    def instance_states(self) -> list[dict[str, str]]:
        return [{"name": "engine-0", "role": "any", "state": "ready", "trouble": ""}]

    async def overview(self) -> dict[str, Any]:
        placed = {"at": "2026-11-25T03:00:00.000Z", "request_id": "r-0badc0de", "prefill": "engine-0", "decode": None}
        moved = placed | {"source": "engine-0", "target": "engine-1", "reason": "slow"}
        master = {"decisions": [placed], "moves": [], "relocations": [moved]}
        return {"model": "org/tiny", "frontend": {}, "master": master}

    async def history(self, request: str) -> History:
        return History(1, 7, b'[{"id":"r-0badc0de"}]' if request == "r" else b"")

    async def encode(self, text: str, add_special_tokens: bool, max_model_len: int | None = None) -> list[int]:
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
        size: int,
        add_special_tokens: bool = False,
        add_generation_prompt: bool,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        template_kwargs: dict[str, Any] | None,
        max_model_len: int | None = None,
    ) -> list[int]:
        self.conversations.append(messages)
        assert size >= sum(len(str(message.get("content") or "")) for message in messages)
        text = "".join(f"{m['role']}:{m.get('content', '')}\n" for m in normalise(messages))
        if tools:
            text = f"tools:{[tool['function']['name'] for tool in tools]}\n{text}"
        if template_kwargs:
            text += repr(template_kwargs)
        text = text.rstrip("\n") if continue_final_message else text
        return await self.encode(text + ("assistant:" if add_generation_prompt else ""), add_special_tokens)

    async def check_grammar(self, params: SamplingParams) -> None:
        assert params.structured_outputs is not None
        grammar.check(params.structured_outputs)

    async def decode(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens)

    def submit(
        self,
        prompts: list[list[int]],
        params: SamplingParams,
        *,
        request_id: str,
        model: str,
        level: ServiceLevel,
        arrival: float,
        cache_salt: str = "",
        prompts_only: bool = False,
        prediction: Sequence[int] = (),
        pooling: str | None = None,
        shown: frozenset[int] = frozenset(),
    ) -> ScriptedRequest:
        self.predictions.append(bytes(prediction).decode())
        self.salts.append(cache_salt)
        self.models.append(model)
        self.arrivals.append(arrival)
        self.request_ids.append(request_id)
        if not all(prompts):
            raise InvalidRequest("prompt: empty", "prompt")
        longest, output = self.max_model_len, int(pooling is None)
        if too_long := [len(prompt) for prompt in prompts if len(prompt) + output > longest]:
            raise PromptTooLong.of(too_long[0], longest, output=output)
        parts = [ScriptedGeneration(i * params.n, prompt, params, level) for i, prompt in enumerate(prompts)]
        request = ScriptedRequest(parts, params, prompts_only)
        for part in parts:
            part.request = request
            part.pooling = pooling
            self.submitted.append(part)
            (self.script if pooling is None else self.embed)(part)
        return request

    def check_ready(self) -> None:
        Frontend.check_ready(cast(Any, self))

    def check_known(self) -> None:
        Frontend.check_known(cast(Any, self))

    def served_model(self, name: str | None) -> str:
        return name or self.served_names[0]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def frontend() -> ScriptedFrontend:
    return ScriptedFrontend()


@pytest.fixture
def exposition() -> Exposition:
    return Exposition([Metrics("org/tiny", ["engine-0"])])


@pytest.fixture
def models(frontend: ScriptedFrontend) -> Models:
    return Models([cast(Any, frontend)])


@pytest.fixture
def make_app(models: Models, exposition: Exposition) -> Callable[..., Application]:
    return lambda **options: create_app(models, exposition, **options)


@pytest.fixture
def make_client(make_app: Callable[..., Application]) -> Callable[..., httpx.AsyncClient]:
    """A client of the application in this process; an error that nothing answers raises in the test."""

    def make(**options: Any) -> httpx.AsyncClient:
        return httpx.AsyncClient(transport=httpx.ASGITransport(make_app(**options)), base_url="http://test")

    return make


@pytest.fixture
async def client(make_client: Callable[..., httpx.AsyncClient]) -> AsyncIterator[httpx.AsyncClient]:
    async with make_client() as client:
        yield client


@pytest.fixture
async def url(make_app: Callable[..., Application]) -> AsyncIterator[str]:
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
