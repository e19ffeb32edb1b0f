"""What blocks hold, written where it outlives the engine (`penstock.transfer.records`)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from penstock.kv.pool import Published

if TYPE_CHECKING:
    from penstock.transfer.pool import KVPool
    from penstock.transfer.records import Records


class PoolLedger:
    """The records of a pool that other lives can attach to."""

    def __init__(self, pool: KVPool, records: Records) -> None:
        self._memory = pool.memory
        self._records = records

    def clear(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._records.clear(block)

    def write(self, published: Published) -> None:
        known = self._records.get(published.block)
        if known is None or known.key != published.key:  # else another instance wrote the block and its record
            checksum = self._memory.checksum(published.block)
            self._records.put(published.block, published.key, published.parent, checksum)


def ledger_of(pool: KVPool | None) -> PoolLedger | None:
    """None where blocks end with the process."""
    return None if pool is None or pool.client is None else PoolLedger(pool, pool.client.records)
