"""Images and videos in messages: OpenAI's parts, and what other APIs' blocks are made to.

A part is found by its type alone, checked, and replaced by a placeholder for the chat template.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from penstock.api.schema import SHORT
from penstock.core.errors import InvalidRequest, UnsupportedField
from penstock.core.request import MediaKind
from penstock.media.loader import MediaLoader, MediaPart, Prompt
from penstock.text.chat import Placeholder

if TYPE_CHECKING:
    from penstock.service.frontend import Frontend

KINDS: dict[str, MediaKind] = {"image_url": "image", "input_image": "image", "video_url": "video"}
TAG = "<image>"
DETAILS = (None, "auto", "low", "high", "original")


class MediaBlock(dict[str, Any]):
    """A part as OpenAI has it, made of another API's.

    Args:
        place: where that is in its message, for errors.
    """

    def __init__(self, url: str, place: str, kind: str = "image_url") -> None:
        super().__init__({"type": kind, kind: {"url": url}})
        self.place = place


def joined(parts: list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """A message's content: one text, where it has nothing else."""
    if all(part["type"] == "text" for part in parts):
        return "\n".join(part["text"] for part in parts)
    return parts


def media_of(messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[MediaPart]]:
    """The messages with placeholders, and what these stand for. Raises InvalidRequest."""
    found: list[MediaPart] = []
    result = []
    for i, message in enumerate(messages):
        content = message.get("content")
        if isinstance(content, list) and any(_kind(part) in KINDS for part in content):
            parts: list[Any] = []
            for j, part in enumerate(content):
                if (kind := KINDS.get(_kind(part))) is None:
                    parts.append(part)
                    continue
                place = part.place if isinstance(part, MediaBlock) else f"content[{j}].{_named(part)}"
                field = f"messages[{i}].{place}"
                found.append(MediaPart(kind, _url(part, field), field))
                parts.append(Placeholder(type=kind))
            result.append({**message, "content": parts})
        else:
            result.append(message)
    return result, found


async def encode_with_urls(frontend: Frontend, text: str, urls: list[str], field: str, most: int) -> Prompt:
    """A text in which each `<image>` stands for one of these, as RTP-LLM has it.

    Args:
        field: where they came.
        most: tokens of a sequence.

    Raises what `Frontend.encode` does, and InvalidRequest.
    """
    parts = [MediaPart("image", url, f"{field}[{i}]") for i, url in enumerate(urls)]
    loader = _loader(frontend, parts)
    assert loader is not None
    pieces = text.split(TAG)
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


def _kind(part: Any) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    return kind if isinstance(kind, str) else ""


def _named(part: Mapping[str, Any]) -> str:
    return "video_url" if part["type"] == "video_url" else "image_url"


def _url(part: Mapping[str, Any], field: str) -> str:
    """Chats have it in an object, which may say how closely to look; Responses have it in the part itself."""
    given = part.get(_named(part))
    if part.get("file_id") is not None:
        raise UnsupportedField(f"{field}: file_id is not supported, allowed is a URL", field)
    said = given if isinstance(given, Mapping) else part
    if said.get("detail") not in DETAILS:
        allowed = ", ".join(each for each in DETAILS if each)
        raise InvalidRequest(f"{field}.detail: {SHORT.repr(said['detail'])}, allowed are {allowed}", field)
    url = given.get("url") if isinstance(given, Mapping) else given
    if not isinstance(url, str) or not url:
        raise InvalidRequest(f"{field}: {SHORT.repr(given)}, allowed is an object with a url", field)
    return cast(str, url)
