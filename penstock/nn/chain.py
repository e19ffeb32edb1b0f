"""Where a model's weights are, as native/layer.h has them: what a step chains."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from penstock.nn.experts import MixtureOfExperts
from penstock.nn.latent import EPS, LatentAttention
from penstock.nn.layers import Attention, Block, GatedMLP, RMSNorm
from penstock.nn.linear import Linear
from penstock.nn.methods import PACKED, PLAIN
from penstock.nn.methods.base import Weight
from penstock.nn.methods.packed_quantised import PackedQuantised
from penstock.nn.methods.per_head import PerHead
from penstock.nn.models.decoder import Decoder
from penstock.nn.ops import ACTIVATIONS
from penstock.nn.ops.experts import Slots, native_routing
from penstock.nn.packed_quantised import PackedQuantisedWeight
from penstock.nn.ranks import SharedMemoryRanks

CHAINED = {Block, Attention, LatentAttention, GatedMLP, MixtureOfExperts}

_POINTER, _NUMBER, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class _Projection(ctypes.Structure):
    _fields_ = (("lines", _POINTER), ("outs", _NUMBER), ("ins", _NUMBER), ("bias", _POINTER), ("quantised", _POINTER))


class _Latent(ctypes.Structure):
    _fields_ = (
        ("q_a", _Projection),
        ("q_a_norm", _POINTER),
        ("q", _Projection),
        ("kv_a", _Projection),
        ("kv_a_norm", _POINTER),
        ("keys", _POINTER),
        ("values", _POINTER),
        *((name, _NUMBER) for name in ("heads", "rank", "rope", "key", "value", "interleaved")),
        ("eps", _FLOAT),
    )


class _Routing(ctypes.Structure):
    _fields_ = (
        ("correction", _POINTER),
        *((name, _NUMBER) for name in ("count", "top_k", "sigmoid", "groups", "kept", "renormalised")),
        ("scale", _FLOAT),
    )


class _Mixture(ctypes.Structure):
    _fields_ = (
        ("router", _Projection),
        ("routing", _Routing),
        ("gate_up", Slots),
        ("down", Slots),
        ("gates", _NUMBER),
        ("counts", _POINTER),
        ("shared_gate", _Projection),
    )


class _Layer(ctypes.Structure):
    _fields_ = (
        ("mixer_norm", _POINTER),
        ("latent", ctypes.POINTER(_Latent)),
        ("qkv", _Projection),
        ("q_norm", _POINTER),
        ("k_norm", _POINTER),
        ("o", _Projection),
        ("mixer_post_norm", _POINTER),
        ("feed_forward_norm", _POINTER),
        ("mixture", ctypes.POINTER(_Mixture)),
        ("gate_up", _Projection),
        ("down", _Projection),
        ("feed_forward_post_norm", _POINTER),
        ("window", _NUMBER),
        ("rotation", _NUMBER),
    )


class _Decoder(ctypes.Structure):
    _fields_ = (
        ("layers", ctypes.POINTER(_Layer)),
        ("count", _NUMBER),
        ("embedding", _POINTER),
        ("vocab", _NUMBER),
        ("hidden", _NUMBER),
        ("embedding_is_packed", _NUMBER),
        ("quantised_embedding", _POINTER),
        ("norm", _POINTER),
        ("wide_norms", _NUMBER),
        ("activation", _NUMBER),
        ("eps", _FLOAT),
        ("scale", _FLOAT),
        ("embedding_scale", _FLOAT),
        ("ranks", _POINTER),
        ("first_token", _NUMBER),
    )


def unchained(model: Decoder) -> str | None:
    """Why a model is not one of those that are chained, or None."""
    if (reason := PACKED.missing(model.device, model.dtype)) is not None:
        return reason
    blocks = _blocks(model)
    kinds = {type(part) for block in blocks for part in (block, block.mixer, block.feed_forward)}
    if other := sorted(kind.__name__ for kind in kinds - CHAINED):
        return f"{', '.join(other)} computed op by op"
    mixtures = [part for block in blocks if isinstance(part := block.feed_forward, MixtureOfExperts)]
    if any(mixture.experts.spread is not None for mixture in mixtures):
        return "experts of other ranks computed op by op"
    linears = [part for block in blocks for part in block.modules() if isinstance(part, Linear)]
    methods = [linear.method for linear in linears]
    held = {method.name for method in methods if not (isinstance(method, PerHead) and method.packed)}
    if (embedding := model.model.embed_tokens) is not None:
        held |= {embedding.method.name} - {PLAIN.name}
    if other := sorted(held - {PACKED.name, PackedQuantised.name}):
        return f"there are no kernels for {', '.join(other)} weights"
    norms = {part.weight.dtype for part in model.modules() if isinstance(part, RMSNorm)}
    parts = {(type(block.mixer), _mixer(block).scale, _mixer(block).heads, _activation(block)) for block in blocks}
    return "layers differ in more than windows and rotations" if len(norms) > 1 or len(parts) > 1 else None


class Chain:
    """
    Attributes:
        decoder: all of it. Its weights must not move.
        layers: those of it.
        heads: of queries.
        attend: as each layer does.
    """

    def __init__(self, model: Decoder) -> None:
        config, stack, blocks = model.config, model.model, _blocks(model)
        mixers = [_mixer(block) for block in blocks]
        ranks = model.shard.ranks
        assert ranks is None or isinstance(ranks, SharedMemoryRanks)
        self.heads = mixers[0].heads
        self.attend: list[Callable[..., Tensor]] = [mixer.attend for mixer in mixers]
        self._held: list[Any] = []  # what structures point to
        self.layers = (_Layer * len(blocks))(*map(self._layer, blocks))
        embedding = stack.embed_tokens if model.shard.is_first else None
        self.decoder = _Decoder(
            self.layers,
            len(blocks),
            None if embedding is None else _address(embedding.weight),
            0 if embedding is None else embedding.weight.shape[0],
            config.hidden_size,
            embedding is not None and embedding.method.name == PACKED.name,
            None if embedding is None else _quantised(embedding.weight),
            _norm(stack.norm),
            blocks[0].mixer_norm.weight.dtype != model.dtype,
            ACTIVATIONS.index(_activation(blocks[0])),
            config.norm_eps,
            mixers[0].scale,
            1.0 if embedding is None else torch.tensor(embedding.scale, dtype=model.dtype).item(),
            None if ranks is None else ranks.handle,
            0 if embedding is None else embedding.own_outs[0].start,
        )

    def _layer(self, block: Block) -> _Layer:
        mixer, feed_forward = block.mixer, block.feed_forward
        layer = _Layer(
            mixer_norm=_norm(block.mixer_norm),
            o=_projection(_mixer(block).o_proj),
            mixer_post_norm=_norm(block.mixer_post_norm),
            feed_forward_norm=_norm(block.feed_forward_norm),
            feed_forward_post_norm=_norm(block.feed_forward_post_norm),
        )
        if isinstance(mixer, Attention):
            layer.qkv = _projection(mixer.qkv_proj)
            layer.q_norm, layer.k_norm = _norm(mixer.q_norm), _norm(mixer.k_norm)
            layer.window, layer.rotation = mixer.window or 0, mixer.rotation
        else:
            layer.latent = self._pointer(_latent(cast(LatentAttention, mixer)))
        gated: GatedMLP | None = feed_forward if isinstance(feed_forward, GatedMLP) else None
        if isinstance(feed_forward, MixtureOfExperts):
            layer.mixture = self._pointer(self._mixture(feed_forward))
            gated = feed_forward.shared_experts
        if gated is not None:
            layer.gate_up, layer.down = _projection(gated.gate_up_proj), _projection(gated.down_proj)
        return layer

    def _mixture(self, mixture: MixtureOfExperts) -> _Mixture:
        router, experts, gate = mixture.router, mixture.experts, mixture.shared_expert_gate
        gate_up, down = experts.gate_up_proj.stacked, experts.down_proj.stacked
        self._held += [gate_up, down, router.correction, experts.counts]
        return _Mixture(
            router=_projection(router),
            routing=_Routing(
                None if router.correction is None else router.correction.data_ptr(), *native_routing(router.routing)
            ),
            gate_up=gate_up.slots,
            down=down.slots,
            gates=gate_up.outs // 2,
            counts=experts.counts.data_ptr(),
            shared_gate=_Projection() if gate is None else _projection(gate),
        )

    def _pointer(self, structure: Any) -> Any:
        self._held.append(structure)
        return ctypes.pointer(structure)


def _latent(mixer: LatentAttention) -> _Latent:
    latent, up = mixer.latent, mixer.kv_b_proj.parts
    found = _Latent(
        kv_a=_projection(mixer.kv_a_proj),
        kv_a_norm=_norm(mixer.kv_a_norm),
        keys=up.keys.memory.data_ptr(),
        values=up.values.memory.data_ptr(),
        heads=mixer.heads,
        rank=latent.rank,
        rope=latent.rope,
        key=latent.key,
        value=latent.value,
        interleaved=latent.interleaved,
        eps=EPS,
    )
    if latent.q_rank is None:
        found.q = _projection(mixer.q_proj)
    else:
        found.q_a, found.q = _projection(mixer.q_a_proj), _projection(mixer.q_b_proj)
        found.q_a_norm = _norm(mixer.q_a_norm)
    return found


def _blocks(model: Decoder) -> list[Block]:
    return cast("list[Block]", list(model.model.layers))


def _mixer(block: Block) -> Attention | LatentAttention:
    return cast("Attention | LatentAttention", block.mixer)


def _activation(block: Block) -> str:
    part = block.feed_forward
    return part.experts.activation if isinstance(part, MixtureOfExperts) else cast(GatedMLP, part).activation


def _address(weight: Weight) -> int | None:
    """Of a weight that is numbers."""
    if isinstance(weight, PackedQuantisedWeight):
        return None
    (parameter,) = weight.parameters() if isinstance(weight, nn.Module) else (weight,)
    return parameter.data_ptr()


def _quantised(weight: Weight) -> int | None:
    """Where the kernels find one in few bits."""
    return weight.view() if isinstance(weight, PackedQuantisedWeight) else None


def _norm(norm: RMSNorm | None) -> int | None:
    return None if norm is None else norm.weight.data_ptr()


def _projection(linear: Linear) -> _Projection:
    bias = None if linear.bias is None else linear.bias.data_ptr()
    return _Projection(_address(linear.weight), *linear.weight.shape, bias, _quantised(linear.weight))
