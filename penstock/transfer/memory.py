"""The bytes of a pool of blocks: one memfd that every process of a host can map, or memory of one process."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os

from penstock.core.mappings import prefer_large

PAGE = 4096  # bytes
_NO_RESERVE = 0x4000  # Python has no name for it


def checksum_of(data: memoryview) -> int:
    """64 bits of XXH3 over a block's bytes. Detects corruption; not secure against an attacker."""
    from xxhash import xxh3_64_intdigest  # an engine on its own never needs it

    return xxh3_64_intdigest(data)


def copy_bytes(data: memoryview, into: memoryview) -> None:
    """As many of them as there are. Other threads run meanwhile, which they do not while a slice is assigned to."""
    import numpy as np

    assert len(data) == len(into)
    np.copyto(np.frombuffer(into, np.uint8), np.frombuffer(data, np.uint8))


class PoolMemory:
    """`num_blocks` blocks of `block_bytes` bytes each, mapped whole.

    The memory is sparse: a block costs address space until its pages are written, and only then memory.

    Attributes:
        fd: the memfd; owned, and closed by `close`. -1 where only this process has the memory.
        address: where the mapping starts.
        buffer: all of it, writable.
    """

    def __init__(self, fd: int, num_blocks: int, block_bytes: int) -> None:
        self.fd = fd
        self.num_blocks = num_blocks
        self.block_bytes = block_bytes
        size = num_blocks * block_bytes
        assert size > 0
        if fd >= 0:
            assert os.fstat(fd).st_size >= size, "the memory is smaller than the blocks it is said to hold"
            self._map = mmap.mmap(fd, size, mmap.MAP_SHARED)
        else:
            self._map = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
        self._closed = False
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        if fd < 0:
            prefer_large(self.address, size)
        self.buffer = memoryview(self._map)

    @classmethod
    def memfd(cls, num_blocks: int, block_bytes: int) -> PoolMemory:
        """New memory, all zeros, of fixed size, shared through its fd."""
        fd = os.memfd_create("penstock-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, num_blocks * block_bytes)
            # a mapping process would get SIGBUS if another process truncated it
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            return cls(fd, num_blocks, block_bytes)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def anonymous(cls, num_blocks: int, block_bytes: int) -> PoolMemory:
        """New memory, all zeros. The system finds its pages twice as fast as a memfd's."""
        return cls(-1, num_blocks, block_bytes)

    def held(self) -> ctypes.Array[ctypes.c_char]:
        """All of it; keeps the mapping alive after `close`."""
        return (ctypes.c_char * len(self._map)).from_buffer(self._map)

    def block(self, block: int) -> memoryview:
        """The bytes of one block, writable."""
        assert 0 <= block < self.num_blocks, f"block {block} of {self.num_blocks}"
        return self.buffer[block * self.block_bytes : (block + 1) * self.block_bytes]

    def checksum(self, block: int) -> int:
        """See `checksum_of`."""
        return checksum_of(self.block(block))

    @property
    def resident_bytes(self) -> int:
        """Bytes of it in memory; known for a memfd only."""
        return os.fstat(self.fd).st_blocks * 512

    def punch(self, first: int, count: int) -> None:
        """Return the memory of `count` blocks from `first` on to the system; they read as zeros, for everybody."""
        assert self.block_bytes % PAGE == 0
        advice = mmap.MADV_REMOVE if self.fd >= 0 else mmap.MADV_DONTNEED
        self._map.madvise(advice, first * self.block_bytes, count * self.block_bytes)

    def close(self) -> None:
        """Close it. The mapping stays until its last view, such as a tensor's, is gone."""
        if self._closed:
            return
        self._closed = True
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        self.buffer.release()
        try:
            self._map.close()
        except BufferError:
            del self._map  # kept alive by its views
