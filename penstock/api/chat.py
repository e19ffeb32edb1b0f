"""POST /v1/chat/completions"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.types import Send

from penstock.api.http import Route, UntilDisconnect, read_body
from penstock.api.logprobs import chat_logprobs, prompt_logprobs
from penstock.api.openai import Envelope, usage_body
from penstock.api.schema import ChatBody, Prediction, sampling_params, service_level
from penstock.api.sse import send_events, send_whole
from penstock.api.structured import check_grammar
from penstock.core.errors import InvalidRequest, PromptTooLong
from penstock.core.service_level import ServiceLevel
from penstock.service.generation import Usage
from penstock.service.intake import check_named, check_room, longest_whole, truncated
from penstock.text.detokenizer import Delta

if TYPE_CHECKING:
    from penstock.service.frontend import Frontend


def routes(frontend: Frontend) -> list[Route]:
    async def chat_completions(request: Request) -> UntilDisconnect:
        body = await read_body(request, ChatBody)
        level = service_level(body, request.headers)
        return UntilDisconnect(partial(_answer, frontend, body, level, request.state.request_id))

    return [Route("POST", "/v1/chat/completions", chat_completions, ChatBody)]


async def _answer(frontend: Frontend, body: ChatBody, level: ServiceLevel, request_id: str, send: Send) -> None:
    arrival = frontend.clock.now()
    model = frontend.served_model(body.model)
    frontend.check_ready()
    params = sampling_params(body, frontend.default_sampling, frontend.vocab_size)
    if params.structured_outputs is not None:
        await check_grammar(frontend, params, body.named)
    prompt = await frontend.encode_chat(
        body.messages,
        size=body.size,
        add_generation_prompt=body.opens_turn,
        continue_final_message=bool(body.continue_final_message),
        template_kwargs=body.chat_template_kwargs,
        max_model_len=longest_whole(params, frontend.max_model_len),
    )
    prompt = list(truncated(prompt, params, frontend.max_model_len))
    asked_in = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    check_room(len(prompt), body.asked_tokens, frontend.max_model_len, asked_in)
    check_named([prompt], params, frontend.max_model_len, frontend.vocab_size)
    prediction = await _predicted(frontend, body.prediction)
    with frontend.submit(
        [prompt],
        params,
        request_id=request_id,
        model=model,
        level=level,
        arrival=arrival,
        cache_salt=body.prefix_salt,
        prediction=prediction,
    ) as generation:
        shape = ChatShape(frontend, body, model, request_id, prompt, params.n)
        if body.stream:
            await send_events(send, generation, shape, request_id)
        else:
            await send_whole(send, generation, shape)


async def _predicted(frontend: Frontend, prediction: Prediction | None) -> list[int]:
    if prediction is None:
        return []
    try:
        return await frontend.encode(prediction.text, False, frontend.max_model_len)
    except PromptTooLong:
        longest = frontend.max_model_len
        raise InvalidRequest(f"prediction: more than the {longest} tokens of the context", "prediction") from None
    except InvalidRequest as error:
        raise InvalidRequest(str(error).replace("prompt", "prediction", 1), "prediction") from None


class ChatShape:
    """See `sse.Shape`."""

    def __init__(
        self, frontend: Frontend, body: ChatBody, model: str, request_id: str, prompt: list[int], n: int
    ) -> None:
        kind = "chat.completion.chunk" if body.stream else "chat.completion"
        self._head = {"id": f"chatcmpl-{request_id}", "object": kind, "created": int(time.time()), "model": model}
        self._tokenizer = frontend.tokenizer
        self._token_ids = bool(body.return_token_ids)
        self._prompt = prompt
        self._n = n
        self._envelope = Envelope(self._head, body.include_usage)
        self.closing, self.failure = self._envelope.closing, self._envelope.failure
        self.shows_tokens = self._token_ids or bool(body.logprobs)
        self.counts = body.continuous_usage
        self.count = self._envelope.count

    def opening(self) -> list[bytes]:
        role = {"role": "assistant", "content": ""}
        choices = [{"index": i, "delta": role, "logprobs": None, "finish_reason": None} for i in range(self._n)]
        return [self._envelope.event(choice, None if choice["index"] else self._prompt_ids()) for choice in choices]

    def content(self, delta: Delta) -> bytes:
        choice = {
            "index": delta.index,
            "delta": {"content": delta.text},
            "logprobs": self._logprobs(delta),
            "finish_reason": None,
        }
        if self._token_ids:
            choice["token_ids"] = delta.tokens
        return self._envelope.event(choice)

    def finish(self, delta: Delta) -> bytes:
        choice = {
            "index": delta.index,
            "delta": {},
            "logprobs": None,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }
        return self._envelope.event(choice)

    def whole(self, outputs: list[Delta], usage: Usage) -> dict[str, Any]:
        choices = [
            {
                "index": output.index,
                "message": {"role": "assistant", "content": output.text, "refusal": None},
                "logprobs": self._logprobs(output),
                "finish_reason": output.finish_reason,
                "stop_reason": output.stop_reason,
                **({"token_ids": output.tokens} if self._token_ids else {}),
            }
            for output in outputs
        ]
        beside: dict[str, Any] = self._prompt_ids()
        if (found := outputs[0].prompt_logprobs) is not None:
            beside["prompt_logprobs"] = prompt_logprobs(self._tokenizer, self._prompt, found)
        return {**self._head, "choices": choices, "usage": usage_body(usage), **beside}

    def _logprobs(self, delta: Delta) -> dict[str, Any] | None:
        return None if delta.logprobs is None else chat_logprobs(self._tokenizer, delta.tokens, delta.logprobs)

    def _prompt_ids(self) -> dict[str, list[int]]:
        return {"prompt_token_ids": self._prompt} if self._token_ids else {}
