"""Steps of single rows as CUDA graphs: one for each of a few numbers of rows, to which steps are padded.

A graph reads all that differs from step to step from a tensor of its own (`Packed`), which is filled before. Rows that
pad a step belong to no block, and nothing attends for them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from penstock.core.plan import BLOCK_TOKENS
from penstock.nn import ops, triton
from penstock.nn.batch import MOST_PADDED, Batch, Packed, padded_rows
from penstock.nn.experts import MixtureOfExperts
from penstock.nn.kv import KVLayers
from penstock.nn.methods.plain import Plain
from penstock.nn.models.decoder import Decoder

# which read what a graph's tensor says
KERNELS = ("rms_norm", "add_rms_norm", "qkv_to_cache", "gate_mul", "attention", "store_kv", "expert_rows")


def obstacle(model: Decoder) -> str | None:
    """Why steps of a model cannot be captured, or None."""
    if model.device.type != "cuda":
        return f"there are no such graphs on {model.device.type}"
    if (reason := triton.missing()) is not None:
        return reason
    experts = [part.experts for part in model.modules() if isinstance(part, MixtureOfExperts)]
    if not all(isinstance(part.gate_up_proj.method, Plain) for part in experts):
        return "rows are given to quantised experts by the host"
    if model.shard.ranks is not None or model.shard.experts is not None or model.shard.stages > 1:
        return "ranks are not captured yet"
    if other := [name for name in KERNELS if ops.OPS[name].backend_on("cuda").name != "triton"]:
        return f"{', '.join(other)} computed by other backends"
    return None


@dataclass(frozen=True, slots=True)
class Captured:
    """
    Attributes:
        inputs: what it reads.
        hidden: [padded rows, hidden]: what it leaves.
        reach: positions that it computes are before that.
        kept: tensors that it reads too, and that might be replaced elsewhere.
    """

    graph: torch.cuda.CUDAGraph
    inputs: Packed
    hidden: Tensor
    reach: int
    kept: object


class CudaGraphs:
    """A model's captured steps over one cache; with another one they are captured again. Its weights must not move."""

    def __init__(self, model: Decoder) -> None:
        self.model = model
        self._captured: dict[tuple[int, bool], Captured] = {}
        self._cache: ref[KVLayers] | None = None
        self._serves = False
        self._pool: Any = None  # of memory that all graphs share
        self._stream: torch.cuda.Stream | None = None
        self._reach = 0  # the longest that was asked for

    def serves(self, batch: Batch, cache: KVLayers) -> bool:
        """Whether a step can be one of them."""
        if batch.packed is None or batch.kept is not None or batch.branches or batch.media:
            return False
        self._hold(cache)
        return self._serves

    def __call__(self, batch: Batch, cache: KVLayers) -> Tensor:
        """Of what `serves`: [rows, hidden], until the next call."""
        packed = batch.packed
        assert packed is not None
        self._hold(cache)
        captured = self._for(packed, batch.reach, cache)
        inputs = captured.inputs
        inputs.values[: len(packed.values)].copy_(packed.values, non_blocking=True)
        if batch.tokens.data_ptr() != packed.tokens.data_ptr():  # placeholders were filled
            inputs.tokens[: packed.rows].copy_(batch.tokens, non_blocking=True)
        captured.graph.replay()
        return captured.hidden[: packed.rows]

    def capture(self, cache: KVLayers, rows: int, reach: int) -> None:
        """All that steps of up to so many rows, at positions before `reach`, may need."""
        self._hold(cache)
        self._reach = max(self._reach, reach)
        size = padded_rows(min(rows, MOST_PADDED))
        while size and self._serves:
            for long in (True, False):
                if (size, long) not in self._captured:
                    self._captured[size, long] = self._capture(size, long, cache)
            size //= 2

    def _hold(self, cache: KVLayers) -> None:
        if self._cache is not None and self._cache() is cache:
            return
        from penstock.nn.triton import attention

        self._captured.clear()
        self._cache = ref(cache)
        heads = self.model.config.num_heads
        query = torch.empty(1, heads, cache[0].dim, dtype=self.model.dtype, device=self.model.device)
        self._serves = all(attention.serves(query, layer) for layer in cache)

    def _for(self, packed: Packed, reach: int, cache: KVLayers) -> Captured:
        from penstock.nn.triton.attention import splits_of

        key = len(packed.tokens), splits_of(packed.longest - 1) > 1
        captured = self._captured.get(key)
        if captured is None or reach > captured.reach or len(packed.values) > len(captured.inputs.values):
            self._reach = max(self._reach, 1 << (reach - 1).bit_length())
            captured = self._captured[key] = self._capture(*key, cache)
        return captured

    def _capture(self, rows: int, long: bool, cache: KVLayers) -> Captured:
        device, groups = self.model.device, cache.groups
        ids = rows * groups * (-(-self._reach // BLOCK_TOKENS) + 1)
        values = torch.zeros(rows * (2 + 5 * groups) + ids, dtype=torch.int64, device=device)
        inputs = Packed.over(values, rows, groups, rows, self._reach if long else 1)
        for blocks in inputs.slot_blocks:
            blocks.fill_(-1)
        current = torch.cuda.current_stream(device)
        stream = self._stream = self._stream or torch.cuda.Stream(device)
        stream.wait_stream(current)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            self.model(Batch.over(inputs, self._reach), cache)  # compiles and measures what is not to be captured
            stream.synchronize()
            # other threads go on, with copies of their own
            graph.capture_begin(self._pool, capture_error_mode="thread_local")
            try:
                hidden = self.model(Batch.over(inputs, self._reach), cache)
            finally:
                graph.capture_end()
        current.wait_stream(stream)
        self._pool = self._pool or graph.pool()
        return Captured(graph, inputs, hidden, self._reach, self.model.rotation_tables())
