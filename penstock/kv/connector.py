"""The KV connector: what moves blocks between an engine's memory and another place, beside the engine's thread.

The other place is a tier below the device (`engine.mover`) or a peer (`transfer.transports`). The engine starts a move,
goes on computing, and is told when it is over; whose thread carries the bytes, a socket's, a disk's, a copy engine's or
a foreign library's, is the connector's affair. Blocks are numbers here, so their memory may be a device's; a connector
is made over that memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeVar


class Move(NamedTuple):
    """One block of ours, and the place of its other copy.

    Attributes:
        slot: its number there, in a tier or in a peer's pool.
        key: its prefix key; empty when it is not full.
        generation, checksum: of the use and of the bytes that are meant; 0 where the place itself remembers them.
        parent: key of the block before it, without which its copy is of no use; empty without one, or BESIDE
            (`kv.groups.parent_of`).
    """

    block: int
    slot: int
    key: bytes
    generation: int = 0
    checksum: int = 0
    parent: bytes = b""


class Moved(NamedTuple):
    """A push or pull that is over: nothing writes to its blocks, or reads them, any longer.

    Attributes:
        handle: what `push` or `pull` returned.
        blocks: which have what was to be moved, of its moves from the first on. If they are fewer, the next one could
            not be moved or was not what was meant, and the contents of its block are void. After a push all or none.
            A pulled block may be another one than was given for it, which then belongs to somebody else.
        seconds: that it took, without the wait for its turn.
    """

    handle: int
    blocks: tuple[int, ...]
    seconds: float


SourceT_contra = TypeVar("SourceT_contra", contravariant=True)


class KVConnector(Protocol[SourceT_contra]):
    """Takes blocks over from somewhere. One thread, the engine's, calls it, and never waits in it.

    Until a move is over its blocks are the connector's: they may be written to at any time, and are not given to
    anybody else, whatever became of the request that they were for.
    """

    def pull(self, moves: Sequence[Move], source: SourceT_contra) -> int:
        """Begin to bring copies into our blocks, and to verify them. Returns a handle.

        Args:
            source: where they are.
        """
        ...

    def poll(self) -> list[Moved]:
        """What is over since the last call; each handle once."""
        ...

    def fileno(self) -> int:
        """Readable exactly as long as `poll` has something."""
        ...

    def close(self) -> None:
        """Move nothing any longer: what is under way is waited for, what has not begun is dropped. Idempotent."""
        ...


class KVTier(KVConnector[None], Protocol):
    """A connector to a place that keeps what it is given, and finds it by key."""

    def pull(self, moves: Sequence[Move], source: None = None) -> int: ...

    def push(self, moves: Sequence[Move]) -> int:
        """Begin to copy our blocks there. Returns a handle."""
        ...

    def ask(self, moves: Sequence[Move]) -> int:
        """Begin to find out how many of these it has, from the first on; only their keys count. Returns a handle, whose
        `Moved` has as many blocks. What it has may be gone, or spoiled, when it is pulled."""
        ...

    def settle(self) -> None:
        """Wait until nothing is under way. For the end, and for tests."""
        ...
