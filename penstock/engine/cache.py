"""The KV cache as tensors for kernels, and its two address modes.

    table        a sequence's blocks lie anywhere; kernels are given their ids
    contiguous   they lie behind consecutive slots of a virtual range; kernels are given the first

Either way a layer's K and V are [slots, 2, kv_heads, BLOCK_TOKENS, dim] (nn/kv.py), latent vectors
[slots, 1, 1, BLOCK_TOKENS, dim]. The layout's order decides only
their strides: "block" keeps a head's tokens together, "token" keeps a token's layers and heads together, at a constant
stride from token to token as far as blocks are consecutive.
"""

from __future__ import annotations

import ctypes
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from penstock.core.layout import KV_DTYPES, VALUE_BYTES, KVGroup, KVLayout, bytes_per_block
from penstock.core.plan import BLOCK_TOKENS, StepPlan, TailCopy
from penstock.engine.arena import Arena, MapCounters, Mapper
from penstock.engine.memory import MAPPINGS
from penstock.kv.ranges import Change, Ranges
from penstock.nn.batch import to_device
from penstock.nn.config import DTYPES, DecoderConfig
from penstock.nn.kv import KVLayers, LayerKV
from penstock.nn.linear import WHOLE, Shard

if TYPE_CHECKING:
    from penstock.transfer.memory import PoolMemory

MOST_READY = 64  # blocks that `Prefaulter` keeps ready: prompts of 4,096 tokens together
QUIET = 0.05  # seconds without a step: a client that sends its next request at once is not delayed
PAGE = 4096  # bytes: a CPU's mapping unit
MOST_RANGES = 8192
MOST_ADDRESSES = 16 << 40  # bytes of ranges; a process has 128 TiB of addresses
# strides' order of [layer, k|v, head, token], from the outermost in memory to the innermost
ORDERS = {"block": (0, 1, 2, 3), "token": (3, 0, 1, 2)}
_WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
STORED = DTYPES | {"int8": torch.int8, "float8_e4m3fn": torch.float8_e4m3fn}


def make_layout(
    config: DecoderConfig,
    dtype: torch.dtype,
    order: str,
    model: str,
    kv_cache_dtype: str = "auto",
    *,
    ranks: int = 1,
    layers: range | None = None,
) -> KVLayout:
    """How a model's KV lies in a block.

    Args:
        dtype: that it is computed in.
        model: the checkpoint's digest.
        kv_cache_dtype: that it is stored in, a name in KV_DTYPES.
        ranks: that heads are spread over, of each of which this is the layout.
        layers: of which it is; None is all.
    """
    computed = str(dtype).removeprefix("torch.")
    stored = KV_DTYPES[kv_cache_dtype]
    groups = config.kv_groups(computed if stored == "auto" else stored, ranks)
    if layers is not None:
        groups = tuple(replace(group, layers=tuple(i for i in group.layers if i in layers)) for group in groups)
    exact = bytes_per_block(groups)
    return KVLayout(model=model, order=order, dtype=computed, groups=groups, block_bytes=-(-exact // PAGE) * PAGE)


def layers_of(layout: KVLayout, part: Shard) -> range:
    """Which of a layout's layers a shard has."""
    layers = sorted(layer for group in layout.groups for layer in group.layers)
    own = part.layers(len(layers))
    return range(layers[own.start], layers[own.stop - 1] + 1)


def heads_of(group: KVGroup, part: Shard) -> slice:
    """Which heads of a group a shard has; where there are fewer than shards, several have the same."""
    each = max(1, group.kv_heads // part.size)
    first = part.rank * group.kv_heads // part.size
    return slice(first, first + each)


def as_layers(memory: Tensor, layout: KVLayout, part: Shard = WHOLE) -> KVLayers:
    """[bytes] of whole blocks -> the K and V of each layer that a shard has, in its group's blocks, in place."""
    found: dict[int, LayerKV] = {}
    own = layers_of(layout, part)
    for number, group in enumerate(layout.groups):
        heads = heads_of(group, part)
        values = _as_heads(memory, layout, group, 0, STORED[group.dtype], group.head_dim)
        scales = None
        if group.scale_bytes:
            end = group.heads_per_token * BLOCK_TOKENS * group.head_dim * values.itemsize
            scales = _as_heads(memory, layout, group, end, torch.float32, 1)[..., 0]
        for place, layer in enumerate(group.layers):
            if layer in own:
                these = None if scales is None else scales[:, place, :, heads]
                found[layer] = LayerKV(values[:, place, :, heads], these, number, group.value_dim)
    return KVLayers(found[i] for i in sorted(found))


def as_places(slots: Tensor, layout: KVLayout, part: Shard = WHOLE) -> Iterator[Tensor]:
    """[slots, bytes] -> all that a shard keeps of each token, in place: for every group of layers its values, and its
    scales, as whole numbers of their size, [slots, layers, kinds, kv_heads, BLOCK_TOKENS,
    width]."""
    memory = slots.view(-1)
    own = layers_of(layout, part)
    for group in layout.groups:
        size, heads = VALUE_BYTES[group.dtype], heads_of(group, part)
        places = [place for place, layer in enumerate(group.layers) if layer in own]
        if not places:
            continue
        layers = slice(places[0], places[-1] + 1)  # which follow one another, as a stage's do
        yield _as_heads(memory, layout, group, 0, _WHOLE[size], group.head_dim)[:, layers, :, heads]
        if group.scale_bytes:
            end = group.heads_per_token * BLOCK_TOKENS * group.head_dim * size
            yield _as_heads(memory, layout, group, end, _WHOLE[group.scale_bytes], 1)[:, layers, :, heads]


def _as_heads(memory: Tensor, layout: KVLayout, group: KVGroup, start: int, dtype: torch.dtype, width: int) -> Tensor:
    """Of a group, [blocks, layers, kinds, kv_heads, BLOCK_TOKENS, width], from the byte `start` of every block on."""
    elements = memory.view(dtype)
    per_block = layout.block_bytes // dtype.itemsize
    sizes = (len(group.layers), group.kinds, group.kv_heads, layout.block_tokens)
    strides, step = [0, 0, 0, 0], width
    for dimension in reversed(ORDERS[layout.order]):
        strides[dimension] = step
        step *= sizes[dimension]
    blocks = elements.numel() // per_block
    return elements.as_strided((blocks, *sizes, width), (per_block, *strides, 1), start // dtype.itemsize)


class KVCache:
    """Blocks addressed by table.

    Attributes:
        layout: of a block.
        layers: what kernels see, of each layer all slots.
        slots: the same as bytes, [slots, bytes].
        blocks: the physical blocks, its first part or all of it.
        direct: kernels find blocks where the plan says they are: a step without fresh blocks and copies needs no
            `prepare`, and one without `computed` no `settle`.
        prefaulter: has the memory of coming blocks found; None where all of it is there.
        part: which layers and heads of a block are this one's; other ranks have the others in the same memory.
        meets: whether ranks have some of them in common, so that none may begin to write before all have cleared.
        computed: marks on a CUDA device that the last step which `settle` has seen is computed; None without listeners.
    """

    address_mode = "table"
    direct = True

    def __init__(
        self,
        memory: Tensor,
        layout: KVLayout,
        num_blocks: int,
        prefaulter: Prefaulter | None = None,
        part: Shard = WHOLE,
    ) -> None:
        """`memory` is [bytes]."""
        self.prefaulter = prefaulter
        self.part = part
        self.meets = any(group.kv_heads < part.size for group in layout.groups)
        self.computed: torch.cuda.Event | None = None
        self.layout = layout
        self._num_blocks = num_blocks
        self._hold(memory)

    def _hold(self, memory: Tensor) -> None:
        self.layers = as_layers(memory, self.layout, self.part)
        self.slots = memory.view(-1, self.layout.block_bytes)
        self.blocks = self.slots[: self._num_blocks]
        self._places = list(as_places(self.slots, self.layout, self.part))

    @classmethod
    def on_device(cls, layout: KVLayout, num_blocks: int, device: torch.device) -> KVCache:
        """Memory of its own, which is not cleared: a plan names the blocks that must be before they are used."""
        memory = torch.empty(num_blocks * layout.block_bytes, dtype=torch.uint8, device=device)
        return cls(memory, layout, num_blocks)

    @classmethod
    def over_pool(cls, layout: KVLayout, memory: PoolMemory, part: Shard = WHOLE) -> KVCache:
        arena = Arena(memory, 0)
        return cls(_tensor(arena), layout, memory.num_blocks, Prefaulter(arena), part)

    def block(self, block: int) -> Tensor:
        """All of one block, [bytes], in place."""
        return self.slots[block]

    def prepare(self, plan: StepPlan) -> list[Sequence[int]]:
        """Clear and copy what the plan says. Returns each sequence's slots, as a `range` where they are consecutive."""
        self._clear(plan.fresh_blocks)
        self._copy(plan.copies)
        return [s.blocks for s in plan.sequences]

    def settle(self) -> None:
        """Wait for everything that `prepare` began.

        Call it before the step's outcome is used: its blocks may then get other owners, whose contents a late clearing
        would erase.
        """
        if self.computed is not None:
            self.computed.record(torch.cuda.current_stream(self.slots.device))

    def forget(self) -> None:
        """Nobody needs what is in the blocks any more: give back memory of its own. That of a pool is the caller's to
        give back, after this. Until `remember` no block is used."""
        if self.prefaulter is not None:
            self.prefaulter.forget()
        else:
            self._hold(torch.empty(0, dtype=torch.uint8, device=self.slots.device))

    def remember(self) -> None:
        """Undo `forget`, but for the contents of blocks."""
        if self.prefaulter is None:
            size = self._num_blocks * self.layout.block_bytes
            self._hold(torch.empty(size, dtype=torch.uint8, device=self.slots.device))

    def close(self) -> None:
        """Release the memory; the cache cannot be used afterwards."""
        if self.prefaulter is not None:
            self.prefaulter.close()
        del self.layers, self.slots, self.blocks, self._places

    def counts(self) -> dict[str, int]:
        """Ranges by state and mapped slots (see `Ranges.counts`); empty when blocks are addressed by table."""
        return {}

    def check(self) -> None:
        """Raise AssertionError unless everything is accounted for."""

    def _clear(self, slots: Sequence[int]) -> None:
        if slots and self.part != WHOLE:
            for tensor in self._places:
                places = tensor.numpy()
                for slot in slots:
                    places[slot] = 0
        elif self.slots.is_cpu:
            for slot in slots:  # not by torch, whose threads would still spin when the step's kernels begin
                row = self.slots[slot]
                ctypes.memset(row.data_ptr(), 0, row.nbytes)
        elif slots:
            self.slots.index_fill_(0, to_device(slots, self.slots.device), 0)

    def _copy(self, copies: Sequence[TailCopy]) -> None:
        for source, target, tokens in copies:
            for tensor in self._places:
                places: Any = tensor.numpy() if tensor.is_cpu else tensor  # not by torch, as when clearing
                places[target][..., tokens:, :] = 0
                if source != target:
                    places[target][..., :tokens, :] = places[source][..., :tokens, :]


class ContiguousCache(KVCache):
    """A pool's blocks, and virtual ranges in which they are consecutive for the sequence that owns the range.

    A sequence that gets no range (see kv/ranges.py) is addressed by table, beside others that have one.
    """

    address_mode = "contiguous"
    direct = False

    def __init__(
        self, layout: KVLayout, memory: PoolMemory, *, max_sequences: int, range_blocks: int, budget: int = MAPPINGS
    ) -> None:
        num_ranges = max(1, min(max_sequences, MOST_RANGES, MOST_ADDRESSES // (range_blocks * layout.block_bytes)))
        self.ranges = Ranges(num_ranges, range_blocks, budget, base=memory.num_blocks)
        arena = Arena(memory, num_ranges * range_blocks)
        self._mapper = Mapper(arena)
        super().__init__(_tensor(arena), layout, memory.num_blocks, Prefaulter(arena))

    @property
    def counters(self) -> MapCounters:
        return self._mapper.counters

    def prepare(self, plan: StepPlan) -> list[Sequence[int]]:
        for owner in plan.released:
            self.ranges.release(owner)
        changes: list[Change] = []
        placed: list[Sequence[int]] = []
        for s in plan.sequences:
            first, more = self.ranges.place(s.request_id, s.blocks)
            changes += more
            placed.append(s.blocks if first is None else range(first, first + len(s.blocks)))
        self._mapper.now(changes)
        self._clear(self._look_ahead(plan, placed))
        self._copy(plan.copies)
        return placed

    def _look_ahead(self, plan: StepPlan, placed: Sequence[Sequence[int]]) -> list[int]:
        """Have the thread map the blocks that the next step will probably need, and clear the fresh ones.

        Returns the slots that must be cleared for this step: where a block is mapped already it costs no page faults.
        """
        fresh = set(plan.fresh_blocks)
        changes: list[Change] = []
        now: list[int] = []
        later: list[int] = []
        for s, slots in zip(plan.sequences, placed, strict=True):
            if fresh:
                now += _take(fresh, s.blocks, slots, s.start // BLOCK_TOKENS)
            if s.ahead and isinstance(slots, range):
                changes += self.ranges.extend(s.request_id, s.ahead)
                mapped = len(self.ranges.blocks(s.request_id)) - len(s.blocks)
                later += _take(fresh, s.ahead, range(slots.stop, slots.stop + mapped), 0)
        self._mapper.ahead(changes, later)
        return now + list(fresh)

    def settle(self) -> None:
        self._mapper.settle()

    def close(self) -> None:
        self._mapper.close()
        del self._mapper
        super().close()

    def counts(self) -> dict[str, int]:
        return self.ranges.counts()

    def check(self) -> None:
        self.ranges.check()


def _tensor(arena: Arena) -> Tensor:
    """[bytes] over all of an arena, which is kept alive by the tensor."""
    return torch.frombuffer(arena.buffer(), dtype=torch.uint8)


def _take(fresh: set[int], blocks: Sequence[int], slots: Sequence[int], start: int) -> list[int]:
    """Slots of the fresh ones among blocks[start:], which are fresh no more; there may be fewer slots than blocks."""
    taken = [(block, slot) for block, slot in zip(blocks[start:], slots[start:], strict=False) if block in fresh]
    fresh.difference_update(block for block, _ in taken)
    return [slot for _, slot in taken]


Wanted = SimpleQueue[int | threading.Event | None]


class _Pause:
    """Says when blocks may be touched."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._hurry = False
        self._from: float | None = 0.0  # when it is quiet; None while something runs

    def begin(self) -> None:
        """Until `end`, unless there is hurry."""
        self._from = None

    def end(self) -> None:
        with self._changed:
            self._from = time.monotonic() + QUIET
            self._changed.notify()

    def hurry(self) -> None:
        """Until `relax`, whatever runs."""
        with self._changed:
            self._hurry = True
            self._changed.notify()

    def relax(self) -> None:
        self._hurry = False

    def wait(self) -> None:
        with self._changed:
            while not self._hurry:
                start = self._from
                left = None if start is None else start - time.monotonic()
                if left is not None and left <= 0:
                    return
                self._changed.wait(left)


class Prefaulter:
    """Has the memory of blocks found before they are used.

    A pool's memory is sparse: the system finds and clears a page when it is first touched, which takes 0.3 to 0.6 ms a
    MiB, and several times that in a virtual machine. A thread touches the next blocks, a limited number ahead, so that
    prompts do not wait: when nothing has run for a while, as it uses a core, or at once when few are left. One thread
    calls it.

    Attributes:
        size: blocks that are kept ready.
    """

    def __init__(self, arena: Arena) -> None:
        self.size = min(MOST_READY, arena.num_blocks)
        self._there: set[int] = set()  # blocks that have their memory, or will without anybody's doing
        self._left = 0  # of those that were expected
        self._wanted: Wanted = SimpleQueue()
        stopped = threading.Event()
        self._pause = _Pause()
        # a daemon: the process need not wait for it at its end
        self._thread = threading.Thread(
            target=_touch_wanted,
            args=(arena, self._wanted, stopped, self._pause),
            name="penstock-prefault",
            daemon=True,
        )
        self._stop = weakref.finalize(self, _stop, self._wanted, stopped, self._pause)
        self._thread.start()

    def use(self, blocks: Sequence[int]) -> bool:
        """These are being written, in a step that begins. Returns whether few are ready: then there is hurry."""
        self._pause.begin()
        self._there.update(blocks)
        self._left -= len(blocks)
        return self._left < self.size // 4

    def expect(self, coming: Iterable[int], *, hurry: bool = False) -> None:
        """These are next, in this order; as many as `size`, if there are. Without hurry, nothing runs any more."""
        self._left = self.size
        for block in coming:
            if block not in self._there:
                self._there.add(block)
                self._wanted.put(block)
        if hurry:
            self._pause.hurry()
        else:
            self._pause.end()

    def settle(self) -> None:
        """Return when everything that was expected has its memory, or was refused it; its use will then fail."""
        reached = threading.Event()
        self._wanted.put(reached)
        self._pause.hurry()
        reached.wait()

    def forget(self) -> None:
        """Nothing that was expected is, and no block has its memory."""
        with suppress(Empty):
            while True:
                self._wanted.get_nowait()
        self.settle()  # for the one that is being touched
        self._there.clear()
        self._left = 0

    def close(self) -> None:
        """Nothing is touched any more, and nothing of this keeps the memory."""
        self._stop()
        self._thread.join()


def _touch_wanted(arena: Arena, wanted: Wanted, stopped: threading.Event, pause: _Pause) -> None:
    while (next_one := wanted.get()) is not None and not stopped.is_set():
        if isinstance(next_one, threading.Event):
            next_one.set()
        else:
            pause.wait()
            if stopped.is_set():
                return
            with suppress(OSError):
                arena.touch(next_one)
        if wanted.empty():
            pause.relax()


def _stop(wanted: Wanted, stopped: threading.Event, pause: _Pause) -> None:
    stopped.set()
    wanted.put(None)
    pause.hurry()
