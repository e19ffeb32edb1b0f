"""How a checkpoint's model wants images and videos: their size, and how many tokens stand for them.

What is computed here is what transformers' processors compute, with Pillow for the pixels. Normalisation and patches
are the model's own business (`nn/vision.py`): what travels are the bytes of a resized image.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from penstock.core.errors import ConfigError
from penstock.core.hf_config import image_settings
from penstock.core.request import MediaKind
from penstock.core.tiles import Tiling, checked_sizes, read_tiling

if TYPE_CHECKING:
    from PIL import Image

MOST_ASPECT = 200  # of a side to the other
BICUBIC = 3  # as Pillow counts filters
MEAN = (0.48145466, 0.4578275, 0.40821073)  # of CLIP's images
FRAMES = 32  # that LLaVA-OneVision takes of a video


class Refused(Exception):
    """Why an image or a video is not taken, as the end of a sentence that begins with it."""


class Made(msgspec.Struct, frozen=True):
    """An image or a video as a model takes it; see `MediaSpan`.

    Attributes:
        length: tokens that stand for it.
        pixels: RGB, [frames, height, width, 3].
    """

    kind: MediaKind
    length: int
    digest: bytes
    grid: tuple[int, int, int]
    interval: float
    shape: tuple[int, int, int]
    source: tuple[int, int]
    pixels: bytes


@dataclass(frozen=True, slots=True)
class Drawn:
    """
    Attributes:
        frames: all of one size, as the model takes them.
        grid: see `MediaSpan`.
        length: tokens.
    """

    frames: list[Image.Image]
    grid: tuple[int, int, int]
    length: int


class Processor(msgspec.Struct, frozen=True, kw_only=True, tag="squares"):
    """Of Qwen2.5-VL: images of any size, in whole squares of patches (`smart_resize` of its own code).

    Attributes:
        image_token, video_token: that a chat template writes for one.
        around: tokens that it writes before and behind an image's.
        factor: side of the square of a token, in pixels.
        frames: of a video that a token has.
        least, most: pixels of a resized image; `least_video`, `most_video`: of a frame of a video.
        fps: of a video's frames that are taken; `least_frames`: at least so many.
        per_second: positions of the model's rotation in a second.
        settings: names all else that decides what the model makes of the pixels.
    """

    image_token: int
    video_token: int | None
    factor: int
    frames: int
    least: int
    most: int
    least_video: int
    most_video: int
    fps: float
    least_frames: int
    most_frames: int
    per_second: float
    settings: str
    around: tuple[int, ...] = ()

    def token_of(self, kind: MediaKind) -> int | None:
        return self.image_token if kind == "image" else self.video_token

    def size(self, kind: MediaKind, height: int, width: int) -> tuple[int, int]:
        """Height and width of what is made of an image, or of a frame. Raises Refused."""
        if max(height, width) > MOST_ASPECT * min(height, width):
            raise _too_narrow(height, width)
        least, most = (self.least, self.most) if kind == "image" else (self.least_video, self.most_video)
        rows, columns = round(height / self.factor), round(width / self.factor)
        if rows * columns * self.factor**2 > most:
            shrink = math.sqrt(height * width / most)
            rows, columns = (max(1, math.floor(side / shrink / self.factor)) for side in (height, width))
        elif rows * columns * self.factor**2 < least:
            grow = math.sqrt(least / (height * width))
            rows, columns = (math.ceil(side * grow / self.factor) for side in (height, width))
        return rows * self.factor, columns * self.factor

    def drawn(self, kind: MediaKind, images: list[Image.Image], *, alone: bool) -> Drawn:
        """What is made of an image, or of a video's frames. Raises Refused.

        Args:
            alone: whether a request has no other image.
        """
        height, width = self.size(kind, images[0].height, images[0].width)
        grid = self.grid(len(images), height, width)
        frames = [image.resize((width, height), BICUBIC) for image in images]
        return Drawn(frames, grid, grid[0] * grid[1] * grid[2])

    def grid(self, frames: int, height: int, width: int) -> tuple[int, int, int]:
        """Of the tokens of what is resized."""
        return -(-frames // self.frames), height // self.factor, width // self.factor

    def taken(self, total: int, fps: float, most: int) -> list[int]:
        """Which of a video's frames are taken, evenly spaced.

        Args:
            total: frames that there are; `fps`: in a second.
            most: of them at most, besides the model's own limit.
        """
        most = min(self.most_frames, most, total) // self.frames * self.frames
        count = min(max(total / fps * self.fps, self.least_frames), most)
        count = max(1, math.floor(count / self.frames) * self.frames)
        return [int(i * total / count) for i in range(count)]

    def interval(self, total: int, taken: int, fps: float) -> float:
        """Positions between two tokens' frames of a video."""
        return self.per_second * self.frames / (taken / total * fps)


class TilingProcessor(msgspec.Struct, frozen=True, kw_only=True, tag="tiles"):
    """Of LLaVA-OneVision: tiles of one size. An image that is alone is taken twice: as one tile, and in several; of
    several images each is one tile, and so is each frame of a video.

    Attributes:
        background: colour of what makes one of several images a square.
        most_frames: of a video.
        image_token, video_token, settings, around: as `Processor` has them.
    """

    image_token: int
    video_token: int | None
    tiling: Tiling
    background: tuple[int, int, int]
    most_frames: int
    settings: str
    around: tuple[int, ...] = ()

    def token_of(self, kind: MediaKind) -> int | None:
        return self.image_token if kind == "image" else self.video_token

    def drawn(self, kind: MediaKind, images: list[Image.Image], *, alone: bool) -> Drawn:
        """As of `Processor`."""
        from PIL import Image

        side, first = self.tiling.side, images[0]
        if kind == "video":
            length = len(images) * self.tiling.per_frame + 1
            return Drawn([image.resize((side, side), BICUBIC) for image in images], (1, 1, length), length)
        if max(first.size) > MOST_ASPECT * min(first.size):
            raise _too_narrow(first.height, first.width)
        if not alone:
            longer = max(first.size)
            square = Image.new("RGB", (longer, longer), self.background)
            square.paste(first, ((longer - first.width) // 2, (longer - first.height) // 2))
            length = self.tiling.per_tile + 1
            return Drawn([square.resize((side, side), BICUBIC)], (1, 1, length), length)
        source = first.height, first.width
        (height, width), fitted = self.tiling.size(source), self.tiling.fitted(source)
        whole = Image.new("RGB", (width, height))
        inner = first.resize((fitted[1], fitted[0]), BICUBIC)
        whole.paste(inner, ((width - fitted[1]) // 2, (height - fitted[0]) // 2))
        corners = [(left, top) for top in range(0, height, side) for left in range(0, width, side)]
        tiles = [whole.crop((left, top, left + side, top + side)) for left, top in corners]
        length = self.tiling.tokens(source)
        return Drawn([first.resize((side, side), BICUBIC), *tiles], (1, 1, length), length)

    def taken(self, total: int, fps: float, most: int) -> list[int]:
        """As of `Processor`; the first frame and the last are among them."""
        count = max(1, min(self.most_frames, most, total))
        return [int(i * (total - 1) / max(1, count - 1)) for i in range(count)]

    def interval(self, total: int, taken: int, fps: float) -> float:
        """Its positions know of no time."""
        return 1.0


AnyProcessor = Processor | TilingProcessor


def _too_narrow(height: int, width: int) -> Refused:
    return Refused(f"is {width} x {height}, at most {MOST_ASPECT} times as long as wide is allowed")


def read_processor(directory: Path) -> AnyProcessor | None:
    """What a checkpoint's model sees; None where it sees nothing. Raises ConfigError."""
    config = _read(directory / "config.json")
    kind = config.get("model_type")
    if not isinstance(config.get("vision_config"), dict):
        return None
    if kind not in PROCESSORS:
        return None
    try:
        return PROCESSORS[kind](config, directory)
    except (KeyError, TypeError, ValueError, msgspec.ValidationError) as error:
        raise ConfigError(f"{directory}: how it takes images cannot be read ({error})", "model") from None


def _qwen(config: Mapping[str, Any], directory: Path) -> Processor:
    vision = config["vision_config"]
    whole, plain = _read(directory / "processor_config.json"), _read(directory / "preprocessor_config.json")
    image = image_settings(whole, plain)
    video = whole.get("video_processor") or _read(directory / "video_preprocessor_config.json") or {}
    patch, merge, frames = (
        int(image.get(name) or vision.get(other) or default)
        for name, other, default in (
            ("patch_size", "patch_size", 14),
            ("merge_size", "spatial_merge_size", 2),
            ("temporal_patch_size", "temporal_patch_size", 2),
        )
    )
    size, of_video = image.get("size") or {}, video.get("size") or {}
    return Processor(
        image_token=int(config["image_token_id"]),
        video_token=None if config.get("video_token_id") is None else int(config["video_token_id"]),
        factor=patch * merge,
        frames=frames,
        least=int(image.get("min_pixels") or size.get("shortest_edge") or 56 * 56),
        most=int(image.get("max_pixels") or size.get("longest_edge") or 28 * 28 * 1280),
        least_video=int(video.get("min_pixels") or of_video.get("shortest_edge") or 128 * 28 * 28),
        most_video=int(video.get("max_pixels") or of_video.get("longest_edge") or 768 * 28 * 28),
        fps=float(video.get("fps") or 2.0),
        least_frames=int(video.get("min_frames") or 4),
        most_frames=int(video.get("max_frames") or 768),
        per_second=float(vision.get("tokens_per_second") or 4),
        settings=json.dumps([image.get("image_mean"), image.get("image_std")]),
        around=tuple(
            int(config[name])
            for name in ("vision_start_token_id", "vision_end_token_id")
            if config.get(name) is not None
        ),
    )


def _llava(config: Mapping[str, Any], directory: Path) -> TilingProcessor:
    whole, plain = _read(directory / "processor_config.json"), _read(directory / "preprocessor_config.json")
    image, tiling = image_settings(whole, plain), read_tiling(config)
    size, pinpoints = image.get("size") or {}, image.get("image_grid_pinpoints")
    sides = {int(size.get(name) or tiling.side) for name in ("height", "width", "shortest_edge")}
    if sides != {tiling.side} or (pinpoints and checked_sizes(pinpoints, tiling.side) != tiling.sizes):
        raise ConfigError(f"{directory}: preprocessor_config.json has other sizes of images than config.json", "model")
    mean = [float(value) for value in image.get("image_mean") or MEAN]
    red, green, blue = (int(value * 255) for value in mean)
    return TilingProcessor(
        image_token=int(config.get("image_token_index") or config.get("image_token_id") or 151646),
        video_token=int(config.get("video_token_index") or config.get("video_token_id") or 151647),
        tiling=tiling,
        background=(red, green, blue),
        most_frames=FRAMES,
        settings=json.dumps([mean, image.get("image_std")]),
    )


PROCESSORS: dict[str, Callable[[Mapping[str, Any], Path], AnyProcessor]] = {
    "llava_onevision": _llava,
    "qwen2_5_vl": _qwen,
}


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read ({error})", "model") from None
    return found if isinstance(found, dict) else {}
