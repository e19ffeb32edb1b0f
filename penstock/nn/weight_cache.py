"""Packed weights on disk: written once a checkpoint was loaded, mapped at the next start.

A file is a head, the JSON of what is in it, and the weights, each at the beginning of a page. Engines of one host that
map it share the memory. A file is only ever put in place whole and never written again, so mappings stay valid when a
file is replaced. A file that does not match exactly is ignored.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from penstock.core.errors import ConfigError
from penstock.core.mappings import is_large
from penstock.nn.image import NAMES, Image, in_large_pages, mapped, padded, parts
from penstock.nn.models.decoder import Decoder
from penstock.nn.native.build import cache_folder
from penstock.nn.reading import resident

log = logging.getLogger("penstock.weights")
MAGIC = b"penstock weights"
DIGEST = 16  # bytes
HEAD = len(MAGIC) + 8 + DIGEST  # the magic, how many bytes of JSON follow, and their digest
MOST_JSON = 64 << 20
LEAST = 64 << 20  # bytes of weights; fewer are packed at once
FILES = 4  # the least recently used go
SHARE = 0.25  # of the disk, for all files
RESERVE = 1 << 30  # bytes of the disk that stay free
PARTS_AT_ONCE = 64
PATIENCE = 10.0  # seconds
TRIED = 128 << 20  # bytes that are read again to see whether it helps; their ends are in small pages in any case


class WeightCache:
    """Of one user, for any checkpoints.

    Args:
        folder: where the files are; by default beside the compiled kernels.
        least: bytes that a model must have to be kept.
        files: how many are kept.
        share: of the disk's size that they may take together.
    """

    def __init__(
        self, folder: Path | None = None, *, least: int = LEAST, files: int = FILES, share: float = SHARE
    ) -> None:
        if folder is None:
            try:
                folder = cache_folder().parent / "weights"
            except RuntimeError:  # no home directory
                least = sys.maxsize
                folder = Path()
        self._folder, self._least, self._files, self._share = folder, least, files, share
        self._unsaved: tuple[str, Decoder] | None = None

    def wants(self, model: Decoder) -> bool:
        """Whether a model is large enough."""
        return sum(p.nbytes for p in model.parameters()) >= self._least

    def is_in_memory(self, key: str) -> bool:
        """Whether the page cache has such a file."""
        try:
            return resident(self._path(key))
        except ConfigError:
            return False

    def read(self, key: str, model: Decoder) -> Image | None:
        """Fill a model that is on "meta", or leave it as it is and return None."""
        path = self._path(key)
        try:
            with path.open("rb", buffering=0) as file:
                image = in_large_pages(_map(file, key))
                image.fill(model)
                _used(file)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            log.info("%s is not used: %s", path, error)
            return None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            log.info("%s is not used: %s", path, str(error) or type(error).__name__)
            with contextlib.suppress(OSError):  # it is replaced, or refused again next time
                path.unlink()
            return None
        log.info("weights are mapped from %s", path)
        return image

    def remember(self, key: str, model: Decoder) -> None:
        """This is what `save` will write."""
        self._unsaved = key, model

    def save_later(self) -> threading.Thread | None:
        """Save in a background thread of idle priority."""
        if self._unsaved is None:
            return None
        thread = threading.Thread(target=self._save_idly, name="weight-cache", daemon=True)
        thread.start()
        return thread

    def _save_idly(self) -> None:
        if sys.platform == "linux":  # elsewhere threads have no priority of their own
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        self.save()

    def save(self) -> None:
        """Write what is remembered, unless it is there, or another engine is at it, or there is no room."""
        if self._unsaved is None:
            return
        (key, model), self._unsaved = self._unsaved, None
        path = self._path(key)
        part = path.with_suffix(".part")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            if _is_whole(path, key):
                return
            with part.open("ab", buffering=0) as file:
                if _owns(file, part):
                    try:
                        self._write(file, key, model)
                    except OSError:
                        part.unlink()
                        raise
                    part.replace(path)
                    log.info("weights are kept in %s for the next start", path)
        except OSError as error:
            log.info("weights are not kept for the next start: %s", error)

    def _write(self, file: IO[bytes], key: str, model: Decoder) -> None:
        parts = _layout(key, model)
        self._make_room(sum(map(len, parts)), self._path(key))
        file.truncate(0)
        while parts:
            # one call for many, because between calls this thread holds up the one that computes
            written = os.writev(file.fileno(), parts[:PARTS_AT_ONCE])
            while parts and written >= len(parts[0]):
                written -= len(parts.pop(0))
            if written:
                parts[0] = parts[0][written:]
        os.fsync(file.fileno())  # the content must be on disk before the name

    def _make_room(self, size: int, path: Path) -> None:
        """Raises OSError, and removes nothing, where it cannot be had."""
        _remove_abandoned(self._folder, path.with_suffix(".part"))
        files = [file for file in self._folder.glob("*.weights") if file != path]
        others = sorted((*used, file) for file in files if (used := _usage(file)))
        disk = shutil.disk_usage(self._folder)
        going: list[tuple[int, int, Path]] = []
        while others and (len(others) >= self._files or _sum(others) + size > disk.total * self._share):
            going.append(others.pop(0))
        if size > disk.total * self._share or disk.free + _sum(going) < size + RESERVE:
            raise OSError(f"{size >> 20} MiB are too much for {self._folder}, where {disk.free >> 20} MiB are free")
        for _, _, other in going:
            other.unlink(missing_ok=True)

    def _path(self, key: str) -> Path:
        return self._folder / f"{key}.weights"


def _read_header(file: IO[bytes], key: str) -> dict[str, Any]:
    """Raises ValueError for a file that is not whole, or another's."""
    head = file.read(HEAD)
    if len(head) < HEAD or not head.startswith(MAGIC):
        raise ValueError("it is something else")
    length = int.from_bytes(head[len(MAGIC) : -DIGEST], "little")
    text = file.read(length) if length <= MOST_JSON else b""
    if _digest(text) != head[-DIGEST:]:
        raise ValueError("it is damaged")
    header = json.loads(text)
    if header["key"] != key:
        raise ValueError("it belongs to another checkpoint")
    size, whole = os.fstat(file.fileno()).st_size, padded(HEAD + length) + header["bytes"]
    if size != whole:
        raise ValueError(f"it has {size} bytes instead of {whole}")
    return header


def _map(file: IO[bytes], key: str) -> Image:
    """Raises ValueError for a file that is not whole, or another's."""
    header, start = _read_header(file, key), padded(file.tell())
    with _alone(file):  # of engines that start together one reads
        memory = _mapped(file.fileno(), start, header["bytes"])
    return Image(key, header["weights"], os.dup(file.fileno()), start, memory)


@contextlib.contextmanager
def _alone(file: IO[bytes]) -> Iterator[None]:
    """Waits for who has a file, but not for long, and not where there are no locks."""
    until = time.monotonic() + PATIENCE
    with contextlib.suppress(OSError):
        while time.monotonic() < until:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.01)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_UN)


def _mapped(fd: int, start: int, size: int) -> Tensor:
    """Bytes of a file, mapped. Where the page cache has it in small pages, as when some of them were evicted, and the
    file system can have large ones, it is read again: so that engines go on to share it."""
    memory = mapped(fd, start, size)
    if is_large(memory.data_ptr(), size) or not hasattr(os, "posix_fadvise"):
        return memory
    del memory  # what is mapped is not dropped
    for some in sorted({min(size, TRIED), size}):
        os.posix_fadvise(fd, start, some, os.POSIX_FADV_DONTNEED)
        memory = mapped(fd, start, some)
        if some < size and not is_large(memory.data_ptr(), some):
            break
    return memory if memory.nbytes == size else mapped(fd, start, size)


def _layout(key: str, model: Decoder) -> list[memoryview]:
    """The parts of a file, one after the other."""
    weights: dict[str, tuple[str, list[int], int]] = {}
    written, end = [], 0
    for name, tensor in parts(model).items():
        weights[name] = NAMES[tensor.dtype], list(tensor.shape), end
        size = padded(tensor.nbytes)
        written += [_bytes(tensor), memoryview(bytes(size - tensor.nbytes))]
        end += size
    text = json.dumps({"key": key, "bytes": end, "weights": weights}).encode()
    head = MAGIC + len(text).to_bytes(8, "little") + _digest(text) + text
    return [memoryview(head.ljust(padded(len(head)), b"\0")), *written]


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.detach().view(-1).view(torch.uint8).numpy().data


def _digest(text: bytes) -> bytes:
    return blake2b(text, digest_size=DIGEST).digest()


def _is_whole(path: Path, key: str) -> bool:
    try:
        with path.open("rb", buffering=0) as file:
            return bool(_read_header(file, key))
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _owns(file: IO[bytes], part: Path) -> bool:
    """Whether this process may write a file: it is not locked, nor just written, by another."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(file.fileno()), part.stat())
    except (BlockingIOError, FileNotFoundError):
        return False


def _remove_abandoned(folder: Path, mine: Path) -> None:
    """Remove files of interrupted processes."""
    for part in folder.glob("*.part"):
        if part != mine:
            try:
                with part.open("ab") as file:
                    if _owns(file, part):
                        part.unlink()
            except OSError:
                continue


def _used(file: IO[bytes]) -> None:
    """It is the last that is to go."""
    with contextlib.suppress(OSError):  # without permission the owner decides
        os.utime(file.fileno())


def _usage(path: Path) -> tuple[int, int] | None:
    """(when it was last used, bytes); None where another engine has removed it."""
    try:
        stat = path.stat()
    except FileNotFoundError:
        return None
    return stat.st_mtime_ns, stat.st_size


def _sum(files: list[tuple[int, int, Path]]) -> int:
    return sum(size for _, size, _ in files)
