"""What a model makes of images, as bytes in the host's memory: an engine's own, from which other engines take it."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Protocol
from zlib import crc32

EMBEDDINGS = "embeddings"  # tier of a `CacheDelta`: digests of images


@dataclass(frozen=True, slots=True)
class Embedding:
    """Of one image or video.

    Attributes:
        data: [tokens, hidden], in the model's dtype.
        checksum: of that, from when it was made.
        seconds: that it took to make; 0 where nobody knows.
    """

    data: bytes
    checksum: int
    seconds: float = 0.0

    @classmethod
    def of(cls, data: bytes, seconds: float = 0.0) -> Embedding:
        return cls(data, crc32(data), seconds)

    @property
    def whole(self) -> bool:
        """Whether it is what was made."""
        return crc32(self.data) == self.checksum


class Below(Protocol):
    """A tier below an `EmbeddingCache`, which outlives it."""

    def read(self, digest: bytes) -> Embedding | None: ...
    def write(self, digest: bytes, embedding: Embedding) -> None: ...


class EmbeddingCache:
    """The embeddings that were used last, by their digest, in so many bytes.

    Args:
        below: has what was put here, by this engine and by others; None where nothing does.

    Attributes:
        found: how often one was here that was asked for.
    """

    def __init__(self, most: int, below: Below | None = None) -> None:
        self._most, self._bytes = most, 0
        self._below = below
        self._kept: OrderedDict[bytes, Embedding] = OrderedDict()
        self._added: dict[bytes, None] = {}
        self._removed: dict[bytes, None] = {}
        self.found = 0

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def used(self) -> int:
        """Bytes."""
        return self._bytes

    def keys(self) -> list[bytes]:
        return list(self._kept)

    def get(self, digest: bytes) -> Embedding | None:
        kept = self._kept.get(digest)
        if kept is None and self._below is not None and (kept := self._below.read(digest)) is not None:
            self._keep(digest, kept)
        if kept is not None:
            self.found += 1
        if digest in self._kept:
            self._kept.move_to_end(digest)
        return kept

    def put(self, digest: bytes, embedding: Embedding) -> None:
        """Keep it, and let go of those that were used longest ago; one that is larger than all is not kept."""
        if digest in self._kept:
            return
        self._keep(digest, embedding)
        if self._below is not None:
            self._below.write(digest, embedding)

    def _keep(self, digest: bytes, embedding: Embedding) -> None:
        if len(embedding.data) > self._most:
            return
        self._kept[digest] = embedding
        self._bytes += len(embedding.data)
        self._added[digest] = None
        self._removed.pop(digest, None)
        while self._bytes > self._most:
            oldest, gone = self._kept.popitem(last=False)
            self._bytes -= len(gone.data)
            self._added.pop(oldest, None)
            self._removed[oldest] = None

    def take_changes(self) -> tuple[list[bytes], list[bytes]]:
        """What has come and what has gone since the last call."""
        changes = list(self._added), list(self._removed)
        self._added, self._removed = {}, {}
        return changes

    def check(self) -> None:
        """Raise AssertionError unless what is kept is within its bounds."""
        assert self._bytes == sum(len(kept.data) for kept in self._kept.values()) <= self._most
        assert self._added.keys() <= self._kept.keys()
        assert not self._removed.keys() & self._kept.keys()
