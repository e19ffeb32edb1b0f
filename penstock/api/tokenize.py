"""POST /tokenize and /detokenize"""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response

from penstock.api.http import Route, json_response, read_body
from penstock.api.schema import DetokenizeBody, TokenizeBody, check_token_ids

if TYPE_CHECKING:
    from penstock.service.frontend import Frontend


def routes(frontend: Frontend) -> list[Route]:
    async def tokenize(request: Request) -> Response:
        body = await read_body(request, TokenizeBody)
        frontend.served_model(body.model)
        frontend.check_ready()
        if body.messages is not None:
            tokens = await frontend.encode_chat(
                body.messages,
                add_generation_prompt=body.opens_turn,
                continue_final_message=bool(body.continue_final_message),
                template_kwargs=body.chat_template_kwargs,
            )
        else:
            assert body.prompt is not None  # the schema has seen to it
            tokens = await frontend.encode(body.prompt, body.add_special_tokens)
        texts = [frontend.tokenizer.token_text(token) for token in tokens] if body.return_token_strs else None
        return json_response(
            {"count": len(tokens), "max_model_len": frontend.max_model_len, "tokens": tokens, "token_strs": texts}
        )

    async def detokenize(request: Request) -> Response:
        body = await read_body(request, DetokenizeBody)
        frontend.served_model(body.model)
        frontend.check_ready()
        check_token_ids(body.tokens, frontend.vocab_size, "tokens")
        return json_response({"prompt": await frontend.decode(body.tokens)})

    return [
        Route("POST", "/tokenize", tokenize, TokenizeBody),
        Route("POST", "/detokenize", detokenize, DetokenizeBody),
    ]
