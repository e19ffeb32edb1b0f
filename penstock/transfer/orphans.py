"""What failed instances have left in the host's KV pool, for those that can use it before their next incarnations do:
no bytes travel, a block only changes its holder."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count, takewhile
from time import monotonic

from penstock.core.errors import Unavailable
from penstock.kv.connector import Move, Moved
from penstock.transfer.finished import Finished
from penstock.transfer.pool import KVPool


class OrphanedBlocks:
    """A KV connector that finds blocks by key.

    A block's record and the checksum of its bytes are compared by a thread, before the KV pool server is asked for it:
    nobody writes to it meanwhile, or its generation is another one, and then the server refuses.
    """

    def __init__(self, pool: KVPool) -> None:
        assert pool.client is not None
        self._client, self._memory = pool.client, pool.memory
        self._handles = count(1)
        self._moves: dict[int, Sequence[Move]] = {}
        self._verified = Finished()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="transfer-verify")

    def find(self, keys: Sequence[bytes]) -> list[tuple[int, int] | None]:
        """The (block, generation) of each; None where there is none, or the KV pool server has gone."""
        try:
            return self._client.find(keys)
        except Unavailable:
            return [None] * len(keys)

    def pull(self, moves: Sequence[Move], source: None = None) -> int:
        handle = next(self._handles)
        self._moves[handle] = moves
        self._thread.submit(self._verify, handle, moves)
        return handle

    def _verify(self, handle: int, moves: Sequence[Move]) -> None:
        began = monotonic()
        try:
            slots = tuple(move.slot for move in takewhile(self._is_sound, moves))
            self._verified.put(Moved(handle, slots, monotonic() - began))
        except BaseException as error:
            self._verified.fail(error)

    def _is_sound(self, move: Move) -> bool:
        record = self._client.records.get(move.slot)
        if record is None or (record.key, record.generation) != (move.key, move.generation):
            return False
        return record.checksum == self._memory.checksum(move.slot)

    def poll(self) -> list[Moved]:
        return [self._take(moved) for moved in self._verified.take()]

    def _take(self, moved: Moved) -> Moved:
        """Become the holder of what is sound: all of it, or if somebody was quicker, what is left of it."""
        sound = self._moves.pop(moved.handle)[: len(moved.blocks)]
        taken = sound if self._hold(sound) else list(takewhile(lambda move: self._hold([move]), sound))
        return moved._replace(blocks=tuple(move.slot for move in taken))

    def _hold(self, moves: Sequence[Move]) -> bool:
        if not moves:
            return True
        try:
            return self._client.hold([(move.slot, move.generation) for move in moves], [move.block for move in moves])
        except Unavailable:
            return False

    def fileno(self) -> int:
        return self._verified.fileno()

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)
        self._verified.close()
