"""The parts that decoders are built from. Weights are parameters, held by methods; mathematics is in `nn.ops`.

A part that has weights of a checkpoint says by `tensors` what they are, and takes what it needs of them by `load`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from penstock.nn import ops
from penstock.nn.batch import Batch
from penstock.nn.config import DecoderConfig, VisionConfig
from penstock.nn.formats.base import Expected
from penstock.nn.kv import LayerKV
from penstock.nn.linear import WHOLE, ColumnLinear, Embedding, Linear, RowLinear, Shard
from penstock.nn.streams import Steps, run

Rotations = Sequence[tuple[Tensor, Tensor]]  # cos and sin of a step's rows, [rows, dim / 2]


class Values(nn.Module):
    """Weights that are as a checkpoint has them, and that no rank has a part of.

    Args:
        shapes: by their names.
    """

    weight: nn.Parameter

    def __init__(self, **shapes: tuple[int, ...]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape), requires_grad=False))

    def tensors(self, part: int | None = None) -> dict[str, Expected]:
        return {name: Expected(tuple(values.shape)) for name, values in self.named_parameters()}

    def load(self, name: str, tensor: Tensor, part: int | None = None, first: int = 0) -> None:
        self.get_parameter(name)[first : first + len(tensor)] = tensor


class RMSNorm(Values):
    """Its weight is as `ops.rms_norm` has it."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__(weight=(width,))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return ops.rms_norm(x, self.weight, self.eps)

    def after(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(normed sum, sum) of x and the residual stream."""
        return ops.add_rms_norm(x, residual, self.weight, self.eps)


Part = Linear | Values  # what has weights of a checkpoint
Norm = type[RMSNorm]  # which is made of a width and an epsilon


class Mixer(Protocol):
    """What lets a sequence's rows see each other, through what they leave in the cache."""

    def __call__(self, x: Tensor, rotations: Rotations, cache: LayerKV, batch: Batch) -> Tensor:
        """[rows, hidden], normed -> what to add to the residual stream, the same shape.

        Args:
            rotations: of the config's `ropes`.
            cache: of this layer.
        """


class FeedForward(Protocol):
    """What is computed of each row by itself."""

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, hidden], normed -> what to add to the residual stream, the same shape."""

    def steps(self, x: Tensor) -> Steps[Tensor]:
        """The same; it yields where it waits for other ranks."""


def attend(q: Tensor, cache: LayerKV, batch: Batch, scale: float, window: int | None = None) -> Tensor:
    """[rows, heads, dim], rotated, over what the cache has -> [rows, heads, value dim]."""
    together = batch.together if window is None else None
    heads = None if together is None else together(q, cache, batch, scale)
    if heads is None:
        heads = ops.attention(q, cache, batch, scale, window)
    for span in batch.branches:
        rows = slice(span.row, span.row + span.rows)
        heads[rows] = ops.branch_attention(q[rows], cache, span, scale, window, batch.scratch)
    return heads


class Attention(nn.Module):
    """Grouped-query attention with rotary positions, optionally with per-head norms of Q and K.

    Attributes:
        heads: of queries, those of this shard.
        window: how many positions a row sees, itself included; None is all.
        rotation: which of the config's `ropes` is this layer's.

    Args:
        shard: of the heads. Where there are fewer of K and V than shards, several shards have the same.
        norm: of Q and K.
    """

    def __init__(self, config: DecoderConfig, layer: int, shard: Shard = WHOLE, norm: Norm = RMSNorm) -> None:
        super().__init__()
        dim = config.head_dim
        q, kv, hidden = config.num_heads * dim, config.num_kv_heads * dim, config.hidden_size
        of_kv = shard
        if config.num_kv_heads < shard.size:
            of_kv = Shard(shard.rank * config.num_kv_heads // shard.size, config.num_kv_heads)
        self.heads = len(shard.of(config.num_heads))
        self.scale = config.attention_scale
        self.eps = config.norm_eps
        self.window = config.windows[layer]
        self.rotation = config.rope_of(layer)
        self.qkv_proj = ColumnLinear(hidden, (q, kv, kv), config.qkv_bias, (shard, of_kv, of_kv))
        self.o_proj = RowLinear(q, (hidden,), config.o_bias, shard)
        self.q_norm = norm(dim, config.norm_eps) if config.qk_norm else None
        self.k_norm = norm(dim, config.norm_eps) if config.qk_norm else None

    def forward(self, x: Tensor, rotations: Rotations, cache: LayerKV, batch: Batch) -> Tensor:
        norms = None if self.q_norm is None or self.k_norm is None else (self.q_norm.weight, self.k_norm.weight)
        q = ops.qkv_to_cache(self.qkv_proj(x), norms, self.eps, rotations[self.rotation], cache, batch)
        return self.o_proj(self.attend(q, cache, batch).flatten(1))

    def attend(self, q: Tensor, cache: LayerKV, batch: Batch) -> Tensor:
        return attend(q, cache, batch, self.scale, self.window)


class GatedMLP(nn.Module):
    """
    Args:
        width: of the gate; None is the config's.
    """

    def __init__(self, config: DecoderConfig | VisionConfig, shard: Shard = WHOLE, width: int | None = None) -> None:
        super().__init__()
        hidden, width = config.hidden_size, width or config.intermediate_size
        self.activation = config.activation
        self.gate_up_proj = ColumnLinear(hidden, (width, width), config.mlp_bias, shard)
        self.down_proj = RowLinear(width, (hidden,), config.mlp_bias, shard)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(ops.gate_mul(self.gate_up_proj(x), self.activation))

    def steps(self, x: Tensor) -> Steps[Tensor]:
        yield from ()
        return self(x)


class Block(nn.Module):
    """A mixer and a feed-forward, both of a normed residual stream, to which each adds.

    Args:
        norm: of both, and of what they add.
        post_norms: whether what is added is normed too.
    """

    def __init__(
        self,
        config: DecoderConfig,
        mixer: Mixer,
        feed_forward: FeedForward,
        norm: Norm = RMSNorm,
        post_norms: bool = False,
    ) -> None:
        super().__init__()
        shape = config.hidden_size, config.norm_eps
        self.mixer_norm = norm(*shape)
        self.mixer = mixer
        self.mixer_post_norm = norm(*shape) if post_norms else None
        self.feed_forward_norm = norm(*shape)
        self.feed_forward = feed_forward
        self.feed_forward_post_norm = norm(*shape) if post_norms else None

    def forward(
        self,
        x: Tensor,
        residual: Tensor,
        rotations: Rotations,
        cache: LayerKV,
        batch: Batch,
        kept: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """As `steps`."""
        return run(self.steps(x, residual, rotations, cache, batch, kept))

    def steps(
        self,
        x: Tensor,
        residual: Tensor,
        rotations: Rotations,
        cache: LayerKV,
        batch: Batch,
        kept: Tensor | None = None,
    ) -> Steps[tuple[Tensor, Tensor]]:
        """(what to add, residual stream) of the layer before -> of this one, or of the `kept` of its rows."""
        x, residual = self.mixer_norm.after(x, residual)
        x = self.mixer(x, rotations, cache, batch)
        if kept is not None:
            x, residual = x[kept], residual[kept]
        if self.mixer_post_norm is not None:
            x = self.mixer_post_norm(x)
        x, residual = self.feed_forward_norm.after(x, residual)
        x = yield from self.feed_forward.steps(x)
        return (x if self.feed_forward_post_norm is None else self.feed_forward_post_norm(x)), residual


class Stack(nn.Module):
    """Blocks between an embedding and a last norm, or those of one stage of a pipeline.

    Attributes:
        embed_tokens: at the first stage, and at the last where it is the head too, or a draft head is there.
        layers: by their numbers in the whole model.
        norm: at the last stage.

    Args:
        blocks: by their numbers.
    """

    def __init__(
        self, config: DecoderConfig, blocks: Mapping[int, nn.Module], norm: Norm, shard: Shard = WHOLE
    ) -> None:
        super().__init__()
        self.embed_tokens: Embedding | None = None
        if shard.is_first or (shard.is_last and (config.tie_embeddings or config.draft_head)):
            self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, config.embedding_scale, shard)
        self.layers = nn.ModuleList()
        for number, block in blocks.items():
            self.layers.add_module(str(number), block)
        self.norm = norm(config.hidden_size, config.norm_eps) if shard.is_last else None
