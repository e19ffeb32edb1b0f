"""A dense decoder over a paged cache: what the Llama family shares. Module names are the checkpoints' own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from penstock.nn import ops
from penstock.nn.batch import Batch
from penstock.nn.bounded_logits import LEAST, BoundedLogits
from penstock.nn.config import DecoderConfig
from penstock.nn.graph import Graph, mode_of
from penstock.nn.layers import Embedding, Linear, Stack, hold
from penstock.nn.packed import PackedWeight, Weight
from penstock.nn.rope import frequencies, longest


class Decoder(nn.Module):
    """Base of every dense architecture; a subclass says how to read its config.json.

    Attributes:
        graph_mode: "eager" computes op by op, "full" a step as one call, "partial" in two calls a layer all of it but
            attention, "auto" as one call where it can be (nn/graph.py). The result is the same, to the bit.
        headless: its logits mean nothing: the checkpoint is an embedding model's.
    """

    @staticmethod
    def read_config(hf: Mapping[str, Any]) -> DecoderConfig:
        """Raises ConfigError naming the key that is missing or not supported."""
        raise NotImplementedError

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Stack(config)
        self.lm_head = None if config.tie_embeddings else Linear(config.hidden_size, (config.vocab_size,), bias=False)
        self.graph_mode = "auto"
        self.headless = False
        self._rotation: Rotation | None = None
        self._graph: Graph | None = None
        self._bounded_logits: BoundedLogits | None = None

    def pack(self) -> None:
        """Hold what products read in the kernels' layout; what weights held is gone."""
        for module in list(self.modules()):
            # an embedding is only looked up in, unless it is the head too
            if isinstance(module, Linear) or (isinstance(module, Embedding) and self.lm_head is None):
                outs, ins = module.weight.shape
                hold(module, PackedWeight(outs, ins, module.weight.dtype, module.weight.device))

    def untie(self, weight: Weight) -> None:
        """Have a head other than the embedding."""
        outs, ins = weight.shape
        with torch.device("meta"):
            self.lm_head = Linear(ins, (outs,), bias=False)
        hold(self.lm_head, weight)

    def bound_logits(self, least: int = LEAST) -> None:
        """Have what `choose` needs, unless the head has less than `least` bytes. Weights must not change afterwards."""
        weight = self._head
        if isinstance(weight, PackedWeight) and weight.memory.nbytes >= least and not self.headless:
            self._bounded_logits = BoundedLogits.of(weight)

    @property
    def _head(self) -> Weight:
        return (self.model.embed_tokens if self.lm_head is None else self.lm_head).weight

    @property
    def dtype(self) -> torch.dtype:
        return self.model.embed_tokens.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.model.embed_tokens.weight.device

    def _apply(self, *args: Any, **kwargs: Any) -> Decoder:
        self._graph = self._bounded_logits = self._rotation = None  # weights move, or change their type
        return super()._apply(*args, **kwargs)

    def forward(self, batch: Batch, cache: Tensor) -> Tensor:
        """Compute a step's rows and store their K and V.

        Args:
            batch: the rows.
            cache: [blocks, layers, 2, kv_heads, BLOCK_TOKENS, dim].

        Returns:
            [rows, hidden], normed; of `batch.kept`, where only those are wanted.
        """
        if self._rotation is None:
            self._rotation = Rotation(self.config, self.dtype, self.device)
        rotation = self._rotation(batch.positions, batch.reach)
        if (mode := mode_of(self.model, self.graph_mode, batch)) != "eager":
            self._graph = self._graph or Graph(self.config, self.model)
            return self._graph(mode, batch, rotation, cache)
        x = self.model.embed_tokens(batch.tokens)
        residual = torch.zeros_like(x)
        for i, layer in enumerate(self.model.layers):
            kept = batch.kept if i == self.config.num_layers - 1 else None
            x, residual = layer(x, residual, rotation, cache[:, i], batch, kept)
        return self.model.norm.after(x, residual)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] -> [rows, vocab] float32."""
        return ops.project(hidden, self._head, dtype=torch.float32)

    def choose(self, hidden: Tensor, draws: Sequence[ops.Draw]) -> Tensor | None:
        """[rows, hidden] -> [rows] tokens, without computing all logits; None where these are needed."""
        weight = self._head
        if self._bounded_logits is None or not ops.choose_pays(draws):
            return None
        assert isinstance(weight, PackedWeight)
        tokens = ops.choose(hidden, weight, self._bounded_logits, draws)
        return None if -1 in tokens.tolist() else tokens


class Rotation:
    """cos and sin of a step's positions, for all layers; out of tables, which grow as far as positions reach."""

    def __init__(self, config: DecoderConfig, dtype: torch.dtype, device: torch.device) -> None:
        base, self._factor = frequencies(config)
        self._longest = longest(config)
        self._base = base.to(device)
        self._dtype = dtype
        nothing = torch.empty(0, len(base), dtype=dtype, device=device)
        self._tables = nothing, nothing  # replaced together

    def __call__(self, positions: Tensor, reach: int) -> tuple[Tensor, Tensor]:
        """[rows], all below `reach` -> two of [rows, dim / 2]; the angle is float32 whatever the model's dtype."""
        cos, sin = self._tables
        if reach > len(cos):
            size = max(reach, min(1 << max(10, (reach - 1).bit_length()), self._longest))
            angle = torch.arange(size, device=positions.device)[:, None].float() * self._base
            cos, sin = ((x * self._factor).to(self._dtype) for x in (angle.cos(), angle.sin()))
            self._tables = cos, sin
        return cos.index_select(0, positions), sin.index_select(0, positions)
