"""Copies of KV blocks on a disk, below a cache in the host's memory (`engine.mover`). They outlive the engine.

    blocks   slots of one block each
    index    a record for each slot: what lies there, and its checksum

These are in a folder of the engine's own, in which only engines like it find anything (`engine.disk_folders`). Where
ranks share a model, a slot has the parts of all of them, one behind the other. Rank 0 maps the memory of the others, so
that a copy is whole, or is not, for all of them at once.

Which copy goes is decided block by block (`kv.tier`), so a slot is overwritten where it is: a log that drops its oldest
segments would drop the beginnings of prompts first, behind which all the rest is found. A slot's record is voided
before the block is written, and is written after it. Nothing is ever forced to the disk. What a crash leaves of a
record does not have its own checksum, and what it leaves of a block not that of its record: the one is passed over at
the next start, the other when it is loaded.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import struct
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict
from hashlib import blake2b
from itertools import count
from pathlib import Path
from typing import NamedTuple

import torch

from penstock.core.errors import ConfigError
from penstock.core.layout import KVLayout
from penstock.core.version import VERSION
from penstock.engine.cache import KVCache
from penstock.engine.disk_folders import LAYOUT_BYTES, Folder, Leftovers
from penstock.engine.mover import PIECE, Mover
from penstock.kv.connector import Move
from penstock.kv.groups import BESIDE
from penstock.kv.tier import Kept, Tier
from penstock.nn import native
from penstock.transfer.memory import PoolMemory

log = logging.getLogger("penstock.engine")
OPTION, SIZE_OPTION = "disk-cache", "disk-cache-size"
SIZE = 16 << 30  # bytes by default
FORMAT = 1  # of the files
# key, parent, number, checksum of the block, slot, kind of parent; then the CRC-32 of these: 64 bytes
RECORD, CHECK = struct.Struct("<16s16sQQQI"), struct.Struct("<I")
RECORD_BYTES = RECORD.size + CHECK.size
FIRST, BEHIND, ALONE = range(3)  # a prompt's first block, one behind its parent, one that is found beside others
DIRECT = getattr(os, "O_DIRECT", 0)  # other systems have other ways
PIECE_BYTES = 32 << 20  # of a push, after which loads may come first
TRIALS = 4  # reads at the start, of which the best counts
UNMEASURED = 200e6  # bytes/s of a disk on which nothing could be tried
FULL = (errno.ENOSPC, errno.EDQUOT)
# Of a disk that fails, which is no reason not to serve; all else is a mistake of whoever named the folder
FAILS = (*FULL, errno.EIO, errno.EROFS, errno.ESTALE, errno.ENODEV, errno.ENXIO, errno.ENOTCONN)


class DiskTier(NamedTuple):
    """
    Attributes:
        block_seconds: that reading a block took at the start.
    """

    mover: Mover
    tier: Tier
    block_seconds: float


class Index:
    """The records of a folder.

    Args:
        whole: slots that the file of blocks has; what records say of others is void.
    """

    def __init__(self, path: Path, num_slots: int, whole: int) -> None:
        self._fd = _opened(path)
        self.kept: list[Kept] = []
        self.stored: dict[int, tuple[bytes, int]] = {}
        with ExitStack() as stack:
            stack.callback(self.close)
            data = _read_all(self._fd, num_slots * RECORD_BYTES)
            os.ftruncate(self._fd, num_slots * RECORD_BYTES)
            stack.pop_all()
        for slot in range(min(whole, len(data) // RECORD_BYTES)):
            self._take_up(slot, data[slot * RECORD_BYTES : (slot + 1) * RECORD_BYTES])
        self._numbers = count(1 + max((kept.number for kept in self.kept), default=0))

    def _take_up(self, slot: int, record: bytes) -> None:
        said, (check,) = record[: RECORD.size], CHECK.unpack(record[RECORD.size :])
        key, parent, number, checksum, place, kind = RECORD.unpack(said)
        if check != zlib.crc32(said) or place != slot or not number:
            return
        self.kept.append(Kept(number, slot, key, {FIRST: b"", BEHIND: parent}.get(kind, BESIDE)))
        self.stored[slot] = key, checksum

    def void(self, slot: int) -> None:
        """What lies there is going to be something else."""
        _write_all(self._fd, bytes(RECORD_BYTES), slot * RECORD_BYTES)

    def write(self, move: Move, checksum: int) -> None:
        kind = FIRST if not move.parent else ALONE if move.parent == BESIDE else BEHIND
        said = RECORD.pack(move.key, move.parent, next(self._numbers), checksum, move.slot, kind)
        _write_all(self._fd, said + CHECK.pack(zlib.crc32(said)), move.slot * RECORD_BYTES)

    def close(self) -> None:
        os.close(self._fd)


class DiskSlots:
    """A `Way` to slots in a file, and their `Journal`.

    Blocks are written from where they lie, past the page cache where the file system allows it: that has the weights.

    Args:
        cache: whose blocks are copied; in the host's memory.
        directory: in which its folder is.
        weights: tells those of the layout's `model` from what the same files had in them at another time.
        others: the other ranks' parts of the same blocks, of the same layout; owned, and closed at the end.

    Attributes:
        block_bytes: of all parts.
        folder: of this engine alone.
        block_seconds: that reading a block took at the start.

    Raises:
        OSError: the directory cannot be used.
    """

    def __init__(
        self, cache: KVCache, directory: Path, num_slots: int, weights: str = "", others: Sequence[PoolMemory] = ()
    ) -> None:
        assert cache.slots.is_cpu
        self._part_bytes, parts = cache.layout.block_bytes, 1 + len(others)
        self.block_bytes = size = self._part_bytes * parts
        self._cache: KVCache | None = cache
        self._others = others
        self._num_slots = num_slots
        self._buffer = mmap.mmap(-1, size)
        self._read_at = _address(self._buffer)
        self._held = -1  # the slot whose content is there
        self._gathered = mmap.mmap(-1, mmap.PAGESIZE)  # blocks whose parts lie apart
        with ExitStack() as stack:
            for memory in others:
                stack.callback(memory.close)
            folder = Folder(directory / _name(cache.layout, weights, parts))
            stack.callback(folder.close)
            self.folder = folder.path
            self._leftovers = Leftovers(directory, self.folder, num_slots * size)
            self.block_seconds, direct = self._tried(self.folder / "trial")
            self._fd = _opened(self.folder / "blocks", direct)
            stack.callback(os.close, self._fd)
            whole = os.fstat(self._fd).st_size // size
            os.ftruncate(self._fd, num_slots * size)  # it is sparse
            self._index = Index(self.folder / "index", num_slots, whole)
            stack.callback(self._index.close)
            self._open = stack.pop_all()

    @property
    def kept(self) -> Sequence[Kept]:
        """What was there when it was opened."""
        return self._index.kept

    @property
    def stored(self) -> Mapping[int, tuple[bytes, int]]:
        return self._index.stored

    def _tried(self, path: Path) -> tuple[float, int]:
        """Seconds that reading a block takes, and the flag by which this is past the page cache."""
        self._buffer[:] = os.urandom(self.block_bytes)  # what is all zeros may never reach the disk
        for direct in (DIRECT, 0):
            with suppress(OSError):
                fd = _opened(path, direct)
                try:
                    self._write(fd, memoryview(self._buffer), 0)
                    return min(self._read_seconds(fd) for _ in range(TRIALS)), direct
                finally:
                    os.close(fd)
                    path.unlink()
        return self.block_bytes / UNMEASURED, 0

    def _read_seconds(self, fd: int) -> float:
        began = time.perf_counter()
        os.preadv(fd, [self._buffer], 0)
        return time.perf_counter() - began

    def store(self, moves: Sequence[Move]) -> Sequence[memoryview]:
        contents = self._contents(moves)
        self._held = -1
        self._leftovers.trim()
        for move, content in zip(moves, contents, strict=True):
            self._index.void(move.slot)
            self._write(self._fd, content, self._place(move.slot))
        return contents

    def _write(self, fd: int, content: memoryview, place: int) -> None:
        while True:
            try:
                return _write_all(fd, content, place)
            except OSError as error:
                if error.errno not in FULL or not self._leftovers.give_way():
                    raise

    def write(self, move: Move, checksum: int) -> None:
        self._index.write(move, checksum)

    def load(self, moves: Iterable[Move]) -> int:
        number = 0
        for move in moves:  # whose contents were just looked at, one by one
            if self._held != move.slot:
                self.content(move.slot)
            for i, part in enumerate(self._parts(move.block)):
                ctypes.memmove(part, self._read_at + i * self._part_bytes, self._part_bytes)
            number += 1
        return number

    def content(self, slot: int) -> memoryview:
        """Shorter than a block when it cannot be read."""
        self._held = -1
        try:
            size = os.preadv(self._fd, [self._buffer], self._place(slot))
        except OSError as error:
            log.warning("a KV block cannot be read: %s", error)
            return memoryview(b"")
        self._held = slot
        return memoryview(self._buffer)[:size]

    def room(self) -> int:
        """Bytes that its blocks may take at present."""
        system = os.fstatvfs(self._fd)
        return system.f_bavail * system.f_frsize + os.fstat(self._fd).st_blocks * 512

    def close(self) -> None:
        self._cache = None
        self._open.close()

    def _contents(self, moves: Sequence[Move]) -> list[memoryview]:
        """The bytes of each block, in place where they are in one."""
        size, whole = self._part_bytes, self.block_bytes
        if not self._others:
            return [
                memoryview((ctypes.c_ubyte * size).from_address(part)).cast("B")
                for move in moves
                for part in self._parts(move.block)
            ]
        if len(self._gathered) < len(moves) * whole:
            self._gathered = mmap.mmap(-1, len(moves) * whole)
        place = _address(self._gathered)
        for move in moves:
            for part in self._parts(move.block):
                ctypes.memmove(place, part, size)
                place += size
        return [memoryview(self._gathered)[i * whole : (i + 1) * whole] for i in range(len(moves))]

    def _parts(self, block: int) -> list[int]:
        """Addresses of a block's parts, by rank."""
        assert self._cache is not None
        assert 0 <= block < len(self._cache.blocks), f"block {block} of {len(self._cache.blocks)}"
        begins = self._cache.slots.data_ptr(), *(memory.address for memory in self._others)
        return [begin + block * self._part_bytes for begin in begins]

    def _place(self, slot: int) -> int:
        assert 0 <= slot < self._num_slots, f"slot {slot} of {self._num_slots}"
        return slot * self.block_bytes


def open_disk_tier(
    cache: KVCache, directory: str, num_slots: int, weights: str = "", others: Sequence[PoolMemory] = ()
) -> DiskTier | None:
    """Open the tier below a cache, with so many slots and what an engine before this one has left in them. None when
    the disk fails: then all is computed. Raises ConfigError when the directory cannot be used.

    Args:
        weights, others: see `DiskSlots`.
    """
    try:
        slots = DiskSlots(cache, Path(directory).expanduser(), num_slots, weights, others)
    except (OSError, RuntimeError) as error:  # as where there is no such user
        reason = getattr(error, "strerror", None) or str(error)
        if getattr(error, "errno", None) in FAILS:
            log.error("%s: %s fails (%s): nothing is kept there until the next start", OPTION, directory, reason)
            return None
        raise ConfigError(f"{OPTION}: {directory!r} cannot be used ({reason}), allowed is a folder", OPTION) from None
    tier = Tier(num_slots, "disk")
    tier.restore(slots.kept)
    size, block_bytes = num_slots * slots.block_bytes, slots.block_bytes
    log.info(
        "%d blocks (%.0f MiB) of copies in %s, %d of them there already, a block is read in %.2f ms",
        num_slots,
        size / 2**20,
        slots.folder,
        tier.used,
        slots.block_seconds * 1e3,
    )
    if size > (room := slots.room()):
        log.warning("%s: %.1f GiB, there is room for %.1f GiB", SIZE_OPTION, size / 2**30, room / 2**30)
    piece = max(1, min(PIECE, PIECE_BYTES // block_bytes))
    return DiskTier(Mover(slots, journal=slots, piece=piece), tier, slots.block_seconds)


def check_disk_tier(directory: str | None, size: int | None, device: torch.device) -> None:
    """Raise ConfigError when there is no such tier below what was asked for.

    Args:
        directory: None asks for none.
        size: bytes; None is the default.
    """
    if directory is None:
        if size is not None:
            raise ConfigError(f"{SIZE_OPTION}: {size / 2**30:.1f} GiB, allowed only with {OPTION}", SIZE_OPTION)
        return
    if device.type != "cpu":
        raise ConfigError(f"{OPTION}: {directory!r}, not supported yet on {device.type}, allowed on a CPU", OPTION)


def _name(layout: KVLayout, weights: str, ranks: int) -> str:
    """Of all that decides what bytes stand for, or that they are the same bits as if they were computed now."""
    parts = (FORMAT, VERSION, torch.__version__, native.made_from(), weights, ranks, sorted(asdict(layout).items()))
    return blake2b(repr(parts).encode(), digest_size=LAYOUT_BYTES, person=b"penstock.disk").hexdigest()


def _address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _opened(path: Path, flags: int = 0) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | flags, 0o600)


def _write_all(fd: int, data: bytes | mmap.mmap | memoryview, place: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, place)
        view, place = view[written:], place + written


def _read_all(fd: int, size: int) -> bytes:
    def pieces() -> Iterator[bytes]:
        place = 0
        while piece := os.pread(fd, min(size - place, 1 << 24), place):
            yield piece
            place += len(piece)

    return b"".join(pieces())
