"""Reserved addresses, and physical blocks behind them.

The arena is one stretch of addresses: first every block of the pool, in its own order, then the slots of the virtual
ranges. It counts in slots of one block: slot b < num_blocks is the pool's block b, so a block table and a virtual
range are two ways to name places of the same tensor. Reserving costs nothing but addresses; reading a slot that is not
mapped is a segmentation fault, which shows a wrong kernel.
"""

from __future__ import annotations

import ctypes
import errno
import os
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.transfer.memory import PoolMemory

_NONE, _READ_WRITE = 0, 1 | 2
_SHARED, _PRIVATE, _FIXED, _ANONYMOUS, _NO_RESERVE, _POPULATE = 0x1, 0x2, 0x10, 0x20, 0x4000, 0x8000

_POPULATE_WRITE = 23  # madvise
_PIECE = 512 << 10  # bytes: other threads' mappings wait while one is touched

_libc = ctypes.CDLL(None, use_errno=True)  # releases the interpreter lock during calls
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class Arena:
    """`num_slots` slots behind the blocks of a pool. Raises OSError when the system refuses addresses or a mapping.

    Without slots, and over memory that no other process has, it is that memory.
    """

    def __init__(self, memory: PoolMemory, num_slots: int) -> None:
        self.num_blocks = memory.num_blocks
        self.num_slots = num_slots
        self.block_bytes = memory.block_bytes
        self.nbytes = (self.num_blocks + num_slots) * self.block_bytes
        if memory.fd < 0:
            assert not num_slots, "these blocks lie in one place only"
            self._held = memory.held()
            self._address = ctypes.addressof(self._held)
            return
        self._fd = os.dup(memory.fd)
        self._address = _mmap(None, self.nbytes, _NONE, _PRIVATE | _ANONYMOUS | _NO_RESERVE, -1, 0)
        weakref.finalize(self, _close, self._address, self.nbytes, self._fd)
        self._place(0, 0, self.num_blocks, 0)

    def map(self, slot: int, block: int, count: int = 1, *, populate: bool = True) -> None:
        """Map blocks [block, block + count) to slots [slot, slot + count).

        With `populate` their pages are in the process's page table when this returns; without, each is faulted in when
        it is first touched.
        """
        assert self.num_blocks <= slot <= slot + count <= self.num_blocks + self.num_slots
        assert 0 <= block <= block + count <= self.num_blocks
        self._place(slot, block, count, _POPULATE if populate else 0)

    def unmap(self, slot: int, count: int = 1) -> None:
        """Unmap these slots."""
        assert self.num_blocks <= slot <= slot + count <= self.num_blocks + self.num_slots
        start = self._address + slot * self.block_bytes
        _mmap(start, count * self.block_bytes, _NONE, _FIXED | _PRIVATE | _ANONYMOUS | _NO_RESERVE, -1, 0)

    def touch(self, block: int) -> None:
        """Allocate the memory of a block of the pool; its content is unchanged.

        A kernel before 5.14 has no such call: then the block is left to its first use.
        """
        address, size = self._address + block * self.block_bytes, self.block_bytes
        for start in range(0, size, _PIECE):
            if _touch(address + start, min(_PIECE, size - start)) == 0:
                continue
            if (number := ctypes.get_errno()) == errno.EINVAL:
                return
            raise OSError(number, f"madvise of block {block}: {os.strerror(number)}")

    def clear(self, slot: int) -> None:
        """Write zeros to a mapped slot."""
        ctypes.memset(self._address + slot * self.block_bytes, 0, self.block_bytes)

    def buffer(self) -> ctypes.Array[ctypes.c_char]:
        """All of it, for tensors over it; keeps the arena alive."""
        buffer = (ctypes.c_char * self.nbytes).from_address(self._address)
        buffer._arena = self  # type: ignore[attr-defined]
        return buffer

    def _place(self, slot: int, block: int, count: int, flags: int) -> None:
        size = self.block_bytes
        _mmap(self._address + slot * size, count * size, _READ_WRITE, _FIXED | _SHARED | flags, self._fd, block * size)


def _mmap(address: int | None, length: int, protection: int, flags: int, fd: int, offset: int) -> int:
    got = _libc.mmap(address, length, protection, flags, fd, offset)
    if got == ctypes.c_void_p(-1).value:
        number = ctypes.get_errno()
        raise OSError(number, f"mmap of {length} bytes: {os.strerror(number)}")
    return got


def _touch(address: int, length: int) -> int:
    status: int = _libc.madvise(address, length, _POPULATE_WRITE)
    return status


def _close(address: int, nbytes: int, fd: int) -> None:
    _libc.munmap(address, nbytes)
    os.close(fd)
