"""Blocks between engines of one host: both map the same pool, so a pull only changes who holds a block."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from time import monotonic

from penstock.core.errors import ConfigError
from penstock.core.layout import KVLayout
from penstock.kv.connector import Move, Moved
from penstock.transfer.finished import Finished
from penstock.transfer.peer_link import ReceivedMessage
from penstock.transfer.pool import KVPool


class SharedBlocks:
    """No bytes travel. The generation proves that a block is still in the use that was pushed."""

    shares = True
    sockets = 1
    payload_bytes = 0
    memory = ""

    def __init__(self, pool: KVPool, layout: KVLayout, address: str = "") -> None:
        self._num_blocks = pool.memory.num_blocks
        if pool.client is None:
            raise ConfigError("transport: shared, needs a KV pool server; allowed without one: tcp", "transport")
        self._client = pool.client
        self.pool_name = pool.name
        self._handles = count(1)
        self._finished = Finished()

    def stamp(self, block: int) -> tuple[int, int]:
        return self._client.records.generation(block), 0

    def payload(self, block: int) -> memoryview | None:
        return None

    def pull(self, moves: Sequence[Move], source: ReceivedMessage) -> int:
        """Over when it returns. Raises Unavailable when the KV pool server is lost."""
        began, handle = monotonic(), next(self._handles)
        taken = all(map(self._is_what_it_says, moves)) and self._client.hold(
            [(move.slot, move.generation) for move in moves], [move.block for move in moves]
        )
        self._finished.put(Moved(handle, tuple(move.slot for move in moves if taken), monotonic() - began))
        return handle

    def _is_what_it_says(self, move: Move) -> bool:
        if not 0 <= move.slot < self._num_blocks:
            return False
        # no record when the sender does not cache prefixes; the generation alone proves the use then
        record = self._client.records.get(move.slot) if move.key else None
        return record is None or record.key == move.key

    def poll(self) -> list[Moved]:
        return self._finished.take()

    def fileno(self) -> int:
        return self._finished.fileno()

    def close(self) -> None:
        self._finished.close()
