"""What a model makes of images, as bytes: in an engine's memory and in a tier below. Other engines take it there."""

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
    """A tier below an `EmbeddingCache`, which outlives it, and is shared with others."""

    def read(self, digest: bytes) -> Embedding | None: ...
    def write(self, digest: bytes, embedding: Embedding) -> None: ...
    def keys(self) -> frozenset[bytes]:
        """What it has, as known lately; the same object as long as that has not changed."""
        ...


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
        self._touched: set[bytes] = set()  # what has come or gone since that was told
        self._told: set[bytes] = set()
        self._known: frozenset[bytes] = frozenset()  # what was below when it was told
        self.found = 0

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def used(self) -> int:
        """Bytes."""
        return self._bytes

    def keys(self) -> list[bytes]:
        """What was here or below at the last `take_changes`."""
        return list(self._told)

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
        self._touched.add(digest)
        while self._bytes > self._most:
            oldest, gone = self._kept.popitem(last=False)
            self._bytes -= len(gone.data)
            self._touched.add(oldest)

    def take_changes(self) -> tuple[list[bytes], list[bytes]]:
        """What has come, here or below, and what has gone from both, since the last call."""
        if self._below is not None and (known := self._below.keys()) is not self._known:
            self._touched |= known ^ self._known
            self._known = known
        there = {digest for digest in self._touched if digest in self._kept or digest in self._known}
        added, removed = there - self._told, (self._touched - there) & self._told
        self._told = (self._told | added) - removed
        self._touched.clear()
        return list(added), list(removed)

    def check(self) -> None:
        """Raise AssertionError unless what is kept is within its bounds, and told of."""
        assert self._bytes == sum(len(kept.data) for kept in self._kept.values()) <= self._most
        assert self._told ^ (self._kept.keys() | self._known) <= self._touched
