"""POST /v1/chat/completions/batch: several conversations in one request, as vLLM has it. One choice for each."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field
from starlette.requests import Request
from starlette.types import Send

from penstock.api.chat import ChatBody, ChatShape, Turn, turn_of
from penstock.api.http import Route, UntilDisconnect, read_body
from penstock.api.openai import usage_body
from penstock.api.schema import MAX_PROMPTS, AnswerDefaults, Messages, service_level
from penstock.api.sse import send_json
from penstock.core.errors import InvalidRequest, UnsupportedField
from penstock.core.service_level import ServiceLevel
from penstock.service.generation import Usage

if TYPE_CHECKING:
    from penstock.service.frontend import Frontend, Models

HARMLESS: dict[str, tuple[object, ...]] = {  # fields of a chat that are not served here -> what changes nothing
    "stream": (False,),
    "n": (1,),
    "use_beam_search": (False,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "prediction": (),
    "prompt_logprobs": (),
    "kv_transfer_params": ({},),
}

COUNTS = ("prompt_tokens", "cached_tokens", "completion_tokens")


class ChatBatchBody(ChatBody):
    """POST /v1/chat/completions/batch"""

    messages: Annotated[list[Messages], Field(fail_fast=True, min_length=1, max_length=MAX_PROMPTS)]  # type: ignore[assignment]

    def check(self) -> None:
        for name, harmless in HARMLESS.items():
            value = getattr(self, name)
            if value is not None and value not in harmless:
                raise UnsupportedField(f"{name} is not supported for several conversations", name)

    def chats(self) -> list[ChatBody]:
        """One for each conversation. Raises InvalidRequest or UnsupportedField."""
        given = self.model_dump(exclude_unset=True, exclude={"messages", *HARMLESS})
        return [
            ChatBody.made({**given, "messages": talk}, self, partial(_renamed, i))
            for i, talk in enumerate(self.messages)
        ]


def routes(models: Models, defaults: AnswerDefaults) -> list[Route]:
    async def chat_batch(request: Request) -> UntilDisconnect:
        body = defaults.applied(await read_body(request, ChatBatchBody))
        level = service_level(body, request.headers)
        chats, frontend = body.chats(), models.of(body.model)
        return UntilDisconnect(partial(_answer, frontend, body, chats, level, request.state.request_id))

    return [Route("POST", "/v1/chat/completions/batch", chat_batch, ChatBatchBody)]


def _renamed(number: int, error: InvalidRequest) -> InvalidRequest:
    """A chat's error by the names of the batch's fields."""
    old = error.field or ""
    if not old.startswith("messages"):
        return error
    new = f"messages[{number}]{old.removeprefix('messages')}"
    return type(error)(str(error).replace(old, new, 1), new)


async def _answer(
    frontend: Frontend, body: ChatBatchBody, chats: list[ChatBody], level: ServiceLevel, request_id: str, send: Send
) -> None:
    arrival = frontend.clock.now()
    model = frontend.served_model(body.model)
    frontend.check_ready()
    turns = []
    for chat in chats:
        chat.show_timing(False)
        try:
            turns.append(await turn_of(frontend, chat))
        except InvalidRequest as error:
            raise chat.as_came(error) from None

    async def one(number: int, chat: ChatBody, turn: Turn) -> tuple[dict[str, Any], Usage]:
        with frontend.submit(
            [turn.prompt],
            turn.params,
            request_id=f"{request_id}-{number}",
            model=model,
            level=level,
            arrival=arrival,
            cache_salt=body.prefix_salt,
            shown=turn.shown,
            **turn.seen,
        ) as generation:
            shape = ChatShape(chat, frontend, model, request_id, turn)
            return shape.whole(await generation.whole(), generation.usage), generation.usage

    try:
        async with asyncio.TaskGroup() as group:  # what ends one early ends all
            tasks = [group.create_task(one(i, *pair)) for i, pair in enumerate(zip(chats, turns, strict=True))]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    answers, used = zip(*(task.result() for task in tasks), strict=True)
    choices = [answer["choices"][0] | {"index": i} for i, answer in enumerate(answers)]
    total = Usage(*(sum(getattr(each, name) for each in used) for name in COUNTS))
    await send_json(send, answers[0] | {"choices": choices, "usage": usage_body(total), "prompt_token_ids": None})
