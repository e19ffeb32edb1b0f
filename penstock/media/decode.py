"""Files to pixels, with Pillow and PyAV. In worker processes alone: see `media.worker`."""

from __future__ import annotations

import io
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from penstock.core.request import MediaKind
from penstock.media.limits import MediaLimits
from penstock.media.processor import AnyProcessor, Made, Refused

if TYPE_CHECKING:
    from PIL import Image

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")
# where a file says what it is, and what ffmpeg calls that
CONTAINERS = ((4, b"ftyp", "mp4"), (0, b"\x1a\x45\xdf\xa3", "matroska"), (8, b"AVI ", "avi"))
MOST_PACKETS = 1 << 16  # of a video
NEEDS = "needs the package {}, which this server does not have"


def make(kind: MediaKind, data: bytes, processor: AnyProcessor, limits: MediaLimits, *, alone: bool = True) -> Made:
    """What a model takes of a file. Raises Refused.

    Args:
        alone: whether a request has no other image.
    """
    if not data:
        raise Refused("is empty")
    return _image(data, processor, limits, alone) if kind == "image" else _video(data, processor, limits)


def _image(data: bytes, processor: AnyProcessor, limits: MediaLimits, alone: bool) -> Made:
    try:
        from PIL import Image, ImageOps
    except ImportError:
        raise Refused(NEEDS.format("pillow")) from None
    Image.MAX_IMAGE_PIXELS = None  # what is too large is said below, before it is decoded
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    except Image.UnidentifiedImageError:
        raise Refused(f"is not an image that can be read, allowed are {', '.join(FORMATS)}") from None
    except Exception as error:  # decoders raise whatever they come across
        raise _broken(error) from None
    _check_pixels(image.width * image.height, f"{image.width} x {image.height}", limits)
    try:
        if getattr(image, "is_animated", False):  # which does not count all frames
            raise Refused("is animated, allowed are images of one frame")
        image.load()
        upright = ImageOps.exif_transpose(image).convert("RGB")
    except Refused:
        raise
    except Exception as error:
        raise _broken(error) from None
    return _made("image", [upright], 1.0, processor, alone)


def _check_pixels(pixels: int, what: str, limits: MediaLimits) -> None:
    if pixels > limits.pixels:
        raise Refused(f"has {what} pixels, at most {limits.pixels} are allowed (--max-media-pixels)")
    if pixels <= 0:
        raise Refused("has no pixels")


def _video(data: bytes, processor: AnyProcessor, limits: MediaLimits) -> Made:
    try:
        import av
    except ImportError:
        raise Refused(NEEDS.format("av")) from None
    if processor.video_token is None:
        raise Refused("is a video, this model sees images alone")
    try:
        with av.open(io.BytesIO(data), "r", format=_container(data), metadata_errors="ignore") as container:
            if not container.streams.video:
                raise Refused("has no video in it")
            stream = container.streams.video[0]
            fps = float(stream.average_rate or stream.guessed_rate or 0)
            total = _count_frames(container, stream)
            if not total or not 0 < fps <= 1000:
                raise Refused("says nothing of its frames")
            wanted = processor.taken(total, fps, limits.frames)
            pixels = stream.codec_context.width * stream.codec_context.height
            _check_pixels(
                pixels * len(wanted),
                f"{len(wanted)} frames of {stream.codec_context.width} x {stream.codec_context.height}",
                limits,
            )
            container.seek(0)
            frames = _frames(container, stream, wanted, pixels)
    except Refused:
        raise
    except Exception as error:
        raise _broken(error) from None
    if len(frames) < len(wanted):
        raise Refused(f"is broken: {len(frames)} of {len(wanted)} frames can be decoded")
    return _made("video", frames, processor.interval(total, len(wanted), fps), processor)


def _container(data: bytes) -> str:
    """Of which kind a file is. Nobody else guesses: a playlist would have it open others. Raises Refused."""
    for start, magic, name in CONTAINERS:
        if data[start : start + len(magic)] == magic:
            return name
    raise Refused("is not a video that can be read, allowed are MP4, QuickTime, WebM, Matroska and AVI")


def _count_frames(container: Any, stream: Any) -> int:
    """Packets are not decoded."""
    total = 0
    for packet in container.demux(stream):
        total += packet.size > 0
        if total > MOST_PACKETS:
            raise Refused(f"has more than {MOST_PACKETS} frames")
    return total


def _frames(container: Any, stream: Any, wanted: list[int], pixels: int) -> list[Image.Image]:
    frames: list[Image.Image] = []
    for number, frame in enumerate(container.decode(stream)):
        if frame.width * frame.height > pixels:
            raise Refused("changes its size")
        if number == wanted[len(frames)]:
            frames.append(frame.to_image())
            if len(frames) == len(wanted):
                break
    return frames


def _made(
    kind: MediaKind, images: list[Image.Image], interval: float, processor: AnyProcessor, alone: bool = True
) -> Made:
    source = images[0].height, images[0].width
    drawn = processor.drawn(kind, images, alone=alone)
    pixels = b"".join(frame.tobytes() for frame in drawn.frames)
    shape, grid = (len(drawn.frames), drawn.frames[0].height, drawn.frames[0].width), drawn.grid
    digest = blake2b(repr((kind, shape, grid, interval, processor.settings)).encode(), digest_size=16)
    digest.update(pixels)
    return Made(kind, drawn.length, digest.digest(), grid, interval, shape, source, pixels)


def _broken(error: Exception) -> Refused:
    said = " ".join(str(error).split())[:200] or type(error).__name__
    return Refused(f"is broken, it cannot be decoded ({said})")
