"""Images that a benchmark sends: noise, which differs from every other and which no encoder makes small."""

from __future__ import annotations

import struct
import zlib
from base64 import b64encode

import numpy as np

STREAM = 2  # of random numbers, beside those of tokens (`workload.requests`)
SIGNATURE = b"\x89PNG\r\n\x1a\n"


def data_url(seed: int, number: int, size: tuple[int, int]) -> str:
    """A PNG in RGB as a `data:` URL; a function of (seed, number).

    Args:
        size: width and height in pixels.
    """
    width, height = size
    pixels = np.random.default_rng((seed, STREAM, number)).integers(0, 256, (height, 3 * width), dtype=np.uint8)
    rows = np.hstack([np.zeros((height, 1), np.uint8), pixels])  # each row begins with its filter: none
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)  # 8 bits, RGB
    chunks = (b"IHDR", head), (b"IDAT", zlib.compress(rows.tobytes(), 1)), (b"IEND", b"")
    png = SIGNATURE + b"".join(_chunk(kind, data) for kind, data in chunks)
    return f"data:image/png;base64,{b64encode(png).decode()}"


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
