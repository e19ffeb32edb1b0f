"""Sizes in bytes, as people write them."""

from __future__ import annotations

MOST_BYTES = 1 << 60
MEDIA_CACHE = 256 << 20  # of embeddings of images that an engine keeps by default
UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def size(text: str) -> int:
    """Bytes, from "4G", "512MiB", "1000000". ValueError, with what is allowed, for others."""
    number_part = text.upper().removesuffix("IB").removesuffix("B")
    unit = number_part[-1:] if number_part[-1:] in UNITS else ""
    try:
        value = float(number_part.removesuffix(unit) if unit else number_part)
    except ValueError:
        raise ValueError("a size such as 4G or 512M") from None
    if not 1 <= value * UNITS[unit] < MOST_BYTES:
        raise ValueError("a size such as 4G or 512M")
    return int(value * UNITS[unit])
