"""An engine's KV pool: memory of its own, or a share of the KV pool server's."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from penstock.core.layout import KVLayout
from penstock.kv.pool import Published
from penstock.transfer.memory import PoolMemory

if TYPE_CHECKING:  # an engine on its own needs neither msgspec nor xxhash
    from penstock.transfer.kv_pool_client import KVPoolClaim, KVPoolClient
    from penstock.transfer.records import Record, Records


@dataclass
class KVPool:
    """The blocks of one engine.

    Attributes:
        memory: has room for more blocks than are ours.
        blocks: ours, with nothing in them.
        inherited: ours too, with what the previous incarnation computed, children before parents; not in `blocks`.
        client: where blocks can be exchanged for others; None when the memory is private.
    """

    memory: PoolMemory
    blocks: list[int]
    inherited: list[Record] = field(default_factory=list)
    client: KVPoolClient | None = None

    @property
    def name(self) -> str:
        """The same in every process that maps this memory, and in no other; "" when no other does."""
        if self.client is None:
            return ""
        memory = os.fstat(self.memory.fd)
        return f"{memory.st_dev}:{memory.st_ino}"

    def close(self) -> None:
        """Release everything."""
        if self.client is not None:
            self.client.close()
        else:
            self.memory.close()


class Stamps:
    """What identifies a block's contents to a peer that copies them: the generation of its use, and its checksum."""

    def __init__(self, pool: KVPool) -> None:
        self._memory = pool.memory
        self._records = pool.client.records if pool.client is not None else None

    def of(self, block: int) -> tuple[int, int]:
        """(generation, checksum), to be taken when it is complete."""
        if self._records is None:
            return 0, self._memory.checksum(block)
        record = self._records.get(block)
        if record is not None:  # of the use that the block is in: it was summed up when it was full
            return record.generation, record.checksum
        return self._records.generation(block), self._memory.checksum(block)

    def forget(self, block: int) -> None:
        """Its bytes are about to change."""
        if self._records is not None:
            self._records.clear(block)


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


# (layout, quota in blocks) -> pool of that many, inherited ones included
OpenPool = Callable[[KVLayout, int], KVPool]


def memfd_pool(layout: KVLayout, quota: int) -> KVPool:
    """A pool that ends with its process."""
    return KVPool(PoolMemory.memfd(quota, layout.block_bytes), list(range(quota)))


def anonymous_pool(layout: KVLayout, quota: int) -> KVPool:
    """The same of memory that lies in one place only: no virtual range has its blocks."""
    return KVPool(PoolMemory.anonymous(quota, layout.block_bytes), list(range(quota)))


def pool_over(fd: int) -> OpenPool:
    """Opens a pool over a memfd that another process has made for it, and maps too."""

    def opened(layout: KVLayout, quota: int) -> KVPool:
        return KVPool(PoolMemory(fd, quota, layout.block_bytes), list(range(quota)))

    return opened


@dataclass(frozen=True)
class SharedPool:
    """Opens the pool of one incarnation of an instance, once, at the KV pool server. An `OpenPool`.

    Calling it raises ConfigError, Unavailable.

    Attributes:
        weights: see `Attach`.
    """

    place: KVPoolClaim
    weights: str = ""

    @property
    def promised(self) -> int:
        """Bytes that need not be free on this machine for a pool of that size; see `KVPoolClaim`."""
        return self.place.promised

    def __call__(self, layout: KVLayout, quota: int) -> KVPool:
        client = self.place.attach(layout, quota, self.weights)
        try:
            blocks = client.exchange([], quota - len(client.inherited))
        except BaseException:
            client.close()
            raise
        return KVPool(client.memory, blocks, client.inherited, client)


def shared_pool(path: str, instance: str, incarnation: int) -> SharedPool:
    """A pool at the KV pool server at `path`, for one incarnation of an instance. Raises Unavailable.

    To be called before a model is loaded: the inherited blocks are kept from now on, however long loading takes.
    """
    from penstock.transfer.kv_pool_client import KVPoolClaim

    return SharedPool(KVPoolClaim(path, instance, incarnation))
