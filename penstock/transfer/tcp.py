"""Blocks between engines that share no memory: their bytes travel with the message that pushes them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from time import monotonic

from penstock.core.layout import KVLayout
from penstock.kv.connector import Move, Moved
from penstock.transfer.finished import Finished
from penstock.transfer.peer_link import ReceivedMessage
from penstock.transfer.pool import KVPool, Stamps


class CopiedBlocks:
    """The checksum is made by the sender's engine when the block is full, and compared before it is copied in."""

    shares = False
    sockets = 4  # one for messages, the others for blocks
    pool_name = memory = ""

    def __init__(self, pool: KVPool, layout: KVLayout, address: str = "") -> None:
        self._memory = pool.memory
        self._stamps = Stamps(pool)
        self.stamp = self._stamps.of
        self.payload_bytes = layout.block_bytes
        self._handles = count(1)
        self._finished = Finished()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="transfer-copy")

    def payload(self, block: int) -> memoryview | None:
        return self._memory.block(block)

    def pull(self, moves: Sequence[Move], source: ReceivedMessage) -> int:
        handle = next(self._handles)
        (move,) = moves  # a message brings one block
        self._stamps.forget(move.block)
        self._thread.submit(self._copy, handle, move, source)
        return handle

    def _copy(self, handle: int, move: Move, source: ReceivedMessage) -> None:
        began, staged = monotonic(), source.payload
        blocks: tuple[int, ...] = ()
        try:
            if staged is not None:
                if staged.buffer is not None and source.checksum == move.checksum:
                    self._write(move.block, staged.buffer)
                    blocks = (move.block,)
                staged.release()
            self._finished.put(Moved(handle, blocks, monotonic() - began))
        except BaseException as error:
            self._finished.fail(error)

    def _write(self, block: int, data: bytearray) -> None:
        size = self._memory.block_bytes
        assert 0 <= block < self._memory.num_blocks
        # memmove lets other threads run meanwhile
        ctypes.memmove(self._memory.address + block * size, (ctypes.c_char * size).from_buffer(data), size)

    def poll(self) -> list[Moved]:
        return self._finished.take()

    def fileno(self) -> int:
        return self._finished.fileno()

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)
        self._finished.close()
