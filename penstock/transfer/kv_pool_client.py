"""An engine's client of the KV pool server: its share of the host's pool, and the blocks inherited from its previous
incarnation."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterable, Sequence
from graphlib import CycleError, TopologicalSorter
from typing import TypeVar

import msgspec

from penstock.core.errors import ConfigError, Unavailable
from penstock.core.layout import KVLayout
from penstock.core.wire.kv_pool import (
    READ_BYTES,
    Attach,
    Attached,
    BadFrame,
    Claim,
    Claimed,
    CountPool,
    Exchange,
    Exchanged,
    Find,
    Found,
    Held,
    Hold,
    KVPoolRefused,
    KVPoolReply,
    KVPoolRequest,
    MessageBuffer,
    PoolCounts,
    decode_reply,
    frame,
)
from penstock.transfer.memory import PoolMemory
from penstock.transfer.records import RECORD_BYTES, Record, Records

TIMEOUT = 10.0  # seconds; the KV pool server answers in microseconds, or it hangs
MAX_FDS = 2

Reply = TypeVar("Reply", bound=msgspec.Struct)

log = logging.getLogger("penstock.kv_pool")


class KVPoolClaim:
    """What an instance's previous incarnation left with the KV pool server, kept for the new one until it attaches or
    this is closed.

    Attributes:
        promised: bytes of the previous incarnation's quota; 0 when it was given up. The used part of them is inherited.

    Raises Unavailable when no KV pool server answers at `path`.
    """

    def __init__(self, path: str, instance: str, incarnation: int) -> None:
        self._instance, self._incarnation = instance, incarnation
        self._server = _ServerConnection(path)
        try:
            self.promised = self._server.ask(Claim(instance, incarnation), Claimed).promised
        except BaseException:
            self._server.close()
            raise

    def attach(self, layout: KVLayout, quota: int, weights: str = "") -> KVPoolClient:
        """See `KVPoolClient.attach` and, for `weights`, `Attach`. The place is the client's from then on, or closed."""
        request = Attach(self._instance, self._incarnation, layout, quota, weights=weights)
        try:
            attached = self._server.ask(request, Attached)
            memory, table = _map(self._server.take_fds(), attached.num_blocks, layout.block_bytes)
        except BaseException:
            self._server.close()
            raise
        client = KVPoolClient(self._server, memory, Records(table))
        try:
            client.inherit(attached.inherited)
        except BaseException:
            client.close()
            raise
        return client

    def close(self) -> None:
        self._server.close()


class KVPoolClient:
    """A `BlockSource` whose blocks outlive this process. For one thread.

    Attributes:
        memory: the pool's blocks, everybody's.
        records: what they contain. Clear a block's record before its bytes change; a block that is given up keeps its
            record, since others may hold it still.
        inherited: what the previous incarnation had published and is whole, children before parents; held from the
            start.
    """

    def __init__(self, server: _ServerConnection, memory: PoolMemory, records: Records) -> None:
        self._server = server
        self.memory = memory
        self.records = records
        self.inherited: list[Record] = []

    @classmethod
    def attach(cls, path: str, instance: str, incarnation: int, layout: KVLayout, quota: int) -> KVPoolClient:
        """Join the pool of this layout.

        Args:
            quota: blocks that this instance may hold at once, inherited ones included.

        Raises:
            ConfigError: the KV pool server refuses: another layout, no room for the quota, a name that is taken.
            Unavailable: no KV pool server answers at `path`.
        """
        return KVPoolClaim(path, instance, incarnation).attach(layout, quota)

    def exchange(self, give: Sequence[int], want: int) -> list[int]:
        """Give up some blocks, then lease `want` others, never fewer. Raises Unavailable when the server has gone."""
        return self._server.ask(Exchange(list(give), want), Exchanged).blocks

    def hold(self, blocks: Sequence[tuple[int, int]], give: Sequence[int]) -> bool:
        """Become one more holder of each (block, generation) and give up as many: all of it or nothing.

        False when one of them is no longer in that generation, or is held by this instance already. Raises Unavailable.
        """
        return self._server.ask(Hold(list(blocks), list(give)), Held).ok

    def find(self, keys: Sequence[bytes]) -> list[tuple[int, int] | None]:
        """The (block, generation) of each key, of what failed instances have left; None where there is none. Raises
        Unavailable."""
        return self._server.ask(Find(list(keys)), Found).blocks

    def status(self) -> PoolCounts:
        """See `pool_status`."""
        return self._server.ask(CountPool(), PoolCounts)

    def close(self) -> None:
        """Detach: published blocks wait for the next incarnation."""
        self._server.close()
        self.memory.close()
        self.records.close()

    def inherit(self, blocks: Sequence[int]) -> None:
        """Keep what is whole of these and give the others back. To be called once."""
        whole: dict[bytes, Record] = {}
        for block in blocks:
            record = self.records.get(block)
            if record is not None and record.checksum == self.memory.checksum(block):
                whole.setdefault(record.key, record)  # a second block of the same key is of no use
        self.inherited = leaves_first(whole)
        useless = set(blocks) - {record.block for record in self.inherited}
        if useless:
            log.warning("%d of %d inherited blocks are not whole and are given back", len(useless), len(blocks))
            self.exchange(sorted(useless), 0)


def pool_status(path: str) -> PoolCounts:
    """Counts of blocks by holder, after a check of every invariant; `broken` names a violated one.

    Raises Unavailable.
    """
    server = _ServerConnection(path)
    try:
        return server.ask(CountPool(), PoolCounts)
    finally:
        server.close()


def leaves_first(records: dict[bytes, Record]) -> list[Record]:
    """By key to in order: every block before its parent. None at all when they form a circle, which no writer makes."""
    order: TopologicalSorter[bytes] = TopologicalSorter()
    for key, record in records.items():
        order.add(key)
        order.add(record.parent, key)
    try:
        return [records[key] for key in order.static_order() if key in records]
    except CycleError:
        return []


class _ServerConnection:
    """Requests and their answers, in order, on one connection."""

    def __init__(self, path: str) -> None:
        self._received = MessageBuffer()
        self._fds: list[int] = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(TIMEOUT)
        self._path = path
        try:
            self._socket.connect(path)
        except OSError as error:
            self._socket.close()
            raise Unavailable(f"no KV pool server at {path}: {error}") from error

    def ask(self, request: KVPoolRequest, expected: type[Reply]) -> Reply:
        """Raises ConfigError when it is refused, Unavailable when no answer comes; the server is of no use then."""
        try:
            self._socket.sendall(frame(request))
            reply = self._receive(wants_fds=expected is Attached)
        except (OSError, BadFrame, msgspec.MsgspecError) as error:
            self.close()  # after a late answer no other one could be told from it
            raise Unavailable(f"the KV pool server at {self._path} has gone: {error}") from error
        if isinstance(reply, KVPoolRefused):
            raise ConfigError(f"kv-pool: {reply.message}")
        assert isinstance(reply, expected), reply
        return reply

    def take_fds(self) -> list[int]:
        """The descriptors that came with the last answers; they are the caller's to close."""
        fds, self._fds = self._fds, []
        return fds

    def close(self) -> None:
        self._socket.close()
        _close_all(self.take_fds())

    def _receive(self, wants_fds: bool) -> KVPoolReply:
        while (body := self._received.take()) is None:
            if wants_fds:
                data, fds, _, _ = socket.recv_fds(self._socket, READ_BYTES, MAX_FDS, socket.MSG_CMSG_CLOEXEC)
                self._fds += fds
            else:
                data = self._socket.recv(READ_BYTES)
            if not data:
                raise ConnectionResetError("it closed the connection")
            self._received.feed(data)
        reply: KVPoolReply = decode_reply(body)
        return reply


def _map(fds: Sequence[int], num_blocks: int, block_bytes: int) -> tuple[PoolMemory, PoolMemory]:
    """(blocks, table of records). Raises Unavailable."""
    if len(fds) != MAX_FDS:
        _close_all(fds)
        raise Unavailable(f"the KV pool server sent {len(fds)} descriptors, {MAX_FDS} were expected")
    try:
        memory = PoolMemory(fds[0], num_blocks, block_bytes)
    except BaseException:
        _close_all(fds)
        raise
    try:
        return memory, PoolMemory(fds[1], num_blocks, RECORD_BYTES)
    except BaseException:
        memory.close()
        _close_all(fds[1:])
        raise


def _close_all(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)
