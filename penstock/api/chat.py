"""POST /v1/chat/completions"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.requests import Request

from penstock.api.http import Route, UntilDisconnect, read_body
from penstock.api.logprobs import chat_logprobs, prompt_logprobs
from penstock.api.openai import Envelope, usage_body
from penstock.api.schema import ChatBody, service_level
from penstock.api.turn import Turn, answer
from penstock.service.generation import Usage
from penstock.text.detokenizer import Delta

if TYPE_CHECKING:
    from penstock.service.frontend import Frontend


def routes(frontend: Frontend) -> list[Route]:
    async def chat_completions(request: Request) -> UntilDisconnect:
        body = await read_body(request, ChatBody)
        level = service_level(body, request.headers)
        make = partial(ChatShape, body)
        return UntilDisconnect(partial(answer, frontend, body, level, request.state.request_id, make))

    return [Route("POST", "/v1/chat/completions", chat_completions, ChatBody)]


class ChatShape:
    """See `sse.Shape`."""

    def __init__(self, body: ChatBody, frontend: Frontend, model: str, request_id: str, turn: Turn) -> None:
        kind = "chat.completion.chunk" if body.stream else "chat.completion"
        self._head = {"id": f"chatcmpl-{request_id}", "object": kind, "created": int(time.time()), "model": model}
        self._tokenizer = frontend.tokenizer
        self._token_ids = bool(body.return_token_ids)
        self._prompt = turn.prompt
        self._n = turn.params.n
        self._readers = turn.readers
        self._named = body.tool_use is not None and body.tool_use.named is not None
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
            "delta": self._readers[delta.index].push(delta.text) if self._readers else {"content": delta.text},
            "logprobs": self._logprobs(delta),
            "finish_reason": None,
        }
        if self._token_ids:
            choice["token_ids"] = delta.tokens
        return self._envelope.event(choice)

    def finish(self, delta: Delta) -> bytes:
        choice = {
            "index": delta.index,
            "delta": self._readers[delta.index].finish() if self._readers else {},
            "logprobs": None,
            "finish_reason": self._finish_reason(delta),
            "stop_reason": delta.stop_reason,
        }
        return self._envelope.event(choice)

    def whole(self, outputs: list[Delta], usage: Usage) -> dict[str, Any]:
        choices = [
            {
                "index": output.index,
                "message": self._message(output),
                "logprobs": self._logprobs(output),
                "finish_reason": self._finish_reason(output),
                "stop_reason": output.stop_reason,
                **({"token_ids": output.tokens} if self._token_ids else {}),
            }
            for output in outputs
        ]
        beside: dict[str, Any] = self._prompt_ids()
        if (found := outputs[0].prompt_logprobs) is not None:
            beside["prompt_logprobs"] = prompt_logprobs(self._tokenizer, self._prompt, found)
        return {**self._head, "choices": choices, "usage": usage_body(usage), **beside}

    def _message(self, output: Delta) -> dict[str, Any]:
        if self._readers:
            return self._readers[output.index].whole(output.text)
        return {"role": "assistant", "content": output.text, "refusal": None}

    def _finish_reason(self, delta: Delta) -> str | None:
        """As OpenAI has it: an output that ends with calls says so, but not where the one call was named."""
        calls = self._readers[delta.index].calls if self._readers else 0
        return "tool_calls" if calls and not self._named and delta.finish_reason == "stop" else delta.finish_reason

    def _logprobs(self, delta: Delta) -> dict[str, Any] | None:
        return None if delta.logprobs is None else chat_logprobs(self._tokenizer, delta.tokens, delta.logprobs)

    def _prompt_ids(self) -> dict[str, list[int]]:
        return {"prompt_token_ids": self._prompt} if self._token_ids else {}
