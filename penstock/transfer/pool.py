"""Where an engine's KV blocks come from: memory of its own, or a share of the keeper's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from penstock.core.layout import KVLayout
from penstock.transfer.memory import PoolMemory

if TYPE_CHECKING:  # an engine on its own needs neither msgspec nor xxhash
    from penstock.transfer.keeper_client import KeeperClient, Place
    from penstock.transfer.records import Record


@dataclass
class Pool:
    """The blocks of one engine.

    Attributes:
        memory: has room for more blocks than are ours.
        blocks: ours, with nothing in them.
        inherited: ours too, with what a previous life computed, children before parents; not in `blocks`.
        keeper: where blocks can be exchanged for others; None when nobody shares the memory.
    """

    memory: PoolMemory
    blocks: list[int]
    inherited: list[Record] = field(default_factory=list)
    keeper: KeeperClient | None = None

    def close(self) -> None:
        """Let go of everything."""
        if self.keeper is not None:
            self.keeper.close()
        else:
            self.memory.close()


# (layout, quota in blocks) -> pool of that many, inherited ones included
OpenPool = Callable[[KVLayout, int], Pool]


def private_pool(layout: KVLayout, quota: int) -> Pool:
    """A pool that ends with its process."""
    return Pool(PoolMemory.private(quota, layout.block_bytes), list(range(quota)))


def unshared_pool(layout: KVLayout, quota: int) -> Pool:
    """The same of memory that lies in one place only: no virtual range has its blocks."""
    return Pool(PoolMemory.unshared(quota, layout.block_bytes), list(range(quota)))


@dataclass(frozen=True)
class KeeperPool:
    """Opens the pool of one life of an instance, once, with the keeper. An `OpenPool`.

    Calling it raises ConfigError, Unavailable.
    """

    place: Place

    @property
    def promised(self) -> int:
        """Bytes that need not be free on this machine for a pool of that size; see `Place`."""
        return self.place.promised

    def __call__(self, layout: KVLayout, quota: int) -> Pool:
        keeper = self.place.attach(layout, quota)
        try:
            blocks = keeper.exchange([], quota - len(keeper.inherited))
        except BaseException:
            keeper.close()
            raise
        return Pool(keeper.memory, blocks, keeper.inherited, keeper)


def keeper_pool(path: str, instance: str, incarnation: int) -> KeeperPool:
    """A pool with the keeper at `path`, for one life of an instance. Raises Unavailable.

    To be called before a model is loaded: what the life before left is kept from now on, however long loading takes.
    """
    from penstock.transfer.keeper_client import Place

    return KeeperPool(Place(path, instance, incarnation))
