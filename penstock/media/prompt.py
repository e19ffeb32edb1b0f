"""What a prompt has beside text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from penstock.core.request import MediaKind, MediaSpan


@dataclass(frozen=True, slots=True)
class MediaPart:
    """
    Attributes:
        field: where it came.
        data: the file itself, where there is no URL.
    """

    kind: MediaKind
    url: str
    field: str
    data: bytes | None = None


@dataclass(frozen=True, slots=True)
class Prompt:
    """Tokens, and what some of them stand for; see `Request`.

    Attributes:
        files: of each of `media`, as it came.
    """

    tokens: list[int]
    media: tuple[MediaSpan, ...] = ()
    pixels: tuple[bytes, ...] = ()
    files: tuple[bytes, ...] = ()

    @property
    def seen(self) -> dict[str, Any]:
        """What is not text, as fields of `Frontend.submit`."""
        return {"media": self.media, "pixels": self.pixels, "files": self.files} if self.media else {}
