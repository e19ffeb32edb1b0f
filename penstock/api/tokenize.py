"""POST /tokenize and /detokenize, GET /tokenizer_info"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from penstock.api.http import MODEL, Route, json_response, read_body
from penstock.api.media import encode_with_media
from penstock.api.schema import Body, Messages, TokenIds, check_messages, check_token_ids, check_turn
from penstock.api.tools import tool_use
from penstock.core.errors import InvalidRequest, PromptTooLong

if TYPE_CHECKING:
    from penstock.service.frontend import Frontend, Models

MAX_TOKENS = 1 << 18  # or a context, if that is more


class TokenizeBody(Body):
    """POST /tokenize: a prompt, or messages."""

    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None  # to a text, unless this is false; to messages, where it is true
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    return_token_strs: bool | None = None

    @property
    def opens_turn(self) -> bool:
        """See `ChatBody`."""
        return not self.continue_final_message if self.add_generation_prompt is None else self.add_generation_prompt

    def check(self) -> None:
        check_turn(self.add_generation_prompt, self.continue_final_message)
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequest("prompt: exactly one of prompt and messages is needed", "prompt")
        check_messages(self.messages or [])
        if self.tools is not None:
            tool_use(self.tools, None, None)


class DetokenizeBody(Body):
    """POST /detokenize"""

    tokens: TokenIds


def routes(models: Models, *, shows_tokenizer: bool) -> list[Route]:
    """
    Args:
        shows_tokenizer: whether anybody may see its files' settings, the chat template among them.
    """

    async def tokenize(request: Request) -> Response:
        body = await read_body(request, TokenizeBody)
        frontend = models.of(body.model)
        frontend.check_known()
        tokens = await _encoded(frontend, body)
        texts = [frontend.tokenizer.token_piece(token) for token in tokens] if body.return_token_strs else None
        return json_response(
            {"count": len(tokens), "max_model_len": frontend.max_model_len, "tokens": tokens, "token_strs": texts}
        )

    async def detokenize(request: Request) -> Response:
        body = await read_body(request, DetokenizeBody)
        frontend = models.of(body.model)
        frontend.check_known()
        if len(body.tokens) > (most := _most_tokens(frontend)):
            raise InvalidRequest(f"tokens: {len(body.tokens)} token ids, at most {most} are allowed", "tokens")
        check_token_ids(body.tokens, frontend.vocab_size, "tokens")
        return json_response({"prompt": await frontend.decode(body.tokens)})

    async def tokenizer_info(request: Request) -> Response:
        """tokenizer_config.json, and the chat template that is used; with several models, of `model`."""
        return json_response(models.of(request.query_params.get(MODEL)).tokenizer.info)

    shown = [Route("GET", "/tokenizer_info", tokenizer_info)] if shows_tokenizer else []
    return [
        Route("POST", "/tokenize", tokenize, TokenizeBody),
        Route("POST", "/detokenize", detokenize, DetokenizeBody),
        *shown,
    ]


async def _encoded(frontend: Frontend, body: TokenizeBody) -> list[int]:
    most = _most_tokens(frontend)
    try:
        if body.messages is None:
            assert body.prompt is not None  # the schema has seen to it
            return await frontend.encode(body.prompt, body.add_special_tokens is not False, most + 1)
        prompt = await encode_with_media(
            frontend,
            body.messages,
            most + 1,
            size=body.size,
            add_special_tokens=bool(body.add_special_tokens),
            add_generation_prompt=body.opens_turn,
            continue_final_message=bool(body.continue_final_message),
            tools=body.tools,
            template_kwargs=body.chat_template_kwargs,
            max_model_len=most + 1,
        )
        return prompt.tokens
    except PromptTooLong:
        field = "prompt" if body.messages is None else "messages"
        raise InvalidRequest(f"{field}: more than {most} tokens, at most so many are counted at once", field) from None


def _most_tokens(frontend: Frontend) -> int:
    """In one request: texts beyond the context are served, too, so that clients learn how long they are."""
    return max(MAX_TOKENS, frontend.max_model_len)
