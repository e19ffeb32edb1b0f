"""A modelled device's tier: copies digests, in the time that their KV would take."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from penstock.core.plan import BLOCK_TOKENS
from penstock.engine.mover import SlotMover
from penstock.kv.connector import Move
from penstock.sched.steptime import StepTime
from penstock.transfer.memory import PoolMemory

log = logging.getLogger("penstock.engine")


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


def open_modelled_tier(memory: PoolMemory, num_slots: int, times: StepTime) -> SlotMover:
    """What carries blocks between a pool and so many slots.

    Args:
        times: what KV takes on its way.
    """
    block_bytes = times.shape.block_bytes
    log.info("%d blocks (%.0f MiB) of copies in the host's memory", num_slots, num_slots * block_bytes / 2**20)
    return SlotMover(ModelledSlots(memory, num_slots, seconds=times.load_blocks_ms(1) / 1e3, block_bytes=block_bytes))
