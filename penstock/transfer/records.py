"""Records of the contents of every block of a shared pool, in memory that outlives the writer.

A second memfd with 64 bytes a block:

    generation    8 bytes    which use of the block this is; only the KV pool server writes it
    key          16 bytes    its prefix key,                          \\
    parent       16 bytes    that of the block before it,              | only the block's writer writes these, once
    checksum      8 bytes    of the block's bytes                      | it is full and can be found by its key
    seal          8 bytes    checksum of the four fields before       /
    spare         8 bytes

A record that is incomplete because its writer failed, or that belongs to an earlier use of the block, has a wrong seal
and is ignored.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from xxhash import xxh3_64_intdigest

from penstock.kv.keys import KEY_BYTES
from penstock.transfer.memory import PoolMemory

RECORD_BYTES = 64
_GENERATION = struct.Struct("<Q")
_FIELDS = struct.Struct(f"<Q{KEY_BYTES}s{KEY_BYTES}sQ")
_SEAL = struct.Struct("<Q")
_SEALED = _FIELDS.size  # bytes that the seal covers; it stands right behind them


@dataclass(frozen=True, slots=True)
class Record:
    """A full block that can be found by its key."""

    block: int
    key: bytes
    parent: bytes
    checksum: int
    generation: int


class Records:
    """The table, in memory with `RECORD_BYTES` a block. Nothing here blocks or makes a system call."""

    def __init__(self, memory: PoolMemory) -> None:
        assert memory.block_bytes == RECORD_BYTES
        self._memory = memory
        self._table = memory.buffer

    @property
    def fd(self) -> int:
        return self._memory.fd

    def generation(self, block: int) -> int:
        generation: int = _GENERATION.unpack_from(self._table, self._start(block))[0]
        return generation

    def begin(self, block: int, generation: int) -> None:
        """Begin a new use of the block: clears its record. For the KV pool server."""
        start = self._start(block)
        self._table[start : start + RECORD_BYTES] = _GENERATION.pack(generation).ljust(RECORD_BYTES, b"\0")

    def put(self, block: int, key: bytes, parent: bytes, checksum: int) -> None:
        """The block is full and has this key. `checksum` is `PoolMemory.checksum` of it."""
        assert len(key) == len(parent) == KEY_BYTES
        sealed = _FIELDS.pack(self.generation(block), key, parent, checksum)
        start = self._start(block)
        self._table[start + _GENERATION.size : start + _SEALED + _SEAL.size] = sealed[_GENERATION.size :] + _SEAL.pack(
            xxh3_64_intdigest(sealed)
        )

    def get(self, block: int) -> Record | None:
        """What the block contains, or None when nothing is recorded or the record is not whole."""
        start = self._start(block)
        line = bytes(self._table[start : start + _SEALED + _SEAL.size])
        if xxh3_64_intdigest(line[:_SEALED]) != _SEAL.unpack_from(line, _SEALED)[0]:
            return None
        generation, key, parent, checksum = _FIELDS.unpack_from(line)
        return Record(block, key, parent, checksum, generation)

    def clear(self, block: int) -> None:
        """Clear the block's record. Call it before the bytes change."""
        start = self._start(block)
        self._table[start + _GENERATION.size : start + RECORD_BYTES] = bytes(RECORD_BYTES - _GENERATION.size)

    def _start(self, block: int) -> int:
        assert 0 <= block < self._memory.num_blocks, f"block {block} of {self._memory.num_blocks}"
        return block * RECORD_BYTES

    def close(self) -> None:
        self._memory.close()
