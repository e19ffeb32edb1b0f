"""Images and videos for tests, and the requests that they are in."""

from __future__ import annotations

from dataclasses import replace
from hashlib import blake2b

import numpy as np

from penstock.core.request import MediaKind, MediaSpan, Request
from tests.helpers.engines import make_request

IMAGE, VIDEO = 301, 302  # the tokens that stand for them


def picture(rows: int, columns: int, seed: int = 0, frames: int = 1) -> np.ndarray:
    """[frames, height, width, 3] of so many tokens of a Qwen2.5-VL."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (frames, 28 * rows, 28 * columns, 3), dtype=np.uint8)


def span_of(pixels: np.ndarray, start: int, interval: float = 1.0) -> MediaSpan:
    frames, height, width, _ = pixels.shape
    grid = (-(-frames // 2), height // 28, width // 28)
    kind: MediaKind = "image" if frames == 1 else "video"
    digest = blake2b(pixels.tobytes() + repr((grid, interval)).encode(), digest_size=16).digest()
    shape = (frames, height, width)
    return MediaSpan(start, grid[0] * grid[1] * grid[2], digest, kind, grid, interval, shape)


def seeing(name: str, parts: list[list[int] | np.ndarray | tuple[np.ndarray, float]], **options) -> Request:
    """A request of texts and of pictures between them, of videos with the interval of their frames."""
    prompt: list[int] = []
    spans: list[MediaSpan] = []
    pixels: list[bytes] = []
    for part in parts:
        if isinstance(part, list):
            prompt += part
            continue
        content, interval = part if isinstance(part, tuple) else (part, 1.0)
        spans.append(span_of(content, len(prompt), interval))
        pixels.append(content.tobytes())
        prompt += [IMAGE if len(content) == 1 else VIDEO] * spans[-1].length
    return replace(make_request(name, prompt, **options), media=tuple(spans), pixels=tuple(pixels))
