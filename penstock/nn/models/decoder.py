"""A decoder over a paged cache: what the Llama family shares."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock.core.request import MediaSpan
from penstock.nn import ops
from penstock.nn.batch import Batch
from penstock.nn.bounded_logits import LEAST, BoundedLogits, Take
from penstock.nn.config import DecoderConfig, RopeConfig
from penstock.nn.draft_head import DraftHead
from penstock.nn.experts import MixtureOfExperts, feed_forward
from penstock.nn.formats.base import Format
from penstock.nn.formats.dense import DENSE
from penstock.nn.kv import KVLayers
from penstock.nn.layers import Attention, Block, Norm, RMSNorm, Rotations, Stack
from penstock.nn.linear import WHOLE, Embedding, Linear, Shard
from penstock.nn.methods.base import LinearMethod
from penstock.nn.ranks import Ranks
from penstock.nn.rope import frequencies, longest
from penstock.nn.streams import Steps, by_turns, run

# Of a block: where its weights go -> what checkpoints call them. Several names are the projections of one linear, in
# their order; one name for a linear of several projections is theirs together. A "*" stands for each expert's number.
WeightMap = Mapping[str, tuple[str, ...]]

WEIGHTS: WeightMap = {
    "mixer_norm": ("input_layernorm",),
    "mixer.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mixer.q_norm": ("self_attn.q_norm",),
    "mixer.k_norm": ("self_attn.k_norm",),
    "mixer.o_proj": ("self_attn.o_proj",),
    "feed_forward_norm": ("post_attention_layernorm",),
    "feed_forward.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    "feed_forward.down_proj": ("mlp.down_proj",),
}


EXPERTS: WeightMap = {
    "feed_forward.router": ("mlp.gate",),
    "feed_forward.experts.gate_up_proj": ("mlp.experts.*.gate_proj", "mlp.experts.*.up_proj"),
    "feed_forward.experts.down_proj": ("mlp.experts.*.down_proj",),
    "feed_forward.shared_experts.gate_up_proj": ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
    "feed_forward.shared_experts.down_proj": ("mlp.shared_experts.down_proj",),
}


Lane = tuple[Tensor, Tensor]  # of a micro-batch: what to add to the residual stream, and that


class Decoder(nn.Module):
    """Base of every architecture; a subclass says how to read its config.json, and what differs in its blocks.

    Attributes:
        weights: as `WEIGHTS`.
        draft_weights: the same of a draft head beside its block, in a checkpoint's layer behind the last one.
        norm: the kind that all are of.
        draft_head: where it is asked for, at the last stage; it shares the embedding and the head.
        headless: its logits mean nothing: the checkpoint is an embedding model's.
        bounded_logits: where it has them; see `bound_logits`.
        visual: the tower by which it sees, at the first stage; None where there is none.
        tower_weights: of a block of that, as `weights`.

    Args:
        shard: of every layer's heads and gates, and of the vocabulary; and of the layers, where it is one of several
            stages.
    """

    weights: ClassVar[WeightMap] = WEIGHTS
    draft_weights: ClassVar[WeightMap] = {}
    tower_weights: ClassVar[WeightMap] = {}
    norm: ClassVar[Norm] = RMSNorm

    @staticmethod
    def read_config(hf: Mapping[str, Any]) -> DecoderConfig:
        """Raises ConfigError naming the key that is missing or not supported."""
        raise NotImplementedError

    @classmethod
    def block(cls, config: DecoderConfig, layer: int, shard: Shard) -> Block:
        return Block(config, Attention(config, layer, shard, cls.norm), feed_forward(config, layer, shard), cls.norm)

    def __init__(self, config: DecoderConfig, shard: Shard = WHOLE) -> None:
        super().__init__()
        self.config, self.shard = config, shard
        own = [layer for layer in shard.layers(config.kept_layers) if layer < config.num_layers]
        blocks = {layer: self.block(config, layer, shard) for layer in own}
        self.model = Stack(config, blocks, self.norm, shard)
        self.lm_head = None if config.tie_embeddings or not shard.is_last else self._new_head()
        self.draft_head: DraftHead | None = None
        if config.draft_head and shard.is_last:
            self.draft_head = DraftHead(config, self.block(config, config.num_layers - 1, shard), self.norm)
        self.headless = False
        self.visual: nn.Module | None = None
        self._rotations: list[Rotation] = []
        self.bounded_logits: BoundedLogits | None = None

    def hold(self, method: LinearMethod[Any, Any]) -> None:
        """Have what products read held by a method; what weights held is gone."""
        self.hold_each(lambda _: (method, DENSE))

    def hold_each(self, how: Callable[[str], tuple[LinearMethod[Any, Any], Format[Any]]]) -> None:
        """The same, each by a method of its own, and with a checkpoint's format of it.

        Args:
            how: called with the linear's name here.
        """
        for name, module in list(self.named_modules()):
            # an embedding is only looked up in, unless it is the head too
            is_head = self.shard.is_last and module is self.head
            if isinstance(module, Linear) and (is_head or not isinstance(module, Embedding)):
                module.hold(*how(name))

    def untie(self) -> Linear:
        """Have a head other than the embedding; it is on "meta"."""
        embedding = self.head
        with torch.device("meta"):
            self.lm_head = self._new_head().to(self.dtype)
            self.lm_head.hold(embedding.method, embedding.format)
        return self.lm_head

    def _new_head(self) -> Linear:
        vocab = self.config.vocab_size
        return Linear(self.config.hidden_size, (vocab,), own_outs=(self.shard.of_tokens(vocab),))

    def bound_logits(self, least: int = LEAST, take: Take | None = None) -> None:
        """Have what `choose` needs, unless the head has less than `least` bytes. Weights must not change afterwards.

        Args:
            take: makes memory for it.
        """
        if self.headless or not self.shard.is_last:
            return
        part = self.shard.part_of(self.config.vocab_size) * self.config.hidden_size * self.dtype.itemsize
        if part < least:
            self.bounded_logits = None
        elif self.bounded_logits is None:
            self.bounded_logits = self.head.method.bounded_logits(self.head.weight, take)
        if (ranks := self.shard.ranks) is not None:  # which all have them, or none
            there = torch.tensor([self.bounded_logits is not None], device=self.device)
            if not ranks.gather(there).all():
                self.bounded_logits = None

    @property
    def head(self) -> Linear:
        """Only the last stage has it."""
        head = self.model.embed_tokens if self.lm_head is None else self.lm_head
        assert head is not None
        return head

    @property
    def quantised(self) -> bool:
        """Whether any of its weights is."""
        return any(isinstance(part, Linear) and part.format.codes is not None for part in self.modules())

    @property
    def dtype(self) -> torch.dtype:
        return self._some_linear.weight.dtype

    @property
    def device(self) -> torch.device:
        return self._some_linear.weight.device

    @property
    def _some_linear(self) -> Linear:
        return self.model.embed_tokens or next(part for part in self.modules() if isinstance(part, Linear))

    def _apply(self, *args: Any, **kwargs: Any) -> Decoder:
        self.bounded_logits = None  # weights move, or change their type
        self._rotations = []
        return super()._apply(*args, **kwargs)

    def forward(
        self,
        batch: Batch,
        cache: KVLayers,
        look: Callable[[], None] = lambda: None,
        came: Tensor | None = None,
    ) -> Tensor:
        """Compute a step's rows, op by op, and store their K and V.

        Args:
            batch: the rows.
            cache: of each of its layers.
            look: called before each layer; what it raises ends the step.
            came: of all stages but the first: what the one before has returned.

        Returns:
            [rows, hidden], normed; of `batch.kept`, where only those are wanted. Of all stages but the last [2, rows,
            hidden]: what to add to the residual stream, and that.
        """
        rotations = self.rotations(batch)
        if came is None:
            assert self.model.embed_tokens is not None
            x = self.model.embed_tokens(batch.tokens)
            if batch.seen is not None:
                x = x.index_copy(0, *batch.seen)
            residual = torch.zeros_like(x)
        else:
            x, residual = came.unbind()
        lanes = list[Steps[Lane]]()
        if batch.halves is None or self.shard.experts is None:
            lanes.append(self._steps(x, residual, rotations, batch, cache, look))
        else:
            at = len(batch.halves[0].positions)
            for half, rows in zip(batch.halves, (slice(at), slice(at, None)), strict=True):
                own = [(cos[rows], sin[rows]) for cos, sin in rotations]
                lanes.append(self._steps(x[rows], residual[rows], own, half, cache, look))
        found = self._by_turns(lanes)
        x, residual = found[0] if len(found) == 1 else (torch.cat(parts) for parts in zip(*found, strict=True))
        if self.model.norm is None:
            return torch.stack((x, residual))
        return self.model.norm.after(x, residual)[0]

    def _steps(
        self,
        x: Tensor,
        residual: Tensor,
        rotations: Rotations,
        batch: Batch,
        cache: KVLayers,
        look: Callable[[], None],
    ) -> Steps[Lane]:
        """Through all its layers."""
        last = len(self.model.layers) - 1
        for i, layer in enumerate(self.model.layers):
            look()
            kept = batch.kept if i == last else None
            table = batch.tables[cache[i].group]
            x, residual = yield from cast(Block, layer).steps(x, residual, rotations, cache[i], table, kept)
        return x, residual

    def _by_turns(self, lanes: Sequence[Steps[Lane]]) -> list[Lane]:
        """What comes of one micro-batch, or of two."""
        experts = self.shard.experts
        if experts is None or experts.ranks is None:
            return [run(lane) for lane in lanes]
        if experts.turns is not None:
            return experts.turns.run(lanes, self._accompanying, experts.stream, experts.ranks)
        if len(lanes) == 1:
            return [run(lanes[0])]
        with experts.stream.beside(experts.ranks):
            return by_turns(lanes)

    def accompany(self) -> None:
        """Take part in a step of other data-parallel groups, with no rows. Raises RankFailed."""
        self._by_turns([self._accompanying()])

    def _accompanying(self) -> Steps[Lane]:
        none = torch.empty(0, self.config.hidden_size, dtype=self.dtype, device=self.device)
        for layer in self.model.layers:
            yield from self._accompany(cast(Block, layer))
        return none, none

    def accompany_draft(self) -> None:
        """The same when their draft heads compute rows."""
        if self.draft_head is not None:
            run(self._accompany(self.draft_head.block))

    def _accompany(self, layer: Block) -> Steps[None]:
        if isinstance(layer.feed_forward, MixtureOfExperts):
            yield from layer.feed_forward.accompany(self.dtype)

    def draft(
        self, hidden: Tensor, following: Tensor, batch: Batch, cache: KVLayers, kept: Tensor | None = None
    ) -> Tensor:
        """Have the draft head compute a step's rows, and store what it keeps of them.

        Args:
            hidden: [rows, hidden], normed: what the model has made of them, or the head of the rows before.
            following: [rows] int64: the token behind each.
            cache: of the layers here, and behind them of the head.
            kept: rows whose result is wanted; None is all.

        Returns:
            [rows, hidden], normed: `logits` of it are of the token after the following one.
        """
        assert self.draft_head is not None
        assert self.model.embed_tokens is not None
        own, embedded = cache[len(self.model.layers)], self.model.embed_tokens(following)
        return self.draft_head(hidden, embedded, self.rotations(batch), own, batch.tables[own.group], kept)

    def rotations(self, batch: Batch) -> list[tuple[Tensor, Tensor]]:
        """cos and sin of a step's rows, two of [rows, dim / 2] for each of the config's `ropes`."""
        return [rotation(batch.stretch or batch.positions, batch.reach) for rotation in self._tables()]

    def _tables(self) -> list[Rotation]:
        """One for each of `ropes`."""
        if not self._rotations:
            self._rotations = [Rotation(self.config, rope, self.dtype, self.device) for rope in self.config.ropes]
        return self._rotations

    def look_at(self, span: MediaSpan, pixels: Tensor) -> Tensor:
        """What stands in place of a span's tokens, [length, hidden], at the first stage of a model that sees.

        Args:
            pixels: [frames, height, width, 3] bytes.
        """
        raise NotImplementedError

    def rotation_tables(self) -> list[tuple[Tensor, Tensor]]:
        """What `rotations` have been looked up in."""
        return [rotation.tables for rotation in self._rotations]

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] -> [rows, vocab] float32."""
        head = self.head
        own = head.method.apply(hidden, head.weight, head.bias, torch.float32)
        if (ranks := self.shard.ranks) is None:
            return own
        vocab = self.config.vocab_size
        padded = functional.pad(own, (0, self.shard.part_of(vocab) - own.shape[1]))
        return ranks.gather(padded).transpose(0, 1).flatten(1)[:, :vocab]

    def choose(
        self, hidden: Tensor, draws: Sequence[ops.Draw], masked: tuple[Tensor, Tensor] | None = None
    ) -> Tensor | None:
        """[rows, hidden] -> [rows] tokens, without computing all logits; None where these are needed.

        Args:
            masked: rows and masks, as `ops.mask_logits` has them.
        """
        bounded = self.bounded_logits
        if bounded is not None and not ops.choose_pays(draws):
            bounded = None
        if (ranks := self.shard.ranks) is not None:
            tokens = self._choose_together(hidden, draws, bounded, ranks) if masked is None else None
        else:
            tokens = None if bounded is None else ops.choose(hidden, bounded.weight, bounded, draws, masked)
        if tokens is None:
            return None
        return None if -1 in tokens.tolist() else tokens

    def _choose_together(
        self, hidden: Tensor, draws: Sequence[ops.Draw], bounded: BoundedLogits | None, ranks: Ranks
    ) -> Tensor | None:
        """The same where each rank has some of the vocabulary: few numbers are exchanged instead of all logits."""
        if bounded is not None:
            logits, ids = ops.choose_candidates(hidden, bounded.weight, bounded, draws)
        elif all(draw.temperature == 0 for draw in draws):
            head = self.head
            own = head.method.apply(hidden, head.weight, head.bias, torch.float32)
            best, finite = ops.argmax(own)
            logits, ids = own.gather(1, best[:, None]), torch.where(finite, best, -2)[:, None]
        else:
            return None
        return ops.choose_among(logits, ids, self.head.own_outs[0].start, draws, ranks)


class Rotation:
    """cos and sin of a step's positions, out of tables, which are replaced by longer ones as far as positions reach."""

    def __init__(self, config: DecoderConfig, rope: RopeConfig, dtype: torch.dtype, device: torch.device) -> None:
        base, self._factor = frequencies(rope, config.max_positions)
        self._longest = longest(config)
        self._base = base.to(device)
        self._dtype = dtype
        nothing = torch.empty(0, len(base), dtype=dtype, device=device)
        self.tables = nothing, nothing  # replaced together

    def __call__(self, positions: Tensor | range, reach: int) -> tuple[Tensor, Tensor]:
        """[rows], all below `reach` -> two of [rows, dim / 2]; the angle is float32 whatever the model's dtype."""
        cos, sin = self.tables
        if reach > len(cos):
            size = max(reach, min(1 << max(10, (reach - 1).bit_length()), self._longest))
            angle = torch.arange(size, device=self._base.device)[:, None].float() * self._base
            cos, sin = ((x * self._factor).to(self._dtype) for x in (angle.cos(), angle.sin()))
            self.tables = cos, sin
        if isinstance(positions, range):
            return cos[positions.start : positions.stop], sin[positions.start : positions.stop]
        return cos.index_select(0, positions), sin.index_select(0, positions)
