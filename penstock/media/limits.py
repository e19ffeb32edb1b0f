"""What a request may bring of images and videos."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaLimits:
    """
    Attributes:
        count: images and videos of a request.
        bytes: of each, as it came.
        pixels: of each, as it is decoded: width times height, of all frames of a video that are taken.
        frames: of a video that are taken.
        domains: hosts from which they are fetched; none are, if there are none.
        fetch_seconds: that this may take.
        decode_seconds: that it may take to decode one.
    """

    count: int = 16
    bytes: int = 20 << 20
    pixels: int = 1 << 26
    frames: int = 64
    domains: tuple[str, ...] = ()
    fetch_seconds: float = 5.0
    decode_seconds: float = 20.0
