"""The parts that decoders are built from. Weights are parameters, some of them packed; mathematics is in `nn.ops`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from penstock.nn import ops
from penstock.nn.batch import Batch
from penstock.nn.config import DecoderConfig
from penstock.nn.packed import PackedWeight, Weight


class Linear(nn.Module):
    """One or more projections of the same input, computed as one product.

    Attributes:
        outs: widths of the projections; `weight` is [sum(outs), in], theirs one after the other.
    """

    def __init__(self, in_features: int, outs: tuple[int, ...], bias: bool) -> None:
        super().__init__()
        self.outs = outs
        self.weight: Weight = nn.Parameter(torch.empty(sum(outs), in_features), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(sum(outs)), requires_grad=False) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return ops.project(x, self.weight, self.bias)


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width), requires_grad=False)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return ops.rms_norm(x, self.weight, self.eps)

    def after(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(normed sum, sum) of x and the residual stream."""
        return ops.add_rms_norm(x, residual, self.weight, self.eps)


class Embedding(nn.Module):
    def __init__(self, vocab_size: int, width: int) -> None:
        super().__init__()
        self.weight: Weight = nn.Parameter(torch.empty(vocab_size, width), requires_grad=False)

    def forward(self, tokens: Tensor) -> Tensor:
        if isinstance(self.weight, PackedWeight):
            return ops.packed_rows(self.weight, tokens)
        return self.weight[tokens]


def hold(module: Linear | Embedding, weight: Weight) -> None:
    """Replace a module's weight."""
    del module.weight  # torch puts no module where a parameter is
    module.weight = weight


class Attention(nn.Module):
    """Grouped-query attention with rotary positions, optionally with per-head norms of Q and K."""

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.scale = dim**-0.5
        self.eps = config.norm_eps
        self.window = config.windows[layer]
        self.qkv_proj = Linear(config.hidden_size, (heads * dim, kv_heads * dim, kv_heads * dim), config.qkv_bias)
        self.o_proj = Linear(heads * dim, (config.hidden_size,), config.o_bias)
        self.q_norm = RMSNorm(dim, config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(dim, config.norm_eps) if config.qk_norm else None

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], cache: Tensor, batch: Batch) -> Tensor:
        norms = None if self.q_norm is None or self.k_norm is None else (self.q_norm.weight, self.k_norm.weight)
        q = ops.qkv_to_cache(self.qkv_proj(x), norms, self.eps, rotation, cache, batch)
        return self.o_proj(self.attend(q, cache, batch).flatten(1))

    def attend(self, q: Tensor, cache: Tensor, batch: Batch) -> Tensor:
        """[rows, heads, dim], rotated, over what the cache has -> the same shape."""
        heads = ops.attention(q, cache, batch, self.scale, self.window)
        for span in batch.branches:
            rows = slice(span.row, span.row + span.rows)
            heads[rows] = ops.branch_attention(q[rows], cache, span, self.scale, self.window, batch.scratch)
        return heads


class GatedMLP(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate_up_proj = Linear(config.hidden_size, (config.intermediate_size,) * 2, config.mlp_bias)
        self.down_proj = Linear(config.intermediate_size, (config.hidden_size,), config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(ops.silu_mul(self.gate_up_proj(x)))


class Layer(nn.Module):
    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = GatedMLP(config)

    def forward(
        self,
        x: Tensor,
        residual: Tensor,
        rotation: tuple[Tensor, Tensor],
        cache: Tensor,
        batch: Batch,
        kept: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(what to add, residual stream) of the layer before -> of this one, or of the `kept` of its rows."""
        x, residual = self.input_layernorm.after(x, residual)
        x = self.self_attn(x, rotation, cache, batch)
        if kept is not None:
            x, residual = x[kept], residual[kept]
        x, residual = self.post_attention_layernorm.after(x, residual)
        return self.mlp(x), residual


class Stack(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
