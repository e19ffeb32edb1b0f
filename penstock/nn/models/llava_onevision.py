"""LLaVA-OneVision: Qwen2 that sees images of any size as tiles of one size, and videos as frames of it, by SigLIP."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock.core.errors import ConfigError
from penstock.core.hf_config import count, number, text_config
from penstock.core.request import MediaSpan
from penstock.core.tiles import Size, read_tiling
from penstock.nn.config import DecoderConfig, VisionConfig, read_activation, read_colours
from penstock.nn.layers import Values
from penstock.nn.linear import WHOLE, ColumnLinear, RowLinear, Shard
from penstock.nn.models.decoder import Decoder, WeightMap
from penstock.nn.models.qwen2 import Qwen2
from penstock.nn.vision import MLP, LayerNorm, PatchEmbedding, Segments, VisionAttention, alike, normalised

# what transformers takes where config.json has no such key
VISION_DEFAULTS = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "patch_size": 14,
    "image_size": 384,
    "num_hidden_layers": 26,
    "num_attention_heads": 16,
    "hidden_act": "gelu_pytorch_tanh",
}
# of options that change the result, what is supported
ONLY = {"vision_feature_select_strategy": "full", "projector_hidden_act": "gelu", "multimodal_projector_bias": True}


class LlavaOnevision(Decoder):
    tower_weights: ClassVar[WeightMap] = {
        "layer_norm1": ("layer_norm1",),
        "attention.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "attention.o_proj": ("self_attn.out_proj",),
        "layer_norm2": ("layer_norm2",),
        "feed_forward.up_proj": ("mlp.fc1",),
        "feed_forward.down_proj": ("mlp.fc2",),
    }

    @staticmethod
    def read_config(hf: Mapping[str, Any]) -> DecoderConfig:
        text = text_config(hf)
        if (kind := text.get("model_type")) not in ("qwen2", "llava_onevision"):
            raise ConfigError(f"config.json: text_config is of {ascii(kind)[:60]}, supported is qwen2", "text_config")
        return replace(Qwen2.read_config(text), vision=_read_vision(hf))

    def __init__(self, config: DecoderConfig, shard: Shard = WHOLE) -> None:
        super().__init__(config, shard)
        assert config.vision is not None
        if shard.is_first:
            self.visual = Tower(config.vision, config.hidden_size, shard)

    def look_at(self, span: MediaSpan, pixels: Tensor) -> Tensor:
        assert isinstance(self.visual, Tower)
        if span.kind == "video":
            return self.visual.video(pixels)
        return self.visual.image(pixels, span.source)


class Tower(nn.Module):
    """Tiles to tokens, and tokens of an image's tiles to rows of the image.

    Args:
        width: of the tokens.
    """

    def __init__(self, config: VisionConfig, width: int, shard: Shard = WHOLE) -> None:
        super().__init__()
        assert config.tiling is not None
        self.config, self.tiling = config, config.tiling
        hidden, patch = config.hidden_size, config.patch_size
        self.embeddings = nn.ModuleDict(
            {
                "patch_embedding": PatchEmbedding(hidden, (3, patch, patch), bias=True),
                "position_embedding": Values(weight=(self.tiling.per_tile, hidden)),
            }
        )
        self.encoder = nn.Module()
        self.encoder.layers = nn.ModuleList(TowerBlock(config, shard) for _ in range(config.num_layers))
        first = ColumnLinear(hidden, (width,), True, shard)
        self.projector = nn.ModuleDict({"linear_1": first, "linear_2": RowLinear(width, (width,), True, shard)})
        self.newline = Values(weight=(width,))

    def image(self, pixels: Tensor, source: Size) -> Tensor:
        """[tiles, side, side, 3] bytes -> [tokens, width].

        Args:
            pixels: the whole image, and behind it its tiles row by row, unless it is one of several images.
            source: height and width that it had.
        """
        features, ends = self(pixels), self.newline.weight[None]
        if len(features) == 1:
            return torch.cat((features[0], ends))
        seen, patches = self.tiling.seen(source), self.tiling.patches
        (down, across), (rows, columns) = seen.tiles, seen.own
        tiles = features[1:].view(down, across, patches, patches, -1)
        whole = tiles.permute(4, 0, 2, 1, 3).reshape(-1, down * patches, across * patches)
        top, left = (down * patches - rows) // 2, (across * patches - columns) // 2
        own = whole[:, top : top + rows, left : left + columns]
        if seen.kept != seen.own:
            own = functional.interpolate(own[None], seen.kept, mode="bilinear")[0]
        lines = torch.cat((own.permute(1, 2, 0), ends.expand(len(own[0]), 1, -1)), dim=1)
        return torch.cat((features[0], lines.flatten(0, 1)))

    def video(self, pixels: Tensor) -> Tensor:
        """[frames, side, side, 3] bytes -> [tokens, width]."""
        patches = self.tiling.patches
        planes = self(pixels).transpose(1, 2).unflatten(2, (patches, patches))
        fewer = functional.interpolate(planes, (-(-patches // 2),) * 2, mode="bilinear")
        return torch.cat((fewer.permute(0, 2, 3, 1).flatten(0, 2), self.newline.weight[None]))

    def forward(self, pixels: Tensor) -> Tensor:
        """[tiles, side, side, 3] bytes -> [tiles, patches, width]."""
        tiles, size, patches = len(pixels), self.config.patch_size, self.tiling.patches
        colours = normalised(pixels, self.config)[:, :, : patches * size, : patches * size]
        split = colours.unflatten(3, (patches, size)).unflatten(2, (patches, size))
        flat = split.permute(0, 2, 4, 1, 3, 5).reshape(tiles * patches**2, -1)
        places = self.get_parameter("embeddings.position_embedding.weight")
        x = self.embeddings["patch_embedding"](flat.to(places.dtype)) + places.repeat(tiles, 1)
        whole = alike([self.tiling.per_tile] * tiles, x.device)
        for block in cast(nn.ModuleList, self.encoder.layers):
            x = block(x, whole)
        projected = self.projector["linear_2"](functional.gelu(self.projector["linear_1"](x)))
        return projected.view(tiles, self.tiling.per_tile, -1)


class TowerBlock(nn.Module):
    def __init__(self, config: VisionConfig, shard: Shard) -> None:
        super().__init__()
        self.layer_norm1 = LayerNorm(config.hidden_size, config.norm_eps)
        self.attention = VisionAttention(config, shard)
        self.layer_norm2 = LayerNorm(config.hidden_size, config.norm_eps)
        self.feed_forward = MLP(config, shard)

    def forward(self, x: Tensor, segments: Segments) -> Tensor:
        x = x + self.attention(self.layer_norm1(x), segments)
        return x + self.feed_forward(self.layer_norm2(x))


def _read_vision(hf: Mapping[str, Any]) -> VisionConfig:
    given = hf.get("vision_config")
    own = VISION_DEFAULTS | (dict(given) if isinstance(given, dict) else {})
    if (kind := own.get("model_type", "siglip_vision_model")) != "siglip_vision_model":
        raise ConfigError(
            f"config.json: vision_config is of {ascii(kind)[:60]}, supported is siglip_vision_model", "vision_config"
        )
    for name, supported in ONLY.items():
        if (said := hf.get(name, supported)) != supported:
            raise ConfigError(f"config.json: {name} is {ascii(said)[:60]}, supported is {supported}", name)
    hidden, heads, layers = (
        count(own, "hidden_size"),
        count(own, "num_attention_heads"),
        count(own, "num_hidden_layers"),
    )
    if hidden % heads:
        raise ConfigError(
            f"config.json: hidden_size {hidden} is no multiple of num_attention_heads {heads}", "num_attention_heads"
        )
    if (chosen := hf.get("vision_feature_layer", -1)) not in (-1, layers):
        raise ConfigError(
            f"config.json: vision_feature_layer is {ascii(chosen)[:60]}, supported is the last, -1",
            "vision_feature_layer",
        )
    if own.get("num_channels", 3) != 3:
        raise ConfigError(
            f"config.json: num_channels is {ascii(own['num_channels'])[:60]}, supported is 3", "num_channels"
        )
    if (activation := read_activation(own)) != "gelu_tanh":
        raise ConfigError("config.json: hidden_act of the tower must be gelu_pytorch_tanh", "hidden_act")
    mean, std = read_colours(hf)
    return VisionConfig(
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        intermediate_size=count(own, "intermediate_size"),
        norm_eps=number(own, "layer_norm_eps", 1e-6, 0.0, 1.0),
        patch_size=count(own, "patch_size"),
        activation=activation,
        mean=mean,
        std=std,
        tiling=read_tiling({**hf, "vision_config": own}),
    )
