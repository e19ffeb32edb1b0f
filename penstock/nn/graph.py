"""A step as one call, or as two for each layer: ops chained in C++ (native/layer.h), bit for bit what they compute one
by one. That is what a graph is for on a CPU, where a step costs little besides its kernels but dispatching them. It is
captured once for every shape: nothing in it depends on how many rows there are.
"""

from __future__ import annotations

import ctypes
from ctypes import addressof
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor

from penstock.nn import native
from penstock.nn.batch import Batch
from penstock.nn.config import DecoderConfig
from penstock.nn.layers import Layer, Linear, RMSNorm, Stack
from penstock.nn.native import Cache
from penstock.nn.ops import OPS
from penstock.nn.packed import PackedWeight, Weight

Mode = Literal["eager", "partial", "full"]
MODES = ("auto", *get_args(Mode))
SIMPLE = ("packed_linear", "packed_rows", "add_rms_norm", "qkv_to_cache", "silu_mul")
CHAINED = {
    mode: [(OPS[name], OPS[name].backend("native").function) for name in names]
    for mode, names in {"partial": SIMPLE, "full": (*SIMPLE, "attention")}.items()
}


_POINTER, _NUMBER, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class _Projection(ctypes.Structure):
    _fields_ = (("lines", _POINTER), ("outs", _NUMBER), ("ins", _NUMBER), ("bias", _POINTER))


class _Layer(ctypes.Structure):
    _fields_ = (
        ("input_norm", _POINTER),
        ("qkv", _Projection),
        ("q_norm", _POINTER),
        ("k_norm", _POINTER),
        ("o", _Projection),
        ("post_norm", _POINTER),
        ("gate_up", _Projection),
        ("down", _Projection),
        ("window", _NUMBER),
    )


class _Decoder(ctypes.Structure):
    _fields_ = (
        ("layers", ctypes.POINTER(_Layer)),
        ("count", _NUMBER),
        ("embedding", _POINTER),
        ("vocab", _NUMBER),
        ("hidden", _NUMBER),
        ("embedding_is_packed", _NUMBER),
        ("norm", _POINTER),
        ("eps", _FLOAT),
        ("scale", _FLOAT),
    )


class _Rows(ctypes.Structure):
    _fields_ = (
        ("rows", _NUMBER),
        ("tokens", _POINTER),
        ("blocks", _POINTER),
        ("offsets", _POINTER),
        ("cos", _POINTER),
        ("sin", _POINTER),
        ("kept_count", _NUMBER),
        ("kept", _POINTER),
    )


def obstacle(stack: Stack, mode: Mode) -> str | None:
    """Why a model's steps cannot be computed so here, or None."""
    if mode == "eager":
        return None
    if not isinstance(weight := _layers(stack)[0].mlp.down_proj.weight, PackedWeight):
        dtype = str(weight.dtype).removeprefix("torch.")
        return native.missing() or f"there are no kernels for {dtype} on {weight.device.type}"
    other = [op.name for op, kernel in CHAINED[mode] if op["cpu"] is not kernel]
    return f"{', '.join(other)} computed by other backends" if other else None


def mode_of(stack: Stack, asked: str, batch: Batch) -> Mode:
    """How a step is computed: as asked for, where it can be, and else by the next that can.

    Args:
        asked: one of `MODES`.
    """
    if asked in ("auto", "full") and not batch.branches and obstacle(stack, "full") is None:
        return "full"
    return "partial" if asked != "eager" and obstacle(stack, "partial") is None else "eager"


class Graph:
    """Where a model's weights are, in the order in which a step reads them. They must not move afterwards."""

    def __init__(self, config: DecoderConfig, stack: Stack) -> None:
        layers = _layers(stack)
        self._heads = config.num_heads
        self._layers = (_Layer * config.num_layers)(
            *(
                _Layer(
                    _norm(layer.input_layernorm),
                    _projection(layer.self_attn.qkv_proj),
                    _norm(layer.self_attn.q_norm),
                    _norm(layer.self_attn.k_norm),
                    _projection(layer.self_attn.o_proj),
                    _norm(layer.post_attention_layernorm),
                    _projection(layer.mlp.gate_up_proj),
                    _projection(layer.mlp.down_proj),
                    layer.self_attn.window or 0,
                )
                for layer in layers
            )
        )
        embedding = stack.embed_tokens.weight
        self._decoder = _Decoder(
            self._layers,
            config.num_layers,
            _address(embedding),
            *embedding.shape,
            isinstance(embedding, PackedWeight),
            _norm(stack.norm),
            config.norm_eps,
            layers[0].self_attn.scale,
        )
        self._dtype = embedding.dtype
        self._hidden = config.hidden_size
        self._width = native.value("penstock_scratch_width", "p")(addressof(self._decoder))
        self._attend = [layer.self_attn.attend for layer in layers]
        self._step = native.function("penstock_step", "pppnpppnp")
        self._until = native.function("penstock_until_attention", "pppnppn")
        self._after = native.function("penstock_after_attention", "ppppppn")

    def __deepcopy__(self, memo: dict[int, object]) -> None:
        """A copy of the model has other weights, and describes them when it needs to."""

    def __call__(self, mode: Mode, batch: Batch, rotation: tuple[Tensor, Tensor], cache: Tensor) -> Tensor:
        """As `Decoder.forward` of nn/models/decoder.py. `mode`: "full"; or "partial", all but attention."""
        count, kept = len(batch.tokens), batch.kept
        cos, sin = (x.contiguous() for x in rotation)
        *strides, element = cache.stride()
        assert element == 1, cache.stride()
        assert cache.dtype == cos.dtype == self._dtype
        described = Cache(cache.data_ptr(), *strides, cache.shape[3], cache.shape[5], cache.dtype == torch.bfloat16)
        rows = _Rows(
            count,
            *(x.data_ptr() for x in (batch.tokens, batch.slot_blocks, batch.slot_offsets, cos, sin)),
            0 if kept is None else len(kept),
            None if kept is None else kept.data_ptr(),
        )
        scratch = batch.scratch.take("step", (count * self._width,), self._dtype, cache.device)
        out = torch.empty(count, self._hidden, dtype=self._dtype)
        step = (addressof(self._decoder), addressof(rows), addressof(described))
        places = (scratch.data_ptr(), out.data_ptr())
        if mode == "full":
            spans, ids = batch.places
            self._step(*step, self._heads, *places, spans.data_ptr(), len(spans), ids.data_ptr())
        else:
            self._by_layers(step, places, batch, cache, scratch[count * self._hidden :])
        return out if kept is None else out[: len(kept)]

    def _by_layers(
        self, step: tuple[Any, ...], places: tuple[int, int], batch: Batch, cache: Tensor, wide: Tensor
    ) -> None:
        count, dim = len(batch.tokens), cache.shape[5]
        for i, layer in enumerate(self._layers):
            self._until(*step, self._heads, *places, i)
            q = wide[: count * layer.qkv.outs].view(count, -1, dim)[:, : self._heads]
            attended = self._attend[i](q, cache[:, i], batch).contiguous()
            self._after(*step, attended.data_ptr(), *places, i)


def _layers(stack: Stack) -> list[Layer]:
    return cast("list[Layer]", stack.layers)


def _address(weight: Weight) -> int:
    return (weight.memory if isinstance(weight, PackedWeight) else weight).data_ptr()


def _norm(norm: RMSNorm | None) -> int | None:
    return None if norm is None else norm.weight.data_ptr()


def _projection(linear: Linear) -> _Projection:
    bias = None if linear.bias is None else linear.bias.data_ptr()
    return _Projection(_address(linear.weight), *linear.weight.shape, bias)
