"""POST /v1/completions"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BeforeValidator, Field, SkipValidation
from starlette.requests import Request
from starlette.types import Send

from penstock.api.http import Route, UntilDisconnect, read_body
from penstock.api.logprobs import CompletionLogprobs, prompt_logprobs
from penstock.api.media import encode_with_urls
from penstock.api.openai import Envelope, beside, head, timing_body, usage_body
from penstock.api.prompts import encoded
from penstock.api.schema import (
    AnswerDefaults,
    GenerationBody,
    Prompts,
    Strings,
    prompts_of,
    sampling_params,
    service_level,
    whole_number,
)
from penstock.api.sse import send_events, send_whole
from penstock.api.structured import check_grammar
from penstock.core.errors import InvalidRequest
from penstock.core.sampling import MAX_LOGPROBS, SamplingParams
from penstock.core.service_level import ServiceLevel
from penstock.service.generation import Usage
from penstock.service.intake import check_named, check_room, longest_whole, truncated
from penstock.text.detokenizer import Delta

if TYPE_CHECKING:
    from penstock.service.frontend import Frontend, Models


class CompletionBody(GenerationBody):
    """POST /v1/completions"""

    default_max_tokens = 16

    prompt: Annotated[Prompts, SkipValidation]  # `prompts_of` looks at it: faster, and it says more
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS), BeforeValidator(whole_number)] | None = (
        None  # vLLM, too, gives all of them to chats only
    )
    add_special_tokens: bool = True
    thinking: dict[str, Any] | None = None
    urls: Strings | None = None
    images: Strings | None = None

    @property
    def pictures(self) -> tuple[str, list[str]] | None:
        """Where URLs of images came, and these, as RTP-LLM has them under either name; None without any. A text has
        `<image>` for each, and token ids the model's own token for an image or a video."""
        return ("urls", self.urls) if self.urls else ("images", self.images) if self.images else None

    @property
    def only_echoes(self) -> bool:
        """Whether the prompt is all that is wanted: its text, and perhaps its log-probabilities."""
        return bool(self.echo) and self.max_tokens == 0

    def wishes(self) -> dict[str, Any]:
        wishes = super().wishes() | {"thinking": self.thinking}
        if self.logprob_token_ids is not None:
            wishes["logprobs"] = 0
        if self.only_echoes:
            wishes["max_tokens"] = 1  # an engine always samples one; it is dropped
        if self.echo and self.prompt_logprobs is None:
            wishes["prompt_logprobs"] = self.logprobs
        return wishes

    def check(self) -> None:
        super().check()
        if self.urls and self.images:
            raise InvalidRequest("images: given, allowed only without urls, which says the same", "images")
        if (pictures := self.pictures) is not None:
            field = pictures[0]
            if not isinstance(self.prompt, str) and not _is_ids(self.prompt):
                raise InvalidRequest(f"{field}: given, allowed only with a single prompt", field)
            if self.truncate_prompt_tokens is not None:
                name = "truncate_prompt_tokens"
                raise InvalidRequest(f"{name}: {self.truncate_prompt_tokens}, allowed only without images", name)
        if self.max_tokens == 0 and not self.echo:
            raise InvalidRequest(
                "max_tokens: 0, allowed is a whole number at least 1, or 0 with echo: true", "max_tokens"
            )
        if self.only_echoes and self.logprob_token_ids is not None:
            raise InvalidRequest("logprob_token_ids: given, allowed only with max_tokens above 0", "logprob_token_ids")
        if self.only_echoes and self.min_tokens:
            raise InvalidRequest(
                f"min_tokens: {self.min_tokens}, allowed is at most max_tokens, which is 0", "min_tokens"
            )
        if self.echo and self.logprobs is not None and self.use_beam_search:
            raise InvalidRequest("echo: true with logprobs, allowed only without use_beam_search: true", "echo")
        if self.echo and self.logprobs is not None and self.prompt_logprobs not in (None, self.logprobs):
            raise InvalidRequest(
                f"prompt_logprobs: {self.prompt_logprobs}, with echo and logprobs allowed is the same as logprobs, "
                f"{self.logprobs}",
                "prompt_logprobs",
            )


def routes(models: Models, defaults: AnswerDefaults) -> list[Route]:
    async def completions(request: Request) -> UntilDisconnect:
        body = defaults.applied(await read_body(request, CompletionBody))
        level = service_level(body, request.headers)
        return UntilDisconnect(partial(_answer, models.of(body.model), body, level, request.state.request_id))

    return [Route("POST", "/v1/completions", completions, CompletionBody)]


async def _answer(frontend: Frontend, body: CompletionBody, level: ServiceLevel, request_id: str, send: Send) -> None:
    arrival = frontend.clock.now()
    model = frontend.served_model(body.model)
    frontend.check_ready()
    params = sampling_params(body, frontend.default_sampling, frontend.vocab_size)
    if params.structured_outputs is not None:
        await check_grammar(frontend, params, body.named)
    max_model_len = longest_whole(params, frontend.max_model_len)
    given = prompts_of(body.prompt, frontend.vocab_size, max_model_len)
    seen: dict[str, Any] = {}
    if (pictures := body.pictures) is not None:
        prompt = await encode_with_urls(frontend, given[0], pictures[1], pictures[0], frontend.max_model_len)
        whole, seen = [prompt.tokens], prompt.seen
    else:
        whole = await encoded(frontend, given, body.add_special_tokens, max_model_len)
    prompts = [list(truncated(prompt, params, frontend.max_model_len)) for prompt in whole]
    check_room(max(map(len, prompts)), body.asked_tokens, frontend.max_model_len)
    check_named(prompts, params, frontend.max_model_len, frontend.vocab_size)
    echoes = [""] * len(given)
    if body.echo:
        asked: Iterable[tuple[str | list[int], list[int], list[int]]] = zip(given, prompts, whole, strict=True)
        echoes = await asyncio.gather(*(_echo(frontend, text, kept, kept != all_) for text, kept, all_ in asked))
    with frontend.submit(
        prompts,
        params,
        request_id=request_id,
        model=model,
        level=level,
        arrival=arrival,
        cache_salt=body.prefix_salt,
        prompts_only=body.only_echoes,
        **seen,
    ) as generation:
        shape = CompletionShape(frontend, body, params, model, request_id, prompts, echoes)
        if body.stream:
            await send_events(send, generation, shape, request_id)
        else:
            await send_whole(send, generation, shape)


def _is_ids(prompt: Any) -> bool:
    return isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], int)


async def _echo(frontend: Frontend, given: str | list[int], kept: list[int], cut: bool) -> str:
    """A prompt's text: as it was given, unless some of it was cut off."""
    return given if isinstance(given, str) and not cut else await frontend.decode(kept)


class CompletionShape:
    """See `sse.Shape`."""

    def __init__(
        self,
        frontend: Frontend,
        body: CompletionBody,
        params: SamplingParams,
        model: str,
        request_id: str,
        prompts: Sequence[list[int]],
        echoes: Sequence[str],
    ) -> None:
        self._head = head(f"cmpl-{request_id}", "text_completion", model, body)
        self._token_ids = bool(body.return_token_ids)
        self._prompts = [prompt for prompt in prompts for _ in range(params.n)]  # by output
        self._echoes = [echo for echo in echoes for _ in range(params.n)]
        self._logprobs: list[CompletionLogprobs] = []  # by output, where asked for
        if params.logprobs is not None:
            how = frontend.tokenizer, params.skip_special_tokens, body.return_tokens_as_token_ids
            self._logprobs = [CompletionLogprobs(*how) for _ in self._prompts]
        self._envelope = Envelope(self._head, body.include_usage)
        self.failure = self._envelope.failure
        self._timed = body.shows_timing
        self._beside = beside(frontend, body)
        self.counts = body.continuous_usage
        self.count = self._envelope.count
        self._tokenizer = frontend.tokenizer
        self._scores_echo = bool(body.echo) and params.logprobs is not None
        self._scores_prompt = body.prompt_logprobs is not None

    def opening(self) -> list[bytes]:
        return [
            self._envelope.event(self._piece(i, echo) | self._prompt_ids(i))
            for i, echo in enumerate([""] * len(self._echoes) if self._scores_echo else self._echoes)
            if echo or self._token_ids
        ]

    def content(self, delta: Delta) -> bytes:
        # an echo with log-probabilities comes with them, and they come with the first token
        first = self._scores_echo and delta.prompt_logprobs is not None
        text = self._echoes[delta.index] + delta.text if first else delta.text
        return self._envelope.event(self._piece(delta.index, text, delta))

    def closing(self, usage: Usage) -> bytes:
        return self._envelope.closing(self._used(usage))

    def _used(self, usage: Usage) -> dict[str, Any]:
        return {"usage": usage_body(usage), **(timing_body(usage) if self._timed else {})}

    def whole(self, outputs: list[Delta], usage: Usage) -> dict[str, Any]:
        absent = {"prompt_logprobs": None, "token_ids": None, "prompt_token_ids": None}
        choices = [
            absent
            | self._piece(output.index, self._echoes[output.index] + output.text, output)
            | self._prompt_ids(output.index)
            for output in outputs
        ]
        return {**self._head, "choices": choices, **self._used(usage), **self._beside}

    def _piece(self, index: int, text: str, delta: Delta | None = None) -> dict[str, Any]:
        """A choice, or what an event brings of it."""
        choice: dict[str, Any] = {"index": index, "text": text, "logprobs": None, "finish_reason": None}
        if self._token_ids:
            choice["token_ids"] = [] if delta is None else delta.tokens
        if delta is None:
            return choice
        prompt, found = self._prompts[index], delta.prompt_logprobs
        if delta.logprobs is not None:
            echoed = (prompt, self._echoes[index]) if self._scores_echo and found is not None else ()
            choice["logprobs"] = self._logprobs[index].piece(delta, delta.logprobs, *echoed)
        if self._scores_prompt:
            choice["prompt_logprobs"] = None if found is None else prompt_logprobs(self._tokenizer, prompt, found)
        if delta.finish_reason is not None:
            choice |= {"finish_reason": delta.finish_reason, "stop_reason": delta.stop_reason}
        return choice

    def _prompt_ids(self, index: int) -> dict[str, Any]:
        return {"prompt_token_ids": self._prompts[index]} if self._token_ids else {}
