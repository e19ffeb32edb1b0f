"""A layer's K and V as ops see them: in a cache's blocks, stored as they are or in 8 bits with scales.

Those of multi-head latent attention are one vector a token, which all heads share: K is all of it, and V its beginning.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}  # that a scaled value may be
LEAST = 1e-30  # of a head whose largest value is less, nothing is left: its scale's inverse may be no number


@dataclass(frozen=True, slots=True)
class LayerKV:
    """One layer of a cache.

    Attributes:
        values: [blocks, 2, kv_heads, BLOCK_TOKENS, dim], K at 0 and V at 1; of latent vectors
            [blocks, 1, 1, BLOCK_TOKENS, dim].
        scales: [blocks, 2 or 1, kv_heads, BLOCK_TOKENS] float32, with which values are multiplied: one for each token
            and head; None where values are what they are.
        group: which of a sequence's blocks are this layer's: those of its group of layers.
        latent: how many of a vector's values, from the first on, are V; 0 where V is stored beside K.
    """

    values: Tensor
    scales: Tensor | None = None
    group: int = 0
    latent: int = 0

    @property
    def kv_heads(self) -> int:
        return self.values.shape[2]

    @property
    def dim(self) -> int:
        return self.values.shape[4]

    @property
    def value_dim(self) -> int:
        return self.latent or self.dim

    @property
    def bytes_per_token(self) -> int:
        scale = 0 if self.scales is None else self.scales.itemsize
        return self.values.shape[1] * self.kv_heads * (self.dim * self.values.itemsize + scale)

    def put(self, kind: int, blocks: Tensor, offsets: Tensor, rows: Tensor) -> None:
        """Store rows, [rows, kv_heads, dim], of K (0) or V (1) at places, [rows] each."""
        if self.scales is not None:
            rows, scales = quantised(rows, self.values.dtype)
            self.scales[blocks, kind, :, offsets] = scales
        _plain(self.values)[blocks, kind, :, offsets] = _plain(rows)

    def parts(self, found: Tensor) -> tuple[Tensor, Tensor]:
        """K and V of what was read, [2 or 1, ..., dim]."""
        return (found[0], found[0][..., : self.latent]) if self.latent else (found[0], found[1])

    def of_blocks(self, blocks: Tensor | slice, dtype: torch.dtype) -> Tensor:
        """What whole blocks hold: [*blocks, kinds, kv_heads, BLOCK_TOKENS, dim]."""
        return self._read((blocks,), dtype)

    def of_tokens(self, blocks: Tensor, offsets: Tensor, dtype: torch.dtype) -> Tensor:
        """What single places hold: [*blocks, kinds, kv_heads, dim]."""
        return self._read((blocks, slice(None), slice(None), offsets), dtype)

    def _read(self, where: tuple[Tensor | slice, ...], dtype: torch.dtype) -> Tensor:
        values = _plain(self.values)[where].view(self.values.dtype)
        return values.to(dtype) if self.scales is None else dequantised(values, self.scales[where], dtype)


class KVLayers(list[LayerKV]):
    """All layers of a cache. What is kept about it refers to it weakly, and does not keep its memory."""

    @property
    def groups(self) -> int:
        """Of layers, each of which has blocks of its own."""
        return 1 + max(layer.group for layer in self)


def quantised(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """[..., dim] -> (values of the same shape, scales [...] float32), symmetric: the largest value becomes the dtype's
    largest. What holds an infinity or a NaN has a scale that is none either."""
    x = x.float()
    largest = x.abs().amax(-1)
    inverse = torch.where(largest < LEAST, 0.0, torch.full_like(largest, LARGEST[dtype]) / largest)
    values = x * inverse[..., None]
    return (values.round() if dtype == torch.int8 else values).to(dtype), largest / LARGEST[dtype]


def dequantised(values: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Values [..., dim] times scales [...]."""
    return (values.float() * scales[..., None]).to(dtype)


def _plain(x: Tensor) -> Tensor:
    """Bytes as a type that can be indexed everywhere, which those of 8 bits with a point cannot."""
    return x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x
