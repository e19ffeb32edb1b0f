"""Images of any size as tiles of one size, and the tokens that are left of them (LLaVA-NeXT's "anyres").

What an image's tokens are is decided where it is decoded, and again where it is looked at: both ask here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.core.errors import ConfigError
from penstock.core.hf_config import count

Size = tuple[int, int]  # height and width
MOST_SIZES = 1024  # that a configuration may list
WORTH_IT = 1.1  # how much smaller a side has to become for tokens to be made fewer
ASPECT = "anyres_max_"
SIDE, PATCH = 384, 14  # of SigLIP's images where config.json says nothing


@dataclass(frozen=True, slots=True)
class Seen:
    """What of an image's tiles is seen.

    Attributes:
        tiles: rows and columns of them.
        own: rows and columns of patches that the image itself covers; the others, half on each side, only fill tiles.
        kept: rows and columns that are left of those.
    """

    tiles: Size
    own: Size
    kept: Size


@dataclass(frozen=True, slots=True)
class Tiling:
    """
    Attributes:
        side: of a tile in pixels; `patches`: of it.
        sizes: that an image may be made, each a whole number of tiles.
        most: tiles' worth of tokens that an image keeps.
    """

    side: int
    patches: int
    sizes: tuple[Size, ...]
    most: int

    @property
    def per_tile(self) -> int:
        """Tokens of one."""
        return self.patches**2

    def size(self, source: Size) -> Size:
        """Of an image, the one in which most of it is left, and least is filled."""
        height, width = source

        def left(size: Size) -> Size:
            scale = min(size[1] / width, size[0] / height)
            kept = min(int(width * scale) * int(height * scale), width * height)
            return kept, kept - size[0] * size[1]

        return max(self.sizes, key=left)  # the first of several, as transformers has it

    def fitted(self, source: Size) -> Size:
        """How large an image becomes within its size."""
        (height, width), (most_height, most_width) = source, self.size(source)
        across, down = most_width / width, most_height / height
        if across < down:
            return min(math.ceil(height * across), most_height), most_width
        return most_height, min(math.ceil(width * down), most_width)

    def seen(self, source: Size) -> Seen:
        height, width = source
        down, across = (length // self.side for length in self.size(source))
        rows, columns = down * self.patches, across * self.patches
        if width / height > columns / rows:
            own = rows - 2 * ((rows - int(round(height * (columns / width), 7))) // 2), columns
        else:
            own = rows, columns - 2 * ((columns - int(round(width * (rows / height), 7))) // 2)
        ratio = math.sqrt(own[0] * own[1] / (self.most * self.per_tile))
        kept = (int(own[0] // ratio), int(own[1] // ratio)) if ratio > WORTH_IT else own
        return Seen((down, across), own, kept)

    def tokens(self, source: Size) -> int:
        """Those of the whole image as one tile, those that are kept, and one at the end of each row of these."""
        rows, columns = self.seen(source).kept
        return self.per_tile + rows * (columns + 1)

    @property
    def per_frame(self) -> int:
        """Tokens of a video's frame, each of which is made of four."""
        return math.ceil(self.patches / 2) ** 2


def read_tiling(config: Mapping[str, Any]) -> Tiling:
    """Out of config.json. Raises ConfigError naming the key."""
    vision = config.get("vision_config") or {}
    side, patch = count(vision, "image_size", SIDE), count(vision, "patch_size", PATCH)
    if side < patch:
        raise ConfigError(f"config.json: image_size {side} is less than patch_size {patch}", "image_size")
    given = config.get("vision_aspect_ratio") or f"{ASPECT}9"
    most = given.removeprefix(ASPECT) if isinstance(given, str) else ""
    if not most.isdecimal() or not most.isascii() or not 1 <= int(most[:9]) <= MOST_SIZES:
        raise ConfigError(
            f"config.json: vision_aspect_ratio is {ascii(given)[:60]}, supported is {ASPECT} and a number",
            "vision_aspect_ratio",
        )
    steps = range(side, 6 * side + 1, side)
    pinpoints = config.get("image_grid_pinpoints")
    sizes = [[height, width] for height in steps for width in steps] if pinpoints is None else pinpoints
    return Tiling(side, side // patch, checked_sizes(sizes, side), int(most))


def checked_sizes(given: Any, side: int) -> tuple[Size, ...]:
    """Of image_grid_pinpoints. Raises ConfigError."""
    name = "image_grid_pinpoints"
    fine = isinstance(given, list) and 0 < len(given) <= MOST_SIZES
    for one in given if fine else ():
        fine = fine and isinstance(one, list | tuple) and len(one) == 2
        fine = fine and all(type(each) is int and 0 < each <= 64 * side and each % side == 0 for each in one)
    if not fine:
        allowed = f"heights and widths that are multiples of image_size, {side}, {MOST_SIZES} at most"
        raise ConfigError(f"config.json: {name} must be a list of {allowed}", name)
    return tuple((one[0], one[1]) for one in given)
