"""Copies of KV blocks in the host's memory, below an engine's cache (`engine.mover`)."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Iterable, Sequence

import torch

from penstock.core.errors import ConfigError
from penstock.engine.cache import KVCache
from penstock.engine.memory import available_memory
from penstock.engine.mover import SlotMover
from penstock.kv.connector import Move
from penstock.transfer.memory import PoolMemory

log = logging.getLogger("penstock.engine")
OPTION = "host-cache-memory"


class HostSlots:
    """Slots of one block each, allocated once. Copies are the processor's.

    Args:
        cache: whose blocks are copied; in the host's memory too.
    """

    def __init__(self, cache: KVCache, num_slots: int) -> None:
        self.block_bytes = cache.layout.block_bytes
        self._cache: KVCache | None = cache
        self._memory = PoolMemory.anonymous(num_slots, self.block_bytes)

    def store(self, moves: Sequence[Move]) -> Sequence[memoryview]:
        blocks = self._blocks
        for block, slot, *_ in moves:  # not by torch, whose threads would spin on the cores that steps are computed on
            ctypes.memmove(self._place(slot), blocks + block * self.block_bytes, self.block_bytes)
        return [self.content(move.slot) for move in moves]

    def load(self, moves: Iterable[Move]) -> int:
        blocks, count = self._blocks, 0
        for block, slot, *_ in moves:
            ctypes.memmove(blocks + block * self.block_bytes, self._place(slot), self.block_bytes)
            count += 1
        return count

    def content(self, slot: int) -> memoryview:
        return self._memory.block(slot)

    def close(self) -> None:
        self._cache = None
        self._memory.close()

    @property
    def _blocks(self) -> int:
        """Address of the first."""
        assert self._cache is not None
        return self._cache.block(0).data_ptr()

    def _place(self, slot: int) -> int:
        assert 0 <= slot < self._memory.num_blocks, f"slot {slot} of {self._memory.num_blocks}"
        return self._memory.address + slot * self.block_bytes


class PinnedSlots(HostSlots):
    """The same below a cache on a CUDA device, whose copy engines carry blocks beside its steps.

    Raises ConfigError when so much memory cannot be pinned.
    """

    def __init__(self, cache: KVCache, num_slots: int) -> None:
        super().__init__(cache, num_slots)
        self._device = cache.slots.device
        self._stream = torch.cuda.Stream(self._device)
        # what a step leaves is written when its kernels have run, which may be later than it is reported
        self._computed = cache.computed = cache.computed or torch.cuda.Event()
        self._arrived = torch.cuda.Event(blocking=True)  # waiting does not use the CPU
        self._slots = torch.frombuffer(self._memory.buffer, dtype=cache.slots.dtype).view(num_slots, -1)
        size = num_slots * self.block_bytes
        # not torch's own pinned memory, which comes in powers of two
        with torch.cuda.device(self._device):
            status = int(torch.cuda.cudart().cudaHostRegister(self._memory.address, size, 0))
        if status:
            raise ConfigError(
                f"{OPTION}: {size / 2**30:.1f} GiB cannot be pinned (CUDA error {status}), allowed is what can", OPTION
            )

    def store(self, moves: Sequence[Move]) -> Sequence[memoryview]:
        assert self._cache is not None
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            self._stream.wait_event(self._computed)
            try:
                for block, slot, *_ in moves:
                    self._slots[slot].copy_(self._cache.block(block), non_blocking=True)
            finally:
                self._wait()
        return [self.content(move.slot) for move in moves]

    def load(self, moves: Iterable[Move]) -> int:
        assert self._cache is not None
        count = 0
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            self._stream.wait_event(self._computed)  # the blocks' previous contents may still be read
            try:
                for block, slot, *_ in moves:  # one is verified while the next one is copied
                    self._cache.block(block).copy_(self._slots[slot], non_blocking=True)
                    count += 1
            finally:
                self._wait()
        return count

    def close(self) -> None:
        if self._cache is not None:
            with torch.cuda.device(self._device):
                torch.cuda.cudart().cudaHostUnregister(self._memory.address)
            del self._slots
        super().close()

    def _wait(self) -> None:
        self._arrived.record(self._stream)
        self._arrived.synchronize()


def open_host_tier(cache: KVCache, num_slots: int) -> SlotMover:
    """Open the tier below a cache, with so many slots. Raises ConfigError when they cannot be allocated."""
    size = num_slots * cache.layout.block_bytes
    log.info("%d blocks (%.0f MiB) of copies in the host's memory", num_slots, size / 2**20)  # pinning takes a while
    return SlotMover(HostSlots(cache, num_slots) if cache.slots.is_cpu else PinnedSlots(cache, num_slots))


def check_host_tier(asked: int | None, device: torch.device) -> None:
    """Raise ConfigError when this machine has no such tier.

    Args:
        asked: bytes; None asks for none.
    """
    if asked is None:
        return
    size = f"{OPTION}: {asked / 2**30:.1f} GiB"
    if device.type == "cpu":
        raise ConfigError(
            f"{size} below a CPU, whose cache is the host's memory itself: give kv-cache-memory more, or a disk-cache",
            OPTION,
        )
    if asked > (free := available_memory()):
        raise ConfigError(f"{size}, {free / 2**30:.1f} GiB are free on this machine", OPTION)
