"""KV blocks that are kept elsewhere, for every engine that computes with the same model: put, found and got by key.

A store is a `Backend`, which keeps records under keys, and what all of them share, here. A record is a page that says
what the block is, and the block:

    magic, format, length, namespace, key, checksum    64 bytes, and zeros up to a page
    block                                              and zeros up to a page

so nothing is believed but what was put, whatever a backend brings. Records are made and received in memory of the
store's own, of which the caller's blocks are copies: a call that hangs may write to it at any later time.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from hashlib import blake2b
from math import ceil
from time import monotonic
from typing import Protocol, TypeVar

from penstock.core.errors import Unavailable
from penstock.kv.keys import KEY_BYTES
from penstock.transfer.bounded import Crew
from penstock.transfer.memory import PAGE, PoolMemory, checksum_of, copy_bytes

T = TypeVar("T")
log = logging.getLogger("penstock.transfer")
MAGIC, FORMAT = b"penstock", 1
KIND, CHECK = struct.Struct("<8sQQ16s"), struct.Struct("<Q")  # magic, format, length, namespace; the key is between
HEAD_BYTES = KIND.size + KEY_BYTES + CHECK.size
STAGED_BYTES, MOST_STAGED = 64 << 20, 32  # of blocks that are copied at once
FIRST_LOOK, LONGEST_LOOK = 16, 512  # keys that are looked for at once
COMPLAIN_EVERY = 60.0  # seconds


class Backend(Protocol):
    """Where records lie. A call may take as long as it likes, but is not waited for so long. An OSError or Unavailable
    says that the place cannot be reached now; that a record is not there, or does not fit, is no error.

    Attributes:
        threads: that may call it at once.
        batch: records that a call of `write` or `read` is given at most.
    """

    threads: int
    batch: int

    def open(self, memory: PoolMemory) -> None:
        """Begin. All records to come are blocks of this memory. Raises ConfigError when the place cannot be used."""
        ...

    def write(self, keys: Sequence[bytes], slots: Sequence[int]) -> Sequence[bool]:
        """Keep blocks of the memory, each whole or not at all; which ones are there now, from before too."""
        ...

    def read(self, keys: Sequence[bytes], slots: Sequence[int]) -> Sequence[bool]:
        """Fill blocks of the memory; which ones came, in their full size."""
        ...

    def has(self, keys: Sequence[bytes]) -> Sequence[bool]: ...

    def drop(self, key: bytes) -> None:
        """What came of this is not what was put. It may have been put anew meanwhile."""
        ...

    def close(self) -> None: ...


class BlockStore:
    """Blocks of `block_bytes` bytes each, by key. One thread calls it, and is blocked for `seconds` at most where the
    store stands still; while it gets on, for no more than so long for each 64 MB.

    Its methods raise Unavailable when nothing is known of what was asked, because the store cannot be reached. They
    may be called again at any time: a store that is back works.

    Args:
        name: of the place, for messages.
        namespace: tells blocks of one kind, such as a model's, from all others; letters, digits and dashes.

    Attributes:
        spoiled: blocks that came, and were not what was put.

    Raises:
        ConfigError: the place cannot be used.
        Unavailable: it cannot be reached now.
    """

    def __init__(self, backend: Backend, name: str, namespace: str, block_bytes: int, seconds: float) -> None:
        assert namespace.replace("-", "").isalnum(), namespace
        self.block_bytes = block_bytes
        self.spoiled = 0
        self._backend, self._name = backend, name
        self._kind = KIND.pack(MAGIC, FORMAT, block_bytes, blake2b(namespace.encode(), digest_size=16).digest())
        size = PAGE + ceil(block_bytes / PAGE) * PAGE
        self._memory = PoolMemory.anonymous(max(1, min(MOST_STAGED, STAGED_BYTES // size)), size)
        self._crew = Crew(name, backend.threads, seconds)
        self._complain_at = 0.0
        self._closed = False
        try:
            self._run([partial(backend.open, self._memory)])
        except BaseException:
            self.close()
            raise

    def put(self, blocks: Sequence[tuple[bytes, memoryview]]) -> Sequence[bool]:
        """Keep these blocks, (key, bytes). Each is kept whole or not at all: which ones are there now.

        False says that a block was not kept, as where the store is full; the last ones also that it stopped answering.
        """
        kept: list[bool] = []
        for group in self._groups(blocks):
            try:
                kept += self._put(group)
            except Unavailable:
                if not kept:
                    raise
                break
        return kept + [False] * (len(blocks) - len(kept))

    def get(self, blocks: Sequence[tuple[bytes, memoryview]]) -> int:
        """Fill these buffers, (key, buffer). Returns how many have their blocks, verified, from the first on; the rest
        is as it was."""
        count = 0
        for group in self._groups(blocks):
            try:
                came = self._get(group)
            except Unavailable:
                if not count:
                    raise
                break
            count += came
            if came < len(group):
                break
        return count

    def contains(self, keys: Sequence[bytes]) -> int:
        """How many of these there are, from the first on. One may be gone, or spoiled, when it is asked for."""
        count, look = 0, FIRST_LOOK
        while count < len(keys):
            asked = keys[count : count + look]
            share = ceil(len(asked) / self._backend.threads)
            there = self._each(self._backend.has, share, asked)
            if False in there:
                return count + there.index(False)
            count, look = count + len(asked), min(2 * look, LONGEST_LOOK)
        return count

    def close(self) -> None:
        """Idempotent."""
        if self._closed:
            return
        self._closed = True
        with suppress(Unavailable):
            self._run([self._backend.close])
        self._crew.close()
        if not self._crew.is_stuck:
            self._memory.close()

    # --- records

    def _put(self, group: Sequence[tuple[bytes, memoryview]]) -> list[bool]:
        for slot, (key, data) in enumerate(group):
            assert len(data) == self.block_bytes
            record = self._memory.block(slot)
            copy_bytes(data, self._block(slot))
            record[:HEAD_BYTES] = self._head(key, checksum_of(self._block(slot)))
        return self._each(self._backend.write, self._backend.batch, [key for key, _ in group], range(len(group)))

    def _get(self, group: Sequence[tuple[bytes, memoryview]]) -> int:
        came = self._each(self._read, self._backend.batch, [key for key, _ in group], range(len(group)))
        count = came.index(False) if False in came else len(came)
        for slot, (_, buffer) in enumerate(group[:count]):
            copy_bytes(self._block(slot), buffer)
        return count

    def _read(self, keys: Sequence[bytes], slots: Sequence[int]) -> list[bool]:
        came = self._backend.read(keys, slots)
        return [there and self._is_whole(key, slot) for there, key, slot in zip(came, keys, slots, strict=True)]

    def _is_whole(self, key: bytes, slot: int) -> bool:
        if self._memory.block(slot)[:HEAD_BYTES] == self._head(key, checksum_of(self._block(slot))):
            return True
        self.spoiled += 1
        self._complain("%s: a block is not what was put: what it held is computed again", self._name)
        self._backend.drop(key)
        return False

    def _head(self, key: bytes, checksum: int) -> bytes:
        assert len(key) == KEY_BYTES
        return self._kind + key + CHECK.pack(checksum)

    def _block(self, slot: int) -> memoryview:
        return self._memory.block(slot)[PAGE : PAGE + self.block_bytes]

    # --- calls

    def _groups(self, blocks: Sequence[tuple[bytes, memoryview]]) -> Iterator[Sequence[tuple[bytes, memoryview]]]:
        """As many as are staged at once."""
        for first in range(0, len(blocks), self._memory.num_blocks):
            yield blocks[first : first + self._memory.num_blocks]

    def _each(self, call: Callable[..., Sequence[bool]], size: int, *columns: Sequence[object]) -> list[bool]:
        """Make a call for every `size` items of columns, beside each other, and join the results."""
        pieces = [[column[i : i + size] for column in columns] for i in range(0, len(columns[0]), size)]
        return [one for results in self._run([partial(call, *piece) for piece in pieces]) for one in results]

    def _run(self, calls: Sequence[Callable[[], T]]) -> list[T]:
        try:
            return self._crew.run(calls)
        except OSError as error:
            raise Unavailable(f"{self._name} fails: {error.strerror or error}") from error

    def _complain(self, message: str, *args: object) -> None:
        """Log a warning, rate-limited."""
        if monotonic() >= self._complain_at:
            self._complain_at = monotonic() + COMPLAIN_EVERY
            log.warning(message, *args)
