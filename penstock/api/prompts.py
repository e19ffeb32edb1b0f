"""The prompts of one request, as token ids."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, cast

from penstock.core.errors import InvalidRequest

if TYPE_CHECKING:
    from penstock.service.frontend import Frontend


async def encoded(
    frontend: Frontend,
    given: list[str] | list[list[int]],
    add_special_tokens: bool,
    max_model_len: int | None,
    field: str = "prompt",
) -> list[list[int]]:
    """All of one kind, as they come out of `prompts_of`.

    Args:
        max_model_len: see `Tokenizer.encode`.
        field: where they came.

    Raises what `Frontend.encode` does, and `InvalidRequest` where a text has no tokens.
    """
    texts = [prompt for prompt in given if isinstance(prompt, str)]
    encoding = (frontend.encode(text, add_special_tokens, max_model_len) for text in texts)
    prompts = await asyncio.gather(*encoding) if texts else given
    if not all(prompts):
        raise InvalidRequest(f"{field}: it has no tokens, at least one is needed", field)
    return cast("list[list[int]]", prompts)
