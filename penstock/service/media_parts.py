"""Images and videos in messages: OpenAI's parts, and what other APIs' blocks are made to.

A part is found by its type alone, checked, and replaced by a placeholder for the chat template.
"""

from __future__ import annotations

from collections.abc import Mapping
from reprlib import Repr
from typing import Any, cast

from penstock.core.errors import InvalidRequest, UnsupportedField
from penstock.core.request import MediaKind
from penstock.media.prompt import MediaPart
from penstock.text.chat import Placeholder

SHORT = Repr()
SHORT.maxstring = SHORT.maxother = SHORT.maxlong = 60
KINDS: dict[str, MediaKind] = {"image_url": "image", "input_image": "image", "video_url": "video"}
DETAILS = (None, "auto", "low", "high", "original")


class MediaBlock(dict[str, Any]):
    """A part as OpenAI has it, made of another API's.

    Args:
        place: where that is in its message, for errors.
    """

    def __init__(self, url: str, place: str, kind: str = "image_url") -> None:
        super().__init__({"type": kind, kind: {"url": url}})
        self.place = place


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
    bare = part["type"] == "input_image"
    url = given.get("url") if isinstance(given, Mapping) else given if bare else None
    if not isinstance(url, str) or not url:
        raise InvalidRequest(f"{field}: {SHORT.repr(given)}, allowed is an object with a url", field)
    return cast(str, url)
