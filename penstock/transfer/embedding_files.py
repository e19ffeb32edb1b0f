"""What a model makes of images, as files that all engines of a host share: whoever has made it may be gone.

    FOLDER/abcdef...    magic, checksum, bytes

under the image's digest. A file is written under another name, and renamed when it is whole. Whoever writes deletes
what was used longest ago, so that all together have so many bytes and one more each. There is no list of them:
everybody looks at the folder now and then, and so knows what others have written and deleted.
"""

from __future__ import annotations

import os
import struct
import threading
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from secrets import token_hex

from penstock.kv.embeddings import Embedding

HEAD = struct.Struct("<8sI")  # magic, checksum
MAGIC = b"pnstseen"
MOST_WAITING = 64  # embeddings that are to be written; more are not kept
LOOK_EVERY = 1.0  # seconds between two looks at the folder


class EmbeddingFiles:
    """A tier below an `EmbeddingCache`. It is read by who calls, and written and looked through by a thread of its own.

    Args:
        folder: is made, for its owner alone, as it has what users sent.
        most: bytes of all files.
    """

    def __init__(self, folder: Path, most: int) -> None:
        self._folder, self._most = folder, most
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._given: SimpleQueue[tuple[bytes, Embedding] | None] = SimpleQueue()
        self._keys: frozenset[bytes] = frozenset()
        self._look()
        self._thread = threading.Thread(target=self._work, name="penstock-embeddings", daemon=True)
        self._thread.start()

    def keys(self) -> frozenset[bytes]:
        return self._keys

    def read(self, digest: bytes) -> Embedding | None:
        """None where it is not there, or not what was written, which is deleted."""
        path = self._path(digest)
        try:
            data = path.read_bytes()
        except OSError:
            return None
        magic, checksum = HEAD.unpack_from(data) if len(data) >= HEAD.size else (b"", 0)
        found = Embedding(data[HEAD.size :], checksum)
        with suppress(OSError):
            if magic == MAGIC and found.whole:
                os.utime(path)
            else:
                path.unlink()
        return found if magic == MAGIC and found.whole else None

    def write(self, digest: bytes, embedding: Embedding) -> None:
        """Begin to write it, unless it is there or much waits to be written."""
        if self._given.qsize() < MOST_WAITING:
            self._given.put((digest, embedding))

    def close(self) -> None:
        """Return when all is written."""
        self._given.put(None)
        self._thread.join()

    def _path(self, digest: bytes) -> Path:
        return self._folder / digest.hex()

    def _work(self) -> None:
        while True:
            try:
                given = self._given.get(timeout=LOOK_EVERY)
            except Empty:
                self._look()
                continue
            if given is None:
                return
            with suppress(OSError):  # a full file system keeps nothing, and loses nothing
                self._write(*given)
            self._look()

    def _look(self) -> None:
        """What there is now; a folder that cannot be read has nothing."""
        found: set[bytes] = set()
        with suppress(OSError):
            for name in os.listdir(self._folder):
                with suppress(ValueError):  # it is not whole, or somebody else's
                    found.add(bytes.fromhex(name))
        if found != self._keys:
            self._keys = frozenset(found)

    def _write(self, digest: bytes, embedding: Embedding) -> None:
        path = self._path(digest)
        if path.exists():
            return
        self._make_room(HEAD.size + len(embedding.data))
        unfinished = path.with_name(f".{token_hex(8)}")
        try:
            with unfinished.open("wb") as file:
                file.write(HEAD.pack(MAGIC, embedding.checksum))
                file.write(embedding.data)
            unfinished.rename(path)
        finally:
            unfinished.unlink(missing_ok=True)

    def _make_room(self, size: int) -> None:
        files: list[tuple[float, int, Path]] = []
        for path in self._folder.iterdir():
            with suppress(OSError):  # somebody else has deleted it
                stat = path.stat()
                files.append((stat.st_mtime, stat.st_size, path))
        used = sum(size for _, size, _ in files)
        for _, own, path in sorted(files):
            if used + size <= self._most:
                break
            path.unlink(missing_ok=True)
            used -= own
