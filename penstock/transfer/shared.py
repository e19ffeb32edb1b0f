"""Blocks between engines of one host: both map the same pool, so a push only changes who holds a block."""

from __future__ import annotations

import os

from penstock.core.errors import ConfigError
from penstock.core.layout import KVLayout
from penstock.core.wire.handoff import Push
from penstock.transfer.peer_link import ReceivedMessage
from penstock.transfer.pool import KVPool


class SharedBlocks:
    """No bytes travel. The generation proves that a block is still in the use that was pushed."""

    shares = True
    sockets = 1
    payload_bytes = 0

    def __init__(self, pool: KVPool, layout: KVLayout) -> None:
        self._num_blocks = pool.memory.num_blocks
        if pool.client is None:
            raise ConfigError("transport: shared, needs a KV pool server; allowed without one: tcp", "transport")
        self._client = pool.client
        memory = os.fstat(pool.memory.fd)
        self.pool_name = f"{memory.st_dev}:{memory.st_ino}"  # the memfd's, the same in every process that maps it

    def stamp(self, block: int) -> tuple[int, int]:
        return self._client.records.generation(block), 0

    def payload(self, push: Push) -> memoryview | None:
        return None

    def land(self, push: Push, arrival: ReceivedMessage, into: int) -> int | None:
        if not 0 <= push.block < self._num_blocks:
            return None
        if push.key:
            record = self._client.records.get(push.block)
            # none when the sender does not cache prefixes; the generation alone proves the use then
            if record is not None and record.key != push.key:
                return None
        return push.block if self._client.hold([(push.block, push.generation)], [into]) else None
