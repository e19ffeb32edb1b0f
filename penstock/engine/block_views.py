"""The blocks of a cache as bytes in the host's memory, each in one, for what cannot reach a device's: files, and
stores elsewhere."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from typing import Protocol

import torch

from penstock.engine.cache import KVCache
from penstock.nn import native
from penstock.transfer.memory import PoolMemory

STAGED_BYTES = 32 << 20  # of a device's blocks, that are in the host's memory at once


class BlockViews(Protocol):
    """One thread calls it.

    Attributes:
        block_bytes: of a block.
        most: blocks at once.
    """

    block_bytes: int
    most: int

    def of(self, blocks: Sequence[int]) -> list[memoryview]:
        """The bytes of each, until the next call."""
        ...

    def into(self, blocks: Sequence[int]) -> list[memoryview]:
        """What is written to these views is what `arrived` brings to the blocks."""
        ...

    def arrived(self, blocks: Sequence[int]) -> None:
        """The first of the views that `into` has given are written to: they are in their blocks when this returns."""
        ...

    def close(self) -> None:
        """Let go of the cache. Idempotent."""
        ...


class InPlace:
    """Of a cache that is in the host's memory."""

    most = 1 << 30

    def __init__(self, cache: KVCache) -> None:
        assert cache.slots.is_cpu
        self.block_bytes = cache.layout.block_bytes
        self._cache: KVCache | None = cache

    def of(self, blocks: Sequence[int]) -> list[memoryview]:
        return [self._view(block) for block in blocks]

    into = of

    def arrived(self, blocks: Sequence[int]) -> None:
        """They are."""

    def close(self) -> None:
        self._cache = None

    def _view(self, block: int) -> memoryview:
        assert self._cache is not None
        assert 0 <= block < len(self._cache.blocks), f"block {block} of {len(self._cache.blocks)}"
        address = self._cache.slots.data_ptr() + block * self.block_bytes
        return memoryview((ctypes.c_ubyte * self.block_bytes).from_address(address)).cast("B")


class Staged:
    """Of a cache on a CUDA device, by way of memory that its copy engines reach beside its steps."""

    def __init__(self, cache: KVCache) -> None:
        self.block_bytes = cache.layout.block_bytes
        self.most = max(1, STAGED_BYTES // self.block_bytes)
        self._cache: KVCache | None = cache
        self._memory = PoolMemory.anonymous(self.most, self.block_bytes)
        self._stream = torch.cuda.Stream(cache.slots.device)
        # what a step leaves is written when its kernels have run, which may be later than it is reported
        self._computed = cache.computed = cache.computed or torch.cuda.Event()
        self._stage = torch.frombuffer(self._memory.buffer, dtype=cache.slots.dtype).view(self.most, -1)
        with torch.cuda.device(cache.slots.device):
            # a copy from memory that is not pinned is only slower
            self._pinned = not int(torch.cuda.cudart().cudaHostRegister(self._memory.address, self._size, 0))

    @property
    def _size(self) -> int:
        return self.most * self.block_bytes

    def of(self, blocks: Sequence[int]) -> list[memoryview]:
        assert self._cache is not None
        assert len(blocks) <= self.most
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            self._stream.wait_event(self._computed)
            for place, block in enumerate(blocks):
                self._stage[place].copy_(self._cache.block(block), non_blocking=True)
            self._stream.synchronize()
        return self.into(blocks)

    def into(self, blocks: Sequence[int]) -> list[memoryview]:
        return [self._memory.block(place) for place in range(len(blocks))]

    def arrived(self, blocks: Sequence[int]) -> None:
        assert self._cache is not None
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            self._stream.wait_event(self._computed)  # the blocks' previous contents may still be read
            for place, block in enumerate(blocks):
                self._cache.block(block).copy_(self._stage[place], non_blocking=True)
            self._stream.synchronize()

    def close(self) -> None:
        if self._cache is None:
            return
        if self._pinned:
            with torch.cuda.device(self._cache.slots.device):
                torch.cuda.cudart().cudaHostUnregister(self._memory.address)
        self._cache = None
        del self._stage
        self._memory.close()


def views_of(cache: KVCache) -> BlockViews:
    return InPlace(cache) if cache.slots.is_cpu else Staged(cache)


def address_of(memory: mmap.mmap | memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def processor_of(device: torch.device) -> str:
    """Names all that decides the bits of what is computed there."""
    return native.made_from() if device.type == "cpu" else torch.cuda.get_device_name(device)
