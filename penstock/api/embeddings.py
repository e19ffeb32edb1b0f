"""POST /v1/embeddings, in OpenAI's shape; and over the same embeddings /v1/rerank, as Jina and Cohere have it, and
vLLM's /v1/score. These two compare texts by the cosine of the angle between their embeddings: no model here reads two
texts as a pair."""

from __future__ import annotations

import asyncio
import base64
import struct
import time
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import msgspec
from pydantic import Field, SkipValidation
from starlette.requests import Request
from starlette.types import Send

from penstock.api.http import Route, UntilDisconnect, read_body
from penstock.api.prompts import encoded
from penstock.api.schema import (
    MAX_PROMPTS,
    SHORT,
    Int32,
    Messages,
    Prompts,
    ServedBody,
    Strings,
    check_messages,
    check_turn,
    prompts_of,
    service_level,
)
from penstock.api.sse import encode, send_json
from penstock.core.errors import InvalidRequest, PromptTooLong
from penstock.core.sampling import SamplingParams
from penstock.core.service_level import ServiceLevel
from penstock.service.embedding import check_dimensions, finished
from penstock.service.generation import Usage
from penstock.service.intake import truncated

if TYPE_CHECKING:
    from penstock.service.frontend import Frontend, Models

Shown = TypeVar("Shown")
MAX_INPUTS = 2048  # to embed, as OpenAI allows
AT_ONCE = 16  # vectors that are put together before others get their turn


class EmbeddingBody(ServedBody):
    """POST /v1/embeddings"""

    input: Annotated[Prompts | None, SkipValidation] = None  # `prompts_of` looks at it
    messages: Messages | None = None  # instead
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    encoding_format: Annotated[Literal["float", "base64"] | None, SkipValidation] = None
    dimensions: Int32 | None = None
    normalize: bool | None = None
    use_activation: bool | None = None  # the same
    padding: Annotated[Literal["do_not_pad", "max_length"] | None, SkipValidation] = None
    add_special_tokens: bool | None = None  # to texts, unless this is false; to messages, where it is true

    @property
    def normalizes(self) -> bool | None:
        """None is as the model wants it."""
        return self.use_activation if self.normalize is None else self.normalize

    def check(self) -> None:
        super().check()
        check_turn(self.add_generation_prompt, self.continue_final_message)
        if (self.input is None) == (self.messages is None):
            raise InvalidRequest("input: exactly one of input and messages is needed", "input")
        check_messages(self.messages or [])
        if {True, False} == {self.normalize, self.use_activation}:
            raise InvalidRequest("use_activation: not the same as normalize, which means the same", "use_activation")
        if self.padding not in (None, "do_not_pad", "max_length"):
            raise InvalidRequest(
                f"padding: {SHORT.repr(self.padding)}, allowed are 'do_not_pad' and 'max_length'", "padding"
            )
        if self.encoding_format not in (None, "float", "base64"):
            raise InvalidRequest(
                f"encoding_format: {SHORT.repr(self.encoding_format)}, allowed are 'float' and 'base64'",
                "encoding_format",
            )


class RerankBody(ServedBody):
    """POST /v1/rerank: documents by how near their embeddings are to the query's."""

    query: str
    documents: Annotated[list[str], Field(fail_fast=True)]
    top_n: Int32 | None = None
    return_documents: bool = True
    add_special_tokens: bool = True

    def check(self) -> None:
        super().check()
        _check_some("query", [self.query])
        _check_some("documents", self.documents)
        if self.top_n is not None and self.top_n < 0:
            raise InvalidRequest(f"top_n: {self.top_n}, allowed is a whole number at least 0, which is all", "top_n")


class ScoreBody(ServedBody):
    """POST /v1/score: how near the embeddings of two texts are, for each pair; a single one is paired with each."""

    text_1: Strings
    text_2: Strings
    add_special_tokens: bool = True

    def check(self) -> None:
        super().check()
        _check_some("text_1", self.text_1)
        _check_some("text_2", self.text_2)
        if len(self.text_1) not in (1, len(self.text_2)):
            raise InvalidRequest(
                f"text_1: {len(self.text_1)} texts, allowed is one, or as many as text_2 has, {len(self.text_2)}",
                "text_1",
            )


def routes(models: Models) -> list[Route]:
    def route(path: str, body: type[ServedBody], work: Any) -> Route:
        async def endpoint(request: Request) -> UntilDisconnect:
            asked = await read_body(request, body)
            level = service_level(asked, request.headers)
            embedder = _Embedder(models.of(asked.model), asked, level, request.state.request_id)
            return UntilDisconnect(partial(work, embedder, asked))

        endpoint.__name__ = path[1:].replace("/", "_")  # names its operation in the OpenAPI document
        return Route("POST", path, endpoint, body)

    return [
        route("/v1/embeddings", EmbeddingBody, _embeddings),
        *(route(path, RerankBody, _rerank) for path in ("/v1/rerank", "/v2/rerank", "/rerank")),
        *(route(path, ScoreBody, _score) for path in ("/v1/score", "/score")),
    ]


class _Embedder:
    """What the routes have in common: one request's texts to vectors, all or none.

    Attributes:
        model: the name to answer under.
        usage: known once it has embedded.
    """

    def __init__(self, frontend: Frontend, body: ServedBody, level: ServiceLevel, request_id: str) -> None:
        self.request_id = request_id
        self.model = frontend.served_model(body.model)
        self.usage = Usage(0)
        self._arrival = frontend.clock.now()
        self._frontend, self._body, self._level = frontend, body, level

    async def embed(
        self,
        given: Any,
        field: str,
        *,
        add_special_tokens: bool = True,
        dimensions: int | None = None,
        normalize: bool | None = None,
        most: int = MAX_INPUTS,
        show: Callable[[list[float]], Shown],
    ) -> list[Shown]:
        """
        Args:
            given: as `prompts_of` takes it; or a body with messages.
            field: where it came.
            normalize: None is as the model wants it.
            most: how many there may be.
            show: what each vector becomes at once, since all together take much memory as lists.
        """
        frontend = self._frontend
        frontend.check_ready()
        check_dimensions(dimensions, frontend.embedding_size)
        prompts = await self._prompts(given, field, add_special_tokens, most)
        with frontend.submit(
            prompts,
            _cut(self._body),
            request_id=self.request_id,
            model=self.model,
            level=self._level,
            arrival=self._arrival,
            cache_salt=self._body.prefix_salt,
            pooling=frontend.embedding.pooling,
        ) as generation:
            outputs = await generation.whole()
            self.usage = generation.usage
        normal = frontend.embedding.normalize if normalize is None else normalize
        shown = []
        for i, output in enumerate(outputs):
            assert output.embedding is not None
            shown.append(show(finished(output.embedding, dimensions, normal)))
            if i % AT_ONCE == AT_ONCE - 1:
                await asyncio.sleep(0)
        return shown

    async def _prompts(self, given: Any, field: str, add_special_tokens: bool, most: int) -> list[list[int]]:
        """Raises InvalidRequest or PromptTooLong naming the field."""
        frontend, params = self._frontend, _cut(self._body)
        longest = frontend.max_model_len
        bound = longest + 1 if params.truncate_prompt_tokens is None else None
        try:
            if isinstance(given, EmbeddingBody):
                whole = [await self._chat(given, bound)]
            else:
                listed = prompts_of(given, frontend.vocab_size, bound, field=field, most=most)
                whole = await encoded(frontend, listed, add_special_tokens, bound, field)
        except PromptTooLong:
            raise PromptTooLong.more_than(longest, output=0).of_field(field) from None
        prompts = [list(truncated(prompt, params, longest, generates=False)) for prompt in whole]
        if (count := max(map(len, prompts))) > longest:
            raise PromptTooLong.of(count, longest, output=0).of_field(field)
        if isinstance(self._body, EmbeddingBody) and self._body.padding == "max_length":
            self._pad(prompts)
        return prompts

    def _pad(self, prompts: list[list[int]]) -> None:
        """To the length that they are cut to, or the longest that there is. Raises InvalidRequest."""
        pad, cut = self._frontend.tokenizer.pad_id, self._body.truncate_prompt_tokens
        if pad is None:
            raise InvalidRequest("padding: 'max_length', allowed only where the tokenizer has a pad_token", "padding")
        length = cut if cut is not None and cut > 0 else self._frontend.max_model_len
        for prompt in prompts:
            prompt.extend([pad] * (length - len(prompt)))

    async def _chat(self, body: EmbeddingBody, bound: int | None) -> list[int]:
        assert body.messages is not None
        return await self._frontend.encode_chat(
            body.messages,
            size=body.size,
            add_special_tokens=bool(body.add_special_tokens),
            add_generation_prompt=bool(body.add_generation_prompt),
            continue_final_message=bool(body.continue_final_message),
            template_kwargs=body.chat_template_kwargs,
            max_model_len=bound,
        )

    def answer(self, kind: str, **fields: Any) -> dict[str, Any]:
        usage = {
            "prompt_tokens": self.usage.prompt_tokens,
            "total_tokens": self.usage.prompt_tokens,
            "prompt_tokens_details": {"cached_tokens": self.usage.cached_tokens},
        }
        return {"id": f"{kind}-{self.request_id}", "model": self.model, "usage": usage, **fields}


async def _embeddings(embedder: _Embedder, body: EmbeddingBody, send: Send) -> None:
    shown = await embedder.embed(
        *((body.input, "input") if body.messages is None else (body, "messages")),
        add_special_tokens=body.add_special_tokens is not False,
        dimensions=body.dimensions,
        normalize=body.normalizes,
        show=_packed if body.encoding_format == "base64" else _json,
    )
    data = [{"index": i, "object": "embedding", "embedding": vector} for i, vector in enumerate(shown)]
    await send_json(send, embedder.answer("embd", object="list", created=int(time.time()), data=data))


async def _rerank(embedder: _Embedder, body: RerankBody, send: Send) -> None:
    texts = [body.query, *body.documents]
    query, *documents = await _directions(embedder, texts, "documents", body.add_special_tokens)
    scores = [_dot(query, document) for document in documents]
    best = sorted(range(len(scores)), key=lambda i: (-scores[i], i))[: body.top_n or None]
    results = [
        {"index": i, "relevance_score": scores[i]}
        | ({"document": {"text": body.documents[i]}} if body.return_documents else {})
        for i in best
    ]
    await send_json(send, embedder.answer("rerank", results=results))


async def _score(embedder: _Embedder, body: ScoreBody, send: Send) -> None:
    found = await _directions(embedder, [*body.text_1, *body.text_2], "text_2", body.add_special_tokens)
    first, second = found[: len(body.text_1)], found[len(body.text_1) :]
    pairs = zip(first * (len(second) // len(first)), second, strict=True)
    data = [{"index": i, "object": "score", "score": _dot(*pair)} for i, pair in enumerate(pairs)]
    await send_json(send, embedder.answer("score", object="list", created=int(time.time()), data=data))


async def _directions(
    embedder: _Embedder, texts: list[str], field: str, add_special_tokens: bool
) -> list[array[float]]:
    """Vectors of length 1."""
    return await embedder.embed(
        texts,
        field,
        add_special_tokens=add_special_tokens,
        normalize=True,
        most=2 * MAX_INPUTS,
        show=_doubles,
    )


def _cut(body: ServedBody) -> SamplingParams:
    """How prompts are cut. Raises InvalidRequest naming the field."""
    side = "left" if body.truncation_side is None else body.truncation_side
    return SamplingParams(truncate_prompt_tokens=body.truncate_prompt_tokens, truncation_side=side)


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    """A cosine, for vectors of length 1."""
    return max(-1.0, min(1.0, sum([x * y for x, y in zip(a, b, strict=True)])))


def _doubles(vector: list[float]) -> array[float]:
    return array("d", vector)


def _packed(vector: list[float]) -> msgspec.Raw:
    """float32, little-endian, in base64: what OpenAI's clients ask for."""
    return _json(base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode())


def _json(value: object) -> msgspec.Raw:
    return msgspec.Raw(encode(value))


def _check_some(field: str, texts: list[str]) -> None:
    """Raises `InvalidRequest` unless there is a text, and not too many, and something in each."""
    if not 1 <= len(texts) <= MAX_PROMPTS:
        raise InvalidRequest(f"{field}: {len(texts)} texts, allowed are 1 to {MAX_PROMPTS}", field)
    if not all(texts):
        raise InvalidRequest(f"{field}: an empty text, at least one token is needed", field)
