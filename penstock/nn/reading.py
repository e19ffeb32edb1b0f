"""How the files of a checkpoint are read: mapped, or in their own order through one buffer that all ranks share.

In file order (RTP-LLM, section 4) a file is read once, from its beginning to its end, in chunks of whole tensors, or of
rows of one that is larger. Two chunks have room in the buffer: one is being read while another is taken to where it
belongs. With several ranks, the files are dealt out among them; each reads its own for all, and the others take their
shards out of the same memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import mmap
import os
from collections.abc import Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from penstock.core.errors import ConfigError
from penstock.nn.checkpoint import DTYPES, Stored
from penstock.nn.ranks import SharedMemoryRanks

log = logging.getLogger("penstock.loader")
MAPPED_BYTES = 64 << 20  # of a file that is read, and the tensor that exceeds them
CHUNK = 32 << 20  # bytes that are read before they are taken
READ = 8 << 20  # bytes of one read
READERS = 4  # reads at once that do not go through the page cache
PAGE = 4096  # what reads that bypass the page cache are aligned to
LOOK, EVERY = 1 << 20, 16 << 20  # bytes that are looked for in the page cache, of so many
RESIDENT = 0.9  # share of a file that is there, from which on it is taken from there
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]

LOAD_FORMATS = ("auto", "mmap", "sequential")


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows of a tensor that are read.

    Attributes:
        first: row of the whole tensor.
        tensor: [rows, ...]; it is there until the next piece is asked for.
    """

    stored: Stored
    first: int
    tensor: Tensor


def pieces(
    tensors: Sequence[Stored], load_format: str, device: torch.device, ranks: SharedMemoryRanks | None = None
) -> tuple[str, Generator[Piece, None, None]]:
    """All of the given tensors.

    Args:
        tensors: best in the order in which they lie in the files.
        load_format: one of `LOAD_FORMATS`; auto maps files that the page cache has, and reads others in their order.
        device: where tensors are copied to.
        ranks: that all call this with the same, and take all pieces; None where this one is alone.

    Returns:
        The format, and the pieces. To be closed. What they raise is a ConfigError that names the file that cannot be
        read, or a RankFailed.
    """
    if load_format == "auto":
        load_format = "mmap" if all(map(resident, dict.fromkeys(tensor.path for tensor in tensors))) else "sequential"
    plan = Plan.of(tensors)
    if ranks is None:
        sequential = load_format == "sequential"
        memory = mmap.mmap(-1, plan.bytes) if sequential else None
    else:
        memory = _shared(plan, load_format == "sequential", ranks)
    if memory is None:
        return "mmap", mapped(tensors)
    return "sequential", in_order(plan, memory, device, ranks)


def mapped(tensors: Sequence[Stored]) -> Generator[Piece, None, None]:
    """Whole tensors, as views of mappings."""
    left = list(reversed(tensors))
    while left:
        path = left[-1].path
        try:
            # what was read of a mapping takes memory for as long as it is there
            with safe_open(path, framework="pt") as file:
                size = 0
                while left and left[-1].path == path and size < MAPPED_BYTES:
                    stored = left.pop()
                    tensor = _whole_or_part(file, stored)
                    if tensor.shape != stored.shape or tensor.dtype != DTYPES[stored.dtype]:
                        raise changed(path)
                    size += tensor.nbytes
                    yield Piece(stored, 0, tensor)
                    del tensor
        except FileNotFoundError:
            raise ConfigError(f"{path}: not found", "model") from None
        except (SafetensorError, OSError, RuntimeError) as error:
            raise ConfigError(f"{path}: corrupt or truncated ({error})", "model") from None


def _whole_or_part(file: Any, stored: Stored) -> Tensor:
    if stored.within is None:
        return cast(Tensor, file.get_tensor(stored.name))
    name, index, first = stored.within
    return cast(Tensor, file.get_tensor(name)[index, first : first + stored.rows])


def changed(path: Path) -> ConfigError:
    return ConfigError(f"{path}: was changed while it was read", "model")


def in_order(
    plan: Plan, memory: mmap.mmap, device: torch.device, ranks: SharedMemoryRanks | None = None
) -> Generator[Piece, None, None]:
    """Tensors, or rows of them, as they come out of the files."""
    rank, size = (0, 1) if ranks is None else (ranks.rank, ranks.size)
    own, files = set(plan.files[rank::size]), dict[Path, _File]()
    reading: dict[int, list[Future[None]]] = {}
    with _Pinned(memory, plan.bytes, device), ThreadPoolExecutor(READERS, "penstock-reads") as readers:

        def read(i: int) -> None:
            """Begin to, where there is such a chunk in a file of this rank's."""
            if i < len(plan.chunks) and (path := plan.chunks[i].path) in own:
                file = files[path] = files.get(path) or _File(path)
                reading[i] = file.read(plan.chunks[i], memoryview(memory)[plan.places[i] :], readers)

        try:
            read(0)
            for i, chunk in enumerate(plan.chunks):
                for part in reading.pop(i, ()):
                    part.result()
                if ranks is not None:
                    ranks.gather(torch.tensor(i))  # it is there, and all have taken the one before
                read(i + 1)
                at = plan.places[i] - chunk.aligned.start
                for stored, first, rows in chunk.parts:
                    yield Piece(stored, first, _view(memory, at, stored, first, rows))
        finally:
            readers.shutdown(cancel_futures=True)
            for file in files.values():
                file.close()


def _view(memory: mmap.mmap, at: int, stored: Stored, first: int, rows: int) -> Tensor:
    """Rows of a tensor in memory. `at` is where the file's first byte would be."""
    dtype, row = DTYPES[stored.dtype], (stored.stop - stored.start) // stored.rows
    flat = torch.frombuffer(memory, dtype=torch.uint8, count=rows * row, offset=at + stored.start + first * row)
    return flat.view(dtype).view(rows, *stored.shape[1:]) if stored.shape else flat.view(dtype).view(())


@dataclass(slots=True)
class Chunk:
    """What is read before it is taken.

    Attributes:
        start, stop: bytes of the file.
        parts: (tensor, first row, rows) of each tensor in it.
    """

    path: Path
    start: int
    stop: int
    parts: list[tuple[Stored, int, int]]

    @property
    def aligned(self) -> range:
        """Bytes of the file, in whole pages."""
        return range(self.start // PAGE * PAGE, -(-self.stop // PAGE) * PAGE)


class Plan:
    """What is read in which order, and to which place in the buffer: every other chunk to its end.

    Attributes:
        places: where each chunk's first page is put.
        bytes: of the buffer, in which any two chunks that follow each other have room.
    """

    def __init__(self, chunks: list[Chunk]) -> None:
        self.chunks = chunks
        sizes = [len(chunk.aligned) for chunk in chunks]
        self.bytes = max(map(sum, zip([0, *sizes], [*sizes, 0], strict=True))) or PAGE
        self.places = [0 if i % 2 == 0 else self.bytes - size for i, size in enumerate(sizes)]

    @classmethod
    def of(cls, tensors: Sequence[Stored]) -> Plan:
        """Of tensors, best in the order of the files."""
        chunks: list[Chunk] = []
        for stored in tensors:
            size = stored.stop - stored.start
            if not size:
                continue
            row = size // stored.rows
            step = stored.rows if size <= CHUNK else max(1, CHUNK // row)
            for first in range(0, stored.rows, step):
                rows = min(step, stored.rows - first)
                start = stored.start + first * row
                stop, part = start + rows * row, (stored, first, rows)
                last = chunks[-1] if chunks else None
                follows = last is not None and last.path == stored.path and last.stop <= start
                if last is not None and follows and stop - last.start <= CHUNK:
                    last.stop = stop
                    last.parts.append(part)
                else:
                    chunks.append(Chunk(stored.path, start, stop, [part]))
        return cls(chunks)

    @cached_property
    def files(self) -> list[Path]:
        return list(dict.fromkeys(chunk.path for chunk in self.chunks))

    @property
    def digest(self) -> int:
        """Of all that ranks must agree on."""
        text = repr([(chunk.path.name, chunk.start, chunk.stop) for chunk in self.chunks])
        return int.from_bytes(blake2b(text.encode(), digest_size=7).digest(), "little")


class _File:
    """Open, past the page cache where that can be and the file is not in it. Raises ConfigError."""

    def __init__(self, path: Path) -> None:
        self._path, self._fd = path, -1
        direct = getattr(os, "O_DIRECT", 0)
        try:
            if direct and not resident(path):
                self._fd = _opened_directly(path, os.O_RDONLY | os.O_CLOEXEC | direct)
            self._direct = self._fd >= 0
            if not self._direct:
                self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                if hasattr(os, "posix_fadvise"):
                    os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read ({error.strerror})", "model") from None

    def read(self, chunk: Chunk, into: memoryview, readers: ThreadPoolExecutor) -> list[Future[None]]:
        """Several at once where the device is asked, and one where the page cache looks ahead of it."""
        pages = chunk.aligned
        step = READ if self._direct else len(pages)
        return [
            readers.submit(self._read, chunk, into[at : min(at + step, len(pages))], pages.start + at)
            for at in range(0, len(pages), step)
        ]

    def _read(self, chunk: Chunk, into: memoryview, offset: int) -> None:
        """Raises ConfigError."""
        done, needed = 0, min(len(into), chunk.stop - offset)
        while done < needed:
            try:
                count = os.preadv(self._fd, [into[done:]], offset + done)
            except OSError as error:
                raise self._error(chunk, offset + done, f"cannot be read ({error.strerror})") from None
            if done + count < needed:
                if (size := os.fstat(self._fd).st_size) <= offset + done + count:
                    raise self._error(chunk, size, f"was truncated to {size} bytes while it was read")
                count -= count % PAGE if self._direct else 0
            done += count

    def _error(self, chunk: Chunk, offset: int, what: str) -> ConfigError:
        """Names the first tensor that is not all there."""
        name, stop = next(((s.name, s.stop) for s, *_ in chunk.parts if s.stop > offset), ("", chunk.stop))
        return ConfigError(f"{self._path}: {what}; {name!r} is expected to end at byte {stop}", "model")

    def close(self) -> None:
        os.close(self._fd)


def _opened_directly(path: Path, flags: int) -> int:
    """A file descriptor, or -1 on a file system that has no such reads. Raises OSError."""
    fd = -1
    try:
        fd = os.open(path, flags)
        os.preadv(fd, [mmap.mmap(-1, PAGE)], 0)  # which some refuse only then
    except OSError as error:
        if fd >= 0:
            os.close(fd)
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        return -1
    return fd


class _Pinned:
    """Memory that a CUDA device copies from directly, while this is entered; on a CPU nothing is done."""

    def __init__(self, memory: mmap.mmap, size: int, device: torch.device) -> None:
        self._device, self._size, self._pinned = device, size, False
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(memory))

    def __enter__(self) -> None:
        if self._device.type == "cuda":
            with torch.cuda.device(self._device):
                status = int(torch.cuda.cudart().cudaHostRegister(self._address, self._size, 0))
            self._pinned = not status
            if status:
                with contextlib.suppress(
                    RuntimeError
                ):  # torch finds the error behind what it starts next, and clears it
                    torch.zeros(1, device=self._device)
                log.info("weights go through memory that cannot be pinned (CUDA error %d)", status)

    def __exit__(self, *_: object) -> None:
        if self._pinned:
            with torch.cuda.device(self._device):
                torch.cuda.cudart().cudaHostUnregister(self._address)


def _shared(plan: Plan, sequential: bool, ranks: SharedMemoryRanks) -> mmap.mmap | None:
    """Memory of all ranks; None where rank 0 maps the files, or one cannot have its memory. Raises ConfigError where
    they have not found the same in the files, and RankFailed."""
    fd = -1
    if ranks.rank == 0 and sequential:
        fd = os.memfd_create("penstock-weights", os.MFD_CLOEXEC)
        os.ftruncate(fd, plan.bytes)
    try:
        said = ranks.gather(torch.tensor([plan.digest, os.getpid(), fd])).tolist()
        if any(digest != plan.digest for digest, _, _ in said):
            raise changed(plan.files[0].parent)
        _, pid, number = said[0]
        if number < 0:
            return None
        memory = None
        try:
            own = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
            try:
                memory = mmap.mmap(own, plan.bytes)
            finally:
                os.close(own)
        except OSError as error:
            log.warning("weights are mapped by every rank, rank %d has no memory of rank 0's: %s", ranks.rank, error)
        everyone = ranks.gather(torch.tensor(memory is not None)).all()
        return memory if everyone else None
    finally:
        if fd >= 0:
            os.close(fd)


def resident(path: Path) -> bool:
    """Whether a file is in the page cache. Raises ConfigError where there is none."""
    try:
        with path.open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            if not size:
                return True
            whole = mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ, flags=mmap.MAP_PRIVATE)
    except FileNotFoundError:
        raise ConfigError(f"{path}: not found", "model") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})", "model") from None
    address = np.frombuffer(whole, dtype=np.uint8).ctypes.data
    found = looked = 0
    for at in range(0, size, EVERY):
        length = min(LOOK, size - at)
        pages = np.zeros(-(-length // PAGE), dtype=np.uint8)  # no fewer than there are
        if _libc.mincore(address + at, length, pages.ctypes.data):
            return False
        found, looked = found + int((pages & 1).sum()), looked + -(-length // mmap.PAGESIZE)
    return found >= looked * RESIDENT
