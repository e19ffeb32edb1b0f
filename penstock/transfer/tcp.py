"""Blocks between engines that share no memory: their bytes travel, straight from the one pool and into the other."""

from __future__ import annotations

import ctypes

from penstock.core.layout import KVLayout
from penstock.core.wire.handoff import Push
from penstock.transfer.peer_link import ReceivedMessage
from penstock.transfer.pool import KVPool


class CopiedBlocks:
    """The checksum is made by the sender's engine when the block is full, and compared before it is copied in."""

    shares = False
    sockets = 4  # one for messages, the others for blocks
    pool_name = ""

    def __init__(self, pool: KVPool, layout: KVLayout) -> None:
        self._pool = pool
        self._records = pool.client.records if pool.client is not None else None
        self.payload_bytes = layout.block_bytes

    def stamp(self, block: int) -> tuple[int, int]:
        if self._records is None:
            return 0, self._pool.memory.checksum(block)
        record = self._records.get(block)
        if record is not None:  # of the use that the block is in: it was summed up when it was full
            return record.generation, record.checksum
        return self._records.generation(block), self._pool.memory.checksum(block)

    def payload(self, push: Push) -> memoryview | None:
        return self._pool.memory.block(push.block)

    def land(self, push: Push, arrival: ReceivedMessage, into: int) -> int | None:
        staged = arrival.payload
        if staged is None or staged.buffer is None or arrival.checksum != push.checksum:
            return None
        memory = self._pool.memory
        assert 0 <= into < memory.num_blocks
        if self._records is not None:
            self._records.clear(into)
        # memmove lets other threads run meanwhile
        source = (ctypes.c_char * memory.block_bytes).from_buffer(staged.buffer)
        ctypes.memmove(memory.address + into * memory.block_bytes, source, memory.block_bytes)
        return into
