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
from typing import Any, Literal, get_args
from weakref import ref

import torch
from torch import Tensor

from penstock.core.stop import Interrupted, Stop
from penstock.nn import cuda_graph, native
from penstock.nn.batch import Batch
from penstock.nn.chain import Chain, unchained
from penstock.nn.kv import KVLayers
from penstock.nn.layers import Rotations
from penstock.nn.models.decoder import Decoder
from penstock.nn.native import Cache, of_layer
from penstock.nn.ops import OPS
from penstock.nn.ranks import SharedMemoryRanks

Mode = Literal["eager", "partial", "full"]
MODES = ("auto", *get_args(Mode))
SIMPLE = (
    *("packed_linear", "packed_rows", "packed_quantised_linear", "packed_quantised_rows", "head_linear"),
    *("rms_norm", "add_rms_norm", "rotary", "store_kv", "qkv_to_cache", "gate_mul"),
    *("route", "group_experts", "expert_rows", "combine_experts", "add_shared"),
)
CHAINED = {
    mode: [(OPS[name], OPS[name].backend("native").function) for name in names]
    for mode, names in {"partial": SIMPLE, "full": (*SIMPLE, "attention")}.items()
}

INTERRUPTED = -3  # see layer.h
TOGETHER = 4  # layers that are launched at once on a device that computes beside this process

_POINTER, _NUMBER = ctypes.c_void_p, ctypes.c_int64


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


def _others(mode: Mode) -> list[str]:
    """Ops that something else than their kernel computes."""
    return [op.name for op, kernel in CHAINED[mode] if op["cpu"] is not kernel]


class Graph:
    """Steps of a model as calls. Its weights must not move afterwards."""

    def __init__(self, model: Decoder) -> None:
        ranks = model.shard.ranks
        assert ranks is None or isinstance(ranks, SharedMemoryRanks)
        self._ranks = ranks
        self._chain = chain = Chain(model)
        self._decoder, self._heads = chain.decoder, chain.heads
        self._is_last = model.shard.is_last
        self._dtype = model.dtype
        self._cache: tuple[ref[KVLayers], ctypes.Array[Cache]] | None = None  # the last one, and where it is
        self._hidden = model.config.hidden_size
        self._width = native.value("penstock_scratch_width", "p")(addressof(self._decoder))
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
        count, kept = batch.tokens.shape[0], batch.kept
        assert all(x.dtype == self._dtype and x.is_contiguous() for rotation in rotations for x in rotation)
        if self._cache is None or self._cache[0]() is not cache:
            self._cache = ref(cache), (Cache * len(cache))(*(of_layer(layer, self._dtype) for layer in cache))
        tables = (_Table * len(batch.tables))(*(_table(table, mode) for table in batch.tables))
        rows = _Rows(
            count,
            batch.tokens.data_ptr(),
            tables,
            (_Rotation * 2)(*(_Rotation(cos.data_ptr(), sin.data_ptr(), 2 * cos.shape[1]) for cos, sin in rotations)),
            0 if kept is None else kept.shape[0],
            None if kept is None else kept.data_ptr(),
            None if stop is None else stop.address,
        )
        scratch = batch.scratch.take("step", (count * self._width,), self._dtype, batch.tokens.device)
        shape = (count, self._hidden) if self._is_last else (2, count, self._hidden)
        left = torch.empty(shape, dtype=self._dtype)
        out = left if self._is_last else left[0]
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
        return out if kept is None else out[: kept.shape[0]]

    def _by_layers(
        self, step: tuple[Any, ...], places: tuple[int, int], batch: Batch, cache: KVLayers, wide: Tensor
    ) -> None:
        count = len(batch.tokens)
        for i, (layer, attend) in enumerate(zip(self._chain.layers, self._chain.attend, strict=True)):
            self._expect(self._until(*step, self._heads, *places, i))
            width = layer.qkv.outs or self._heads * cache[i].dim
            q = wide[: count * width].view(count, -1, cache[i].dim)[:, : self._heads]
            attended = attend(q, cache[i], batch.tables[cache[i].group]).contiguous()
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
