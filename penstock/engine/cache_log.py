"""What can be found in an engine's cache, for the master (`CacheLog`) and for the engine's next incarnation
(`PoolLedger`)."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

from penstock.kv.pool import Published

if TYPE_CHECKING:
    from penstock.transfer.pool import KVPool
    from penstock.transfer.records import Records


class CacheLog:
    """Additions and removals cancel each other, so the log is bounded by the cache's contents now and when last taken.

    Attributes:
        changed: whether there may be something to take.
    """

    def __init__(self) -> None:
        self.sequence = 0  # of the last one taken
        self.changed = False
        self._added: dict[bytes, None] = {}
        self._removed: dict[bytes, None] = {}

    def note(self, added: Collection[bytes], removed: Collection[bytes]) -> None:
        """Removals first, as a key may go and come again."""
        if not (added or removed):
            return
        for key in removed:
            if key in self._added:
                del self._added[key]
            else:
                self._removed[key] = None
        for key in added:
            if key in self._removed:
                del self._removed[key]
            else:
                self._added[key] = None
        self.changed = bool(self._added or self._removed)

    def take(self) -> tuple[list[bytes], list[bytes]] | None:
        """Added and removed since the last call, under the next number; None when nothing changed."""
        if not self.changed:
            return None
        self.sequence += 1
        changes = list(self._added), list(self._removed)
        self._added, self._removed, self.changed = {}, {}, False
        return changes


class PoolLedger:
    """The records of a shared pool, for later incarnations."""

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
    """None where blocks do not outlive the process."""
    return None if pool is None or pool.client is None else PoolLedger(pool, pool.client.records)
