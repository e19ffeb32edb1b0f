"""The parts of vision towers: an image's patches see each other in both directions, and nothing of them is cached.

A tower computes one image or video at a time, so that what comes of it depends on nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock.nn import ops
from penstock.nn.config import VisionConfig
from penstock.nn.formats.base import Expected
from penstock.nn.layers import Values
from penstock.nn.linear import WHOLE, ColumnLinear, Linear, RowLinear, Shard

Segments = Sequence[Tensor]  # [segments, rows] int64 each: rows that see each other, segments of one length together


class PatchEmbedding(Linear):
    """Patches to rows; checkpoints have it as a convolution whose stride is its width.

    Args:
        kernel: of that convolution: colours, perhaps frames, height and width.
    """

    def __init__(self, width: int, kernel: Sequence[int], bias: bool = False) -> None:
        self.kernel = tuple(kernel)
        super().__init__(torch.Size(kernel).numel(), (width,), bias)

    def tensors(self, part: int | None = None) -> dict[str, Expected]:
        return super().tensors(part) | {"weight": Expected((*self.outs, *self.kernel))}

    def load(self, name: str, tensor: Tensor, part: int | None = None, first: int = 0) -> None:
        super().load(name, tensor if name == "bias" else tensor.flatten(1), part, first)


class LayerNorm(Values):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__(weight=(width,), bias=(width,))
        self.eps = eps
        self.bias: nn.Parameter

    def forward(self, x: Tensor) -> Tensor:
        return functional.layer_norm(x, x.shape[-1:], self.weight, self.bias, self.eps)


class MLP(nn.Module):
    """Two projections, and between them GELU, by its tanh, without a gate."""

    def __init__(self, config: VisionConfig, shard: Shard = WHOLE) -> None:
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size
        self.up_proj = ColumnLinear(width, (inner,), True, shard)
        self.down_proj = RowLinear(inner, (width,), True, shard)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.gelu(self.up_proj(x), approximate="tanh"))


class VisionAttention(nn.Module):
    """Every patch attends to those of its segment.

    Args:
        shard: of the heads.
    """

    def __init__(self, config: VisionConfig, shard: Shard = WHOLE) -> None:
        super().__init__()
        width = config.hidden_size
        self.dim = config.head_dim
        self.qkv_proj = ColumnLinear(width, (width,) * 3, True, shard)
        self.o_proj = RowLinear(width, (width,), True, shard)

    def forward(self, x: Tensor, segments: Segments, rotation: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """[rows, hidden] -> the same.

        Args:
            segments: of all rows.
            rotation: cos and sin, [rows, dim / 2] float32.
        """
        q, k, v = self.qkv_proj(x).view(len(x), 3, -1, self.dim).unbind(1)
        if rotation is not None:
            q, k = (ops.rotary(part.float(), *rotation).to(x.dtype) for part in (q, k))
        heads = torch.empty_like(v, memory_format=torch.contiguous_format)
        for rows in segments:
            parts = (part[rows].transpose(1, 2) for part in (q, k, v))  # [segments, heads, rows, dim]
            heads[rows] = functional.scaled_dot_product_attention(*parts).transpose(1, 2)
        return self.o_proj(heads.flatten(1))


def normalised(pixels: Tensor, config: VisionConfig) -> Tensor:
    """[frames, height, width, 3] bytes -> [frames, 3, height, width] float32."""
    colours = pixels.permute(0, 3, 1, 2).float() * (1 / 255)
    mean, std = (torch.tensor(of, device=pixels.device)[:, None, None] for of in (config.mean, config.std))
    return (colours - mean) / std


def alike(lengths: Sequence[int], device: torch.device) -> list[Tensor]:
    """Segments of so many rows one after the other, those of one length together."""
    starts: dict[int, list[int]] = {}
    first = 0
    for length in lengths:
        starts.setdefault(length, []).append(first)
        first += length
    return [
        torch.tensor(firsts, device=device)[:, None] + torch.arange(length, device=device)
        for length, firsts in starts.items()
    ]
