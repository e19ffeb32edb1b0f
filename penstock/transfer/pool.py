"""Where an engine's KV blocks come from: memory of its own, or a share of the keeper's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from penstock.core.layout import KVLayout
from penstock.transfer.memory import PoolMemory

if TYPE_CHECKING:  # an engine on its own needs neither msgspec nor xxhash
    from penstock.transfer.keeper_client import KeeperClient
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


def keeper_pool(path: str, instance: str, incarnation: int) -> OpenPool:
    """Pools with the keeper at `path`, for one life of an instance. Opening one raises ConfigError, Unavailable."""

    def open_pool(layout: KVLayout, quota: int) -> Pool:
        from penstock.transfer.keeper_client import KeeperClient

        keeper = KeeperClient.attach(path, instance, incarnation, layout, quota)
        try:
            blocks = keeper.exchange([], quota - len(keeper.inherited))
        except BaseException:
            keeper.close()
            raise
        return Pool(keeper.memory, blocks, keeper.inherited, keeper)

    return open_pool
