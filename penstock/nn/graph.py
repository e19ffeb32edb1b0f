"""How a model's steps are computed: op by op, or as one call, or as two for each layer.

On a CPU the calls are ops chained in C++ (native/layer.h), bit for bit what they compute one by one. That is what a
graph is for there, where a step costs little besides its kernels but dispatching them. It is captured once for every
shape: nothing in it depends on how many rows there are. On a CUDA device steps of single rows are graphs
(cuda_graph.py), and others are computed op by op.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable
from ctypes import addressof
from typing import Any, Literal, cast, get_args
from weakref import ref

import torch
from torch import Tensor, nn

from penstock.core.stop import Interrupted, Stop
from penstock.nn import cuda_graph, native
from penstock.nn.batch import Batch
from penstock.nn.kv import KVLayers
from penstock.nn.layers import Attention, Block, GatedMLP, RMSNorm, Rotations
from penstock.nn.linear import Linear
from penstock.nn.methods import PACKED, PLAIN
from penstock.nn.methods.base import Weight
from penstock.nn.methods.packed_quantised import PackedQuantised
from penstock.nn.models.decoder import Decoder
from penstock.nn.native import Cache, of_layer
from penstock.nn.ops import ACTIVATIONS, OPS
from penstock.nn.packed_quantised import PackedQuantisedWeight
from penstock.nn.ranks import SharedMemoryRanks

Mode = Literal["eager", "partial", "full"]
MODES = ("auto", *get_args(Mode))
SIMPLE = (
    *("packed_linear", "packed_rows", "packed_quantised_linear", "packed_quantised_rows"),
    *("rms_norm", "add_rms_norm", "qkv_to_cache", "gate_mul"),
)
CHAINED = {
    mode: [(OPS[name], OPS[name].backend("native").function) for name in names]
    for mode, names in {"partial": SIMPLE, "full": (*SIMPLE, "attention")}.items()
}

INTERRUPTED = -3  # see layer.h
TOGETHER = 4  # layers that are launched at once on a device that computes beside this process

_POINTER, _NUMBER, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class _Projection(ctypes.Structure):
    _fields_ = (("lines", _POINTER), ("outs", _NUMBER), ("ins", _NUMBER), ("bias", _POINTER), ("quantised", _POINTER))


class _Layer(ctypes.Structure):
    _fields_ = (
        ("mixer_norm", _POINTER),
        ("qkv", _Projection),
        ("q_norm", _POINTER),
        ("k_norm", _POINTER),
        ("o", _Projection),
        ("mixer_post_norm", _POINTER),
        ("feed_forward_norm", _POINTER),
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


class _Table(ctypes.Structure):
    _fields_ = (("blocks", _POINTER), ("offsets", _POINTER), ("spans", _POINTER), ("count", _NUMBER), ("ids", _POINTER))


class _Rotation(ctypes.Structure):
    _fields_ = (("cos", _POINTER), ("sin", _POINTER), ("turned", _NUMBER))


class _Rows(ctypes.Structure):
    _fields_ = (
        ("rows", _NUMBER),
        ("tokens", _POINTER),
        ("tables", ctypes.POINTER(_Table)),
        ("rotations", _Rotation * 2),
        ("kept_count", _NUMBER),
        ("kept", _POINTER),
        ("stop", _POINTER),
    )


class Forward:
    """A model's forward pass, as a runner calls it. The model's weights must not move while this is used.

    Args:
        mode: how it is to be computed, one of `MODES`: "eager" computes op by op, "full" a step as one call, "partial"
            in two calls a layer all of it but attention, "auto" as one call where it can be. The result is the same, to
            the bit. A step that cannot be computed as asked for is computed by the next that can.
    """

    def __init__(self, model: Decoder, mode: str = "auto") -> None:
        assert mode in MODES
        self.model, self.mode = model, mode
        self._unchained = unchained(model)
        self._graph: Graph | None = None
        captures = mode != "eager" and cuda_graph.obstacle(model) is None
        self._graphs = cuda_graph.CudaGraphs(model) if captures else None

    def capture(self, cache: KVLayers, rows: int, reach: int) -> None:
        """Do now what the first steps over a cache would do: of up to so many rows, at positions before `reach`."""
        if self._graphs is not None:
            self._graphs.capture(cache, rows, reach)

    def __call__(self, batch: Batch, cache: KVLayers, stop: Stop | None = None, came: Tensor | None = None) -> Tensor:
        """As `Decoder.forward` of nn/models/decoder.py.

        Args:
            stop: ends it. Then what it has stored of these rows is of no use, but never no number where the rest is
                none. Not for ranks.

        Raises:
            Interrupted: `stop` was set before the end.
        """
        if self._graphs is not None and self._graphs.serves(batch, cache):
            if stop is not None:
                stop.look()
            return self._graphs(batch, cache)
        mode = self.mode_of(batch)
        if mode == "eager":
            return self.model(batch, cache, _looks(stop, self.model.device), came)
        self._graph = self._graph or Graph(self.model)
        return self._graph(mode, batch, self.model.rotations(batch), cache, stop, came)

    def mode_of(self, batch: Batch) -> Mode:
        """How a step is computed on a CPU."""
        if self.mode == "eager" or self._unchained is not None or batch.seen is not None:
            return "eager"
        if self.mode != "partial" and not batch.branches and not _others("full"):
            return "full"
        return "eager" if _others("partial") else "partial"


def _looks(stop: Stop | None, device: torch.device) -> Callable[[], None]:
    """What looks at it before every layer."""
    if stop is None:
        return lambda: None
    return stop.look if device.type == "cpu" else _Launches(stop)


class _Launches:
    """A device computes layers long after they are launched. So that some are left to be left out, a few are launched
    when those before the last few are computed."""

    def __init__(self, stop: Stop) -> None:
        self._stop, self._layers = stop, 0
        self._begun: deque[torch.cuda.Event] = deque()

    def __call__(self) -> None:
        if self._layers % TOGETHER == 0:
            if len(self._begun) == 2:
                self._begun.popleft()
                self._begun[0].synchronize()
            event = torch.cuda.Event()
            event.record()
            self._begun.append(event)
        self._layers += 1
        self._stop.look()


def obstacle(model: Decoder, mode: Mode) -> str | None:
    """Why a model's steps cannot be computed so, or None."""
    if mode == "eager":
        return None
    if model.device.type == "cuda":
        return cuda_graph.obstacle(model) if mode == "full" else "there are no such graphs on cuda"
    other = _others(mode)
    return unchained(model) or (f"{', '.join(other)} computed by other backends" if other else None)


def unchained(model: Decoder) -> str | None:
    """Why a model is not one of those that are chained, or None."""
    if (reason := PACKED.missing(model.device, model.dtype)) is not None:
        return reason
    blocks = _blocks(model)
    kinds = {type(part) for block in blocks for part in (block, block.mixer, block.feed_forward)}
    if other := sorted(kind.__name__ for kind in kinds - {Block, Attention, GatedMLP}):
        return f"{', '.join(other)} computed op by op"
    linears = [part for block in blocks for part in block.modules() if isinstance(part, Linear)]
    held = {linear.method.name for linear in linears}
    if (embedding := model.model.embed_tokens) is not None:
        held |= {embedding.method.name} - {PLAIN.name}
    if other := sorted(held - {PACKED.name, PackedQuantised.name}):
        return f"there are no kernels for {', '.join(other)} weights"
    norms = {part.weight.dtype for part in model.modules() if isinstance(part, RMSNorm)}
    parts = {(_mixer(block).scale, _mixer(block).heads, _feed_forward(block).activation) for block in blocks}
    return "layers differ in more than windows and rotations" if len(norms) > 1 or len(parts) > 1 else None


def _others(mode: Mode) -> list[str]:
    """Ops that something else than their kernel computes."""
    return [op.name for op, kernel in CHAINED[mode] if op["cpu"] is not kernel]


class Graph:
    """Where a model's weights are, in the order in which a step reads them. They must not move afterwards."""

    def __init__(self, model: Decoder) -> None:
        config, stack, blocks = model.config, model.model, _blocks(model)
        mixers = [_mixer(block) for block in blocks]
        ranks = model.shard.ranks
        assert ranks is None or isinstance(ranks, SharedMemoryRanks)
        self._ranks = ranks
        self._heads = mixers[0].heads
        self._layers = (_Layer * len(blocks))(*map(_layer, blocks))
        embedding = stack.embed_tokens if model.shard.is_first else None
        self._decoder = _Decoder(
            self._layers,
            len(blocks),
            None if embedding is None else _address(embedding.weight),
            0 if embedding is None else embedding.weight.shape[0],
            config.hidden_size,
            embedding is not None and embedding.method.name == PACKED.name,
            None if embedding is None else _quantised(embedding.weight),
            _norm(stack.norm),
            blocks[0].mixer_norm.weight.dtype != model.dtype,
            ACTIVATIONS.index(_feed_forward(blocks[0]).activation),
            config.norm_eps,
            mixers[0].scale,
            1.0 if embedding is None else torch.tensor(embedding.scale, dtype=model.dtype).item(),
            None if ranks is None else ranks.handle,
            0 if embedding is None else embedding.own_outs[0].start,
        )
        self._is_last = model.shard.is_last
        self._dtype = model.dtype
        self._cache: tuple[ref[KVLayers], ctypes.Array[Cache]] | None = None  # the last one, and where it is
        self._hidden = config.hidden_size
        self._width = native.value("penstock_scratch_width", "p")(addressof(self._decoder))
        self._attend = [mixer.attend for mixer in mixers]
        self._step = native.value("penstock_step", "pppnpp")
        self._until = native.value("penstock_until_attention", "pppnppn")
        self._after = native.value("penstock_after_attention", "ppppppn")

    def __call__(
        self,
        mode: Mode,
        batch: Batch,
        rotations: Rotations,
        cache: KVLayers,
        stop: Stop | None = None,
        came: Tensor | None = None,
    ) -> Tensor:
        """As `Forward`. `mode`: "full"; or "partial", all but attention."""
        assert stop is None or self._ranks is None
        count, kept = len(batch.tokens), batch.kept
        assert all(x.dtype == self._dtype and x.is_contiguous() for rotation in rotations for x in rotation)
        if self._cache is None or self._cache[0]() is not cache:
            self._cache = ref(cache), (Cache * len(cache))(*(of_layer(layer, self._dtype) for layer in cache))
        tables = (_Table * len(batch.tables))(*(_table(table, mode) for table in batch.tables))
        rows = _Rows(
            count,
            batch.tokens.data_ptr(),
            tables,
            (_Rotation * 2)(*(_Rotation(cos.data_ptr(), sin.data_ptr(), 2 * cos.shape[1]) for cos, sin in rotations)),
            0 if kept is None else len(kept),
            None if kept is None else kept.data_ptr(),
            None if stop is None else stop.address,
        )
        scratch = batch.scratch.take("step", (count * self._width,), self._dtype, batch.tokens.device)
        left = torch.empty(1 if self._is_last else 2, count, self._hidden, dtype=self._dtype)
        out = left[0]
        if came is not None:  # not by torch, whose threads would still spin when the kernels begin
            ctypes.memmove(out.data_ptr(), came[0].data_ptr(), out.nbytes)
            ctypes.memmove(scratch.data_ptr(), came[1].data_ptr(), out.nbytes)  # the residual stream comes first
        step = (addressof(self._decoder), addressof(rows), addressof(self._cache[1]))
        places = (scratch.data_ptr(), out.data_ptr())
        if mode == "full":
            self._expect(self._step(*step, self._heads, *places))
        else:
            self._by_layers(step, places, batch, cache, scratch[count * self._hidden :])
        if not self._is_last:
            ctypes.memmove(left[1].data_ptr(), scratch.data_ptr(), out.nbytes)
            return left
        return out if kept is None else out[: len(kept)]

    def _by_layers(
        self, step: tuple[Any, ...], places: tuple[int, int], batch: Batch, cache: KVLayers, wide: Tensor
    ) -> None:
        count = len(batch.tokens)
        for i, layer in enumerate(self._layers):
            self._expect(self._until(*step, self._heads, *places, i))
            q = wide[: count * layer.qkv.outs].view(count, -1, cache[i].dim)[:, : self._heads]
            attended = self._attend[i](q, cache[i], batch.tables[cache[i].group]).contiguous()
            self._expect(self._after(*step, attended.data_ptr(), *places, i))

    def _expect(self, status: int) -> None:
        """Raises RankFailed or Interrupted."""
        if status == INTERRUPTED:
            raise Interrupted
        if self._ranks is not None:
            self._ranks.expect(status)


def _table(batch: Batch, mode: Mode) -> _Table:
    """Where the rows of one group's layers belong, and with `full` what they attend to."""
    own = batch.slot_blocks.data_ptr(), batch.slot_offsets.data_ptr()
    if mode != "full":
        return _Table(*own)
    spans, ids = batch.places
    return _Table(*own, spans.data_ptr(), len(spans), ids.data_ptr())


def _blocks(model: Decoder) -> list[Block]:
    return cast("list[Block]", list(model.model.layers))


def _mixer(block: Block) -> Attention:
    return cast(Attention, block.mixer)


def _feed_forward(block: Block) -> GatedMLP:
    return cast(GatedMLP, block.feed_forward)


def _layer(block: Block) -> _Layer:
    mixer, feed_forward = _mixer(block), _feed_forward(block)
    return _Layer(
        _norm(block.mixer_norm),
        _projection(mixer.qkv_proj),
        _norm(mixer.q_norm),
        _norm(mixer.k_norm),
        _projection(mixer.o_proj),
        _norm(block.mixer_post_norm),
        _norm(block.feed_forward_norm),
        _projection(feed_forward.gate_up_proj),
        _projection(feed_forward.down_proj),
        _norm(block.feed_forward_post_norm),
        mixer.window or 0,
        mixer.rotation,
    )


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
