"""A modelled device's tiers: digests are copied, in the time that their KV would take."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from penstock.core.layout import KVLayout
from penstock.core.plan import BLOCK_TOKENS
from penstock.engine.mover import PIECE, Copier, Mover, SlotMover
from penstock.engine.remote_tier import PIECE_BYTES, RemoteTier, name_of, namespace_of, open_copier
from penstock.kv.connector import Move
from penstock.transfer.memory import PoolMemory

log = logging.getLogger("penstock.engine")
DIGEST_BYTES = 8 * BLOCK_TOKENS  # of a block


class ModelledSlots:
    """`Slots` for digests of a pool.

    Args:
        memory: the pool; each block begins with BLOCK_TOKENS digests of 8 bytes.
        seconds: that a block takes, one way.
        block_bytes: of KV that a block stands for.
        sleep: lets so many seconds pass.
    """

    def __init__(
        self,
        memory: PoolMemory,
        num_slots: int,
        *,
        seconds: float,
        block_bytes: int,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.block_bytes = block_bytes
        words = np.frombuffer(memory.buffer, dtype=np.uint64).reshape(memory.num_blocks, -1)
        self._blocks = words[:, :BLOCK_TOKENS]
        self._slots = np.zeros((num_slots, BLOCK_TOKENS), dtype=np.uint64)
        self._seconds, self._sleep = seconds, sleep

    # both copy at the last moment, so that a block or slot that changes too early is detected

    def store(self, moves: Sequence[Move]) -> Sequence[memoryview]:
        self._sleep(self._seconds * len(moves))
        for block, slot, *_ in moves:
            self._slots[slot] = self._blocks[block]
        return [self.content(move.slot) for move in moves]

    def load(self, moves: Iterable[Move]) -> int:
        moves = list(moves)
        self._sleep(self._seconds * len(moves))
        for block, slot, *_ in moves:
            self._blocks[block] = self._slots[slot]
        return len(moves)

    def content(self, slot: int) -> memoryview:
        return self._slots[slot].data

    def close(self) -> None:
        del self._blocks


class Digests:
    """The `BlockViews` of a pool of digests, where they are."""

    block_bytes, most = DIGEST_BYTES, 1 << 30

    def __init__(self, memory: PoolMemory) -> None:
        self._memory = memory

    def of(self, blocks: Sequence[int]) -> list[memoryview]:
        return [self._memory.block(block)[:DIGEST_BYTES] for block in blocks]

    into = of

    def arrived(self, blocks: Sequence[int]) -> None:
        """They are."""

    def close(self) -> None:
        """Nothing to let go of."""


class PacedCopier:
    """A `Copier` of digests: what it copies takes as long as by itself, or as KV would if that is longer.

    Args:
        seconds: that a block of KV takes, one way.
        block_bytes: of KV that a block stands for.
        sleep: lets so many seconds pass.
    """

    def __init__(
        self, copier: Copier, *, seconds: float, block_bytes: int, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self.block_bytes = block_bytes
        self.piece = max(1, PIECE_BYTES // block_bytes)
        self._copier, self._seconds, self._sleep = copier, seconds, sleep

    @property
    def away(self) -> bool:
        return self._copier.away

    @property
    def full(self) -> bool:
        return self._copier.full

    def store(self, moves: Sequence[Move]) -> None:
        began = time.monotonic()
        self._copier.store(moves)
        self._rest(began, len(moves))

    def load(self, moves: Sequence[Move]) -> int:
        began = time.monotonic()
        good = self._copier.load(moves)
        self._rest(began, good)
        return good

    def find(self, moves: Sequence[Move]) -> int:
        return self._copier.find(moves)

    def close(self) -> None:
        self._copier.close()

    def _rest(self, began: float, blocks: int) -> None:
        self._sleep(max(0.0, began + self._seconds * blocks - time.monotonic()))


def open_modelled_tier(
    memory: PoolMemory, num_slots: int, *, seconds: float, block_bytes: int, where: str, piece: int = PIECE
) -> SlotMover:
    """What carries blocks between a pool and so many slots.

    Args:
        seconds, block_bytes: see `ModelledSlots`.
        where: for the log.
        piece: see `mover.Copier`.
    """
    log.info("%d blocks (%.0f MiB) of copies %s", num_slots, num_slots * block_bytes / 2**20, where)
    return SlotMover(ModelledSlots(memory, num_slots, seconds=seconds, block_bytes=block_bytes), piece=piece)


def open_modelled_store(
    memory: PoolMemory, url: str, layout: KVLayout, *, seconds: float, block_bytes: int
) -> RemoteTier:
    """What carries blocks between a pool and a store that engines share, which has their digests. Where it is away it
    is tried again when it is needed. Raises ConfigError when it cannot be used.

    Args:
        layout: of the pool.
        seconds, block_bytes: see `PacedCopier`.
    """
    namespace = namespace_of(layout)
    copier = PacedCopier(open_copier(Digests(memory), url, namespace), seconds=seconds, block_bytes=block_bytes)
    if not copier.away:
        log.info("copies in %s as %s, a block of KV takes %.2f ms", url, namespace, seconds * 1e3)
    return RemoteTier(Mover(copier), name_of(url, namespace), seconds)
