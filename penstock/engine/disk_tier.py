"""Copies of KV blocks on a disk, below an engine's cache (`engine.mover`). They outlive the engine.

    blocks   slots of one block each
    index    a record for each slot: what lies there, and its checksum

These are in a folder of the engine's own, in which only engines like it find anything (`engine.disk_folders`).

Which copy goes is decided block by block (`kv.tier`), so a slot is overwritten where it is: a log that drops its oldest
segments would drop the beginnings of prompts first, behind which all the rest is found. A slot's record is voided
before the block is written, and is written after it. Nothing is ever forced to the disk. What a crash leaves of a
record does not have its own checksum, and what it leaves of a block not that of its record: the one is passed over at
the next start, the other when it is loaded.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import struct
import time
import zlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict
from hashlib import blake2b
from itertools import count
from pathlib import Path
from typing import NamedTuple

import torch

from penstock.core.errors import ConfigError
from penstock.core.version import VERSION
from penstock.engine.block_views import address_of, processor_of, views_of
from penstock.engine.cache import KVCache
from penstock.engine.disk_folders import LAYOUT_BYTES, Folder, Leftovers
from penstock.engine.mover import PIECE, SlotMover
from penstock.kv.connector import Move
from penstock.kv.groups import BESIDE
from penstock.kv.tier import Kept, Tier
from penstock.transfer.files import DIRECT, FAILS, FULL, opened, read_all, write_all

log = logging.getLogger("penstock.engine")
OPTION, SIZE_OPTION = "disk-cache", "disk-cache-size"
SIZE = 16 << 30  # bytes by default
FORMAT = 1  # of the files
# key, parent, number, checksum of the block, slot, kind of parent; then the CRC-32 of these: 64 bytes
RECORD, CHECK = struct.Struct("<16s16sQQQI"), struct.Struct("<I")
RECORD_BYTES = RECORD.size + CHECK.size
FIRST, BEHIND, ALONE = range(3)  # a prompt's first block, one behind its parent, one that is found beside others
PIECE_BYTES = 32 << 20  # of a push, after which loads may come first
TRIALS = 4  # reads at the start, of which the best counts
UNMEASURED = 200e6  # bytes/s of a disk on which nothing could be tried


class DiskTier(NamedTuple):
    """
    Attributes:
        block_seconds: that reading a block took at the start.
    """

    mover: SlotMover
    tier: Tier
    block_seconds: float


class Index:
    """The records of a folder.

    Args:
        whole: slots that the file of blocks has; what records say of others is void.
    """

    def __init__(self, path: Path, num_slots: int, whole: int) -> None:
        self._fd = opened(path)
        self.kept: list[Kept] = []
        self.stored: dict[int, tuple[bytes, int]] = {}
        with ExitStack() as stack:
            stack.callback(self.close)
            data = read_all(self._fd, num_slots * RECORD_BYTES)
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
        write_all(self._fd, bytes(RECORD_BYTES), slot * RECORD_BYTES)

    def write(self, move: Move, checksum: int) -> None:
        kind = FIRST if not move.parent else ALONE if move.parent == BESIDE else BEHIND
        said = RECORD.pack(move.key, move.parent, next(self._numbers), checksum, move.slot, kind)
        write_all(self._fd, said + CHECK.pack(zlib.crc32(said)), move.slot * RECORD_BYTES)

    def close(self) -> None:
        os.close(self._fd)


class DiskSlots:
    """`Slots` in a file, and their `Journal`.

    Blocks in the host's memory are written from where they lie, past the page cache where the file system allows it:
    that has the weights.

    Args:
        cache: whose blocks are copied.
        directory: in which its folder is.
        weights: tells those of the layout's `model` from what the same files had in them at another time.
        rounding: see `Layout.rounding`.

    Attributes:
        folder: of this engine alone.
        block_seconds: that reading a block took at the start.

    Raises:
        OSError: the directory cannot be used.
    """

    def __init__(self, cache: KVCache, directory: Path, num_slots: int, weights: str = "", rounding: str = "1") -> None:
        self._views = views_of(cache)
        self.block_bytes = size = self._views.block_bytes
        self._num_slots = num_slots
        self._buffer = mmap.mmap(-1, size)
        self._read_at = address_of(self._buffer)
        self._held = -1  # the slot whose content is there
        with ExitStack() as stack:
            stack.callback(self._views.close)
            folder = Folder(directory / _name(cache, weights, rounding))
            stack.callback(folder.close)
            self.folder = folder.path
            self._leftovers = Leftovers(directory, self.folder, num_slots * size)
            self.block_seconds, direct = self._tried(self.folder / "trial")
            self._fd = opened(self.folder / "blocks", direct)
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
                fd = opened(path, direct)
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
        contents = self._views.of([move.block for move in moves])
        self._held = -1
        self._leftovers.trim()
        for move, content in zip(moves, contents, strict=True):
            self._index.void(move.slot)
            self._write(self._fd, content, self._place(move.slot))
        return contents

    def _write(self, fd: int, content: memoryview, place: int) -> None:
        while True:
            try:
                return write_all(fd, content, place)
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
            (view,) = self._views.into([move.block])
            ctypes.memmove(address_of(view), self._read_at, self.block_bytes)  # others may have the interpreter
            self._views.arrived([move.block])
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
        self._open.close()

    def _place(self, slot: int) -> int:
        assert 0 <= slot < self._num_slots, f"slot {slot} of {self._num_slots}"
        return slot * self.block_bytes


def open_disk_tier(
    cache: KVCache, directory: str, num_slots: int, weights: str = "", rounding: str = "1"
) -> DiskTier | None:
    """Open the tier below a cache, with so many slots and what an engine before this one has left in them. None when
    the disk fails: then all is computed. Raises ConfigError when the directory cannot be used.

    Args:
        weights, rounding: see `DiskSlots`.
    """
    try:
        slots = DiskSlots(cache, Path(directory).expanduser(), num_slots, weights, rounding)
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
    return DiskTier(SlotMover(slots, journal=slots, piece=piece), tier, slots.block_seconds)


def check_disk_tier(directory: str | None, size: int | None, device: torch.device, ranks: int) -> None:
    """Raise ConfigError when there is no such tier below what was asked for.

    Args:
        directory: None asks for none.
        size: bytes; None is the default.
        ranks: that the model is spread over.
    """
    if directory is None:
        if size is not None:
            raise ConfigError(f"{SIZE_OPTION}: {size / 2**30:.1f} GiB, allowed only with {OPTION}", SIZE_OPTION)
        return
    if device.type != "cpu" and ranks > 1:
        what = f"on {device.type} with {ranks} ranks"
        raise ConfigError(f"{OPTION}: {directory!r}, not supported yet {what}, allowed with 1, or on a CPU", OPTION)


def _name(cache: KVCache, weights: str, rounding: str) -> str:
    """Of all that decides what bytes stand for, or that they are the same bits as if they were computed now."""
    made = VERSION, torch.__version__, processor_of(cache.slots.device)
    parts = (FORMAT, *made, weights, rounding, sorted(asdict(cache.layout).items()))
    return blake2b(repr(parts).encode(), digest_size=LAYOUT_BYTES, person=b"penstock.disk").hexdigest()
