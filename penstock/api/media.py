"""Prompts with images and videos in them: of messages, and of texts with tags."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from penstock.core.errors import InvalidRequest, UnsupportedField
from penstock.media.loader import MediaLoader
from penstock.media.prompt import MediaPart, Prompt
from penstock.service.media_parts import media_of

if TYPE_CHECKING:
    from penstock.service.frontend import Frontend

TAG = "<image>"


def joined(parts: list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """A message's content: one text, where it has nothing else."""
    if all(part["type"] == "text" for part in parts):
        return "\n".join(part["text"] for part in parts)
    return parts


async def encode_with_urls(
    frontend: Frontend, prompt: str | list[int], urls: list[str], field: str, most: int
) -> Prompt:
    """A text in which each `<image>` stands for one of these, as RTP-LLM has it; or token ids, with one of those that a
    chat template writes for an image or a video for each.

    Args:
        field: where they came.
        most: tokens of a sequence.

    Raises what `Frontend.encode` does, and InvalidRequest.
    """
    parts = [MediaPart("image", url, f"{field}[{i}]") for i, url in enumerate(urls)]
    loader = _loader(frontend, parts)
    assert loader is not None
    if not isinstance(prompt, str):
        kinds = [kind for _, kind in loader.places(prompt)]
        if len(kinds) != len(urls):
            problem = f"{len(urls)} images, the prompt has {len(kinds)} tokens for one, allowed are as many"
            raise InvalidRequest(f"{field}: {problem}", field)
        parts = [replace(part, kind=kind) for part, kind in zip(parts, kinds, strict=True)]
        return loader.placed(prompt, await loader.load(parts), most, "prompt")
    pieces = prompt.split(TAG)
    if len(pieces) - 1 != len(urls):
        problem = f"{len(urls)} images, the prompt has {len(pieces) - 1} times {TAG}, allowed are as many"
        raise InvalidRequest(f"{field}: {problem}", field)
    processor, piece = loader.processor, frontend.tokenizer.token_piece
    before, behind = processor.around[:1], processor.around[1:]
    written = "".join(piece(token) for token in (*before, processor.image_token, *behind))
    made = await loader.load(parts)
    tokens = await frontend.encode(written.join(pieces), True, most)
    return loader.placed(tokens, made, most, "prompt")


def _loader(frontend: Frontend, parts: list[MediaPart]) -> MediaLoader | None:
    """None where there are no parts, and the model sees none. Raises UnsupportedField naming one that is not seen."""
    loader = frontend.media
    if parts and loader is None:
        field = parts[0].field
        raise UnsupportedField(
            f"{field}: parts with {parts[0].kind}s are not supported, this model takes text alone", field
        )
    for part in parts:
        if loader is not None and loader.processor.token_of(part.kind) is None:
            raise UnsupportedField(f"{part.field}: this model takes no {part.kind}s", part.field)
    return loader


async def encode_with_media(frontend: Frontend, messages: list[dict[str, Any]], most: int, **options: Any) -> Prompt:
    """As `Frontend.encode_chat`, of messages with images.

    Args:
        most: tokens of a sequence.
        options: of `encode_chat`.

    Raises what that raises, and InvalidRequest naming an image that is not taken, or any where the model sees none.
    """
    messages, parts = media_of(messages)
    loader = _loader(frontend, parts)
    if loader is None:
        return Prompt(await frontend.encode_chat(messages, **options))
    made = await loader.load(parts)
    tokens = await frontend.encode_chat(messages, **options)
    return loader.placed(tokens, made, most)
