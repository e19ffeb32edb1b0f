"""Qwen2.5-VL: Qwen2.5 that sees images of any size and videos, by a tower with windows, and rotates by frame, row and
column."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock.core.errors import ConfigError
from penstock.core.hf_config import count, number, text_config
from penstock.core.request import MediaSpan
from penstock.nn.batch import Batch, to_device
from penstock.nn.config import DecoderConfig, VisionConfig, late_windows, read_activation, read_colours, read_decoder
from penstock.nn.layers import GatedMLP, RMSNorm
from penstock.nn.linear import WHOLE, ColumnLinear, RowLinear, Shard
from penstock.nn.models.decoder import Decoder, WeightMap
from penstock.nn.mrope import rotary_positions
from penstock.nn.vision import PatchEmbedding, Segments, VisionAttention, alike, normalised

# what transformers takes where config.json has no such key
DEFAULTS = {"max_position_embeddings": 32768, "num_key_value_heads": 8, "rms_norm_eps": 1e-5}
VISION_DEFAULTS = {
    "depth": 32,
    "hidden_size": 3584,
    "intermediate_size": 3420,
    "num_heads": 16,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "window_size": 112,
    "fullatt_block_indexes": [7, 15, 23, 31],
}
SECTIONS = [16, 24, 24]


class Qwen25VL(Decoder):
    tower_weights: ClassVar[WeightMap] = {
        "norm1": ("norm1",),
        "attention.qkv_proj": ("attn.qkv",),
        "attention.o_proj": ("attn.proj",),
        "norm2": ("norm2",),
        "feed_forward.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
        "feed_forward.down_proj": ("mlp.down_proj",),
    }

    @staticmethod
    def read_config(hf: Mapping[str, Any]) -> DecoderConfig:
        text = DEFAULTS | text_config(hf)
        sections = _without_sections(text)
        config = read_decoder(text, windows=late_windows(text), qkv_bias=True)
        if sum(sections) * 2 != config.head_dim:
            raise ConfigError(
                f"config.json: mrope_section is {sections}, which are not the {config.head_dim // 2} pairs of a head",
                "mrope_section",
            )
        return replace(config, sections=tuple(sections), vision=_read_vision(hf, config.hidden_size))

    def __init__(self, config: DecoderConfig, shard: Shard = WHOLE) -> None:
        super().__init__(config, shard)
        assert config.vision is not None
        if shard.is_first:
            self.visual = Tower(config.vision, config.hidden_size, shard)

    def look_at(self, span: MediaSpan, pixels: Tensor) -> Tensor:
        assert self.visual is not None
        return self.visual(pixels)

    def rotations(self, batch: Batch) -> list[tuple[Tensor, Tensor]]:
        if not batch.media:
            return super().rotations(batch)
        axes = batch.positions.cpu().repeat(3, 1)
        for rows, step in batch.media:
            if step.branches is not None:
                axes[:, rows.start : rows.stop] = rotary_positions(step.media, step.start, 1)
            else:
                axes[:, rows.start : rows.stop] = rotary_positions(step.media, step.start, len(rows))
        reach = max(batch.reach, int(axes.max()) + 1)
        assert self.config.sections
        result = []
        for rotation in self._tables():
            by_axis = [rotation(axis.to(self.device), reach) for axis in axes]
            result.append((self._in_sections([cos for cos, _ in by_axis]), self._in_sections([s for _, s in by_axis])))
        return result

    def _in_sections(self, by_axis: list[Tensor]) -> Tensor:
        """Of [rows, pairs] of each axis, the pairs that turn with it."""
        parts = [each.split(self.config.sections, dim=1) for each in by_axis]
        return torch.cat([parts[i][i] for i in range(3)], dim=1)


class Tower(nn.Module):
    """Patches of an image, or of pairs of a video's frames, to tokens of squares of them.

    Args:
        width: of the tokens.
    """

    def __init__(self, config: VisionConfig, width: int, shard: Shard = WHOLE) -> None:
        super().__init__()
        self.config = config
        kernel = (3, config.frames, config.patch_size, config.patch_size)
        self.patch_embed = nn.ModuleDict({"proj": PatchEmbedding(config.hidden_size, kernel)})
        self.blocks = nn.ModuleList(TowerBlock(config, shard) for _ in range(config.num_layers))
        self.merger = Merger(config, width, shard)

    def forward(self, pixels: Tensor) -> Tensor:
        """[frames, height, width, 3] bytes, in whole squares -> [tokens, width], row by row of each frame."""
        config = self.config
        patches, (frames, rows, columns) = self._patches(normalised(pixels, config))
        x = self.patch_embed["proj"](patches.to(self.merger.ln_q.weight.dtype))
        square = config.merge**2
        order, lengths = _windows(frames, rows // config.merge, columns // config.merge, config.window)
        places = to_device(order, x.device)
        of_patches = (places[:, None] * square + torch.arange(square, device=x.device)).flatten()
        x = x[of_patches]
        cos, sin = (part.repeat(frames, 1)[of_patches] for part in self._rotation(rows, columns, x.device))
        whole = alike([rows * columns] * frames, x.device)
        windows = alike([length * square for length in lengths], x.device)
        for layer, block in enumerate(self.blocks):
            x = block(x, whole if layer in config.whole_layers else windows, (cos, sin))
        merged = self.merger(x)
        return torch.empty_like(merged).index_copy_(0, places, merged)

    def _patches(self, colours: Tensor) -> tuple[Tensor, tuple[int, int, int]]:
        """[frames, 3, height, width] -> [patches, values], squares one after the other; and how many there are."""
        config = self.config
        size, merge = config.patch_size, config.merge
        if lacking := -len(colours) % config.frames:
            colours = torch.cat((colours, colours[-1:].expand(lacking, -1, -1, -1)))
        frames, rows, columns = len(colours) // config.frames, colours.shape[2] // size, colours.shape[3] // size
        split = colours.view(
            frames, config.frames, 3, rows // merge, merge, size, columns // merge, merge, size
        )  # to frame, square, patch in it, colour, frame in the patch, and places in that
        patches = split.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(frames * rows * columns, -1)
        return patches, (frames, rows, columns)

    def _rotation(self, rows: int, columns: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """cos and sin of a frame's patches: half of a head's pairs turn with the row, the others with the column."""
        merge, half = self.config.merge, self.config.head_dim // 2
        base = 1.0 / 10000.0 ** (torch.arange(0, half, 2, device=device).float() / half)
        axes = torch.meshgrid(torch.arange(rows, device=device), torch.arange(columns, device=device), indexing="ij")
        in_squares = (
            axis.view(rows // merge, merge, columns // merge, merge).transpose(1, 2).flatten() for axis in axes
        )
        angle = torch.cat([axis[:, None].float() * base for axis in in_squares], dim=1)
        return angle.cos(), angle.sin()


class TowerBlock(nn.Module):
    def __init__(self, config: VisionConfig, shard: Shard) -> None:
        super().__init__()
        self.norm1 = RMSNorm(config.hidden_size, config.norm_eps)
        self.attention = VisionAttention(config, shard)
        self.norm2 = RMSNorm(config.hidden_size, config.norm_eps)
        self.feed_forward = GatedMLP(config, shard)

    def forward(self, x: Tensor, segments: Segments, rotation: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.attention(self.norm1(x), segments, rotation)
        return x + self.feed_forward(self.norm2(x))


class Merger(nn.Module):
    """The patches of a square to one token."""

    def __init__(self, config: VisionConfig, width: int, shard: Shard) -> None:
        super().__init__()
        self.wide = config.hidden_size * config.merge**2
        self.ln_q = RMSNorm(config.hidden_size, config.norm_eps)
        first = ColumnLinear(self.wide, (self.wide,), True, shard)
        self.mlp = nn.ModuleDict({"0": first, "2": RowLinear(self.wide, (width,), True, shard)})

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp["2"](functional.gelu(self.mlp["0"](self.ln_q(x).view(-1, self.wide))))


def _windows(frames: int, rows: int, columns: int, window: int) -> tuple[list[int], list[int]]:
    """The order in which the tokens of a window are neighbours, and how many each window has."""
    order, lengths = [], []
    for frame in range(frames):
        for top in range(0, rows, window):
            for left in range(0, columns, window):
                own = [
                    (frame * rows + row) * columns + column
                    for row in range(top, min(rows, top + window))
                    for column in range(left, min(columns, left + window))
                ]
                order += own
                lengths.append(len(own))
    return order, lengths


def _without_sections(text: dict[str, Any]) -> list[int]:
    """Take the sections out of the rotation's options, which is a usual one besides. Raises ConfigError."""
    found: Any = None
    for name in ("rope_scaling", "rope_parameters"):
        options = dict(text.get(name) or {})
        found = options.pop("mrope_section", found)
        for key in ("type", "rope_type"):
            if options.get(key) == "mrope":
                options[key] = "default"
        text[name] = options
    text.setdefault("rope_theta", None)
    if text["rope_theta"] is None:
        text["rope_theta"] = 1e6
    sections = SECTIONS if found is None else found
    if not isinstance(sections, list) or len(sections) != 3 or not all(type(x) is int and x > 0 for x in sections):
        raise ConfigError("config.json: mrope_section must be a list of three whole numbers above 0", "mrope_section")
    return sections


def _read_vision(hf: Mapping[str, Any], width: int) -> VisionConfig:
    given = hf.get("vision_config")
    own = VISION_DEFAULTS | (dict(given) if isinstance(given, dict) else {})
    hidden, heads = count(own, "hidden_size"), count(own, "num_heads")
    if hidden % heads or hidden // heads % 4:
        raise ConfigError(f"config.json: hidden_size {hidden} is no multiple of 4 * num_heads {heads}", "num_heads")
    patch, merge = count(own, "patch_size"), count(own, "spatial_merge_size")
    window = count(own, "window_size") // merge // patch
    if not window:
        raise ConfigError("config.json: window_size is less than a token's side", "window_size")
    whole = own["fullatt_block_indexes"]
    if not isinstance(whole, list) or not all(type(layer) is int for layer in whole):
        raise ConfigError("config.json: fullatt_block_indexes must be a list of whole numbers", "fullatt_block_indexes")
    if (made := own.get("out_hidden_size", width)) != width:
        raise ConfigError(f"config.json: out_hidden_size is {made}, the model's is {width}", "out_hidden_size")
    if own.get("in_channels", 3) != 3:
        raise ConfigError(f"config.json: in_channels is {own['in_channels']}, supported is 3", "in_channels")
    mean, std = read_colours(hf)
    return VisionConfig(
        hidden_size=hidden,
        num_layers=count(own, "depth"),
        num_heads=heads,
        intermediate_size=count(own, "intermediate_size"),
        norm_eps=number(own, "rms_norm_eps", 1e-6, 0.0, 1.0),
        patch_size=patch,
        activation=read_activation(own),
        frames=count(own, "temporal_patch_size"),
        merge=merge,
        window=window,
        whole_layers=frozenset(whole),
        mean=mean,
        std=std,
    )
