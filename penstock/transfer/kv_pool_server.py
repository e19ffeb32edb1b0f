"""The KV pool server: owns the KV pools of a host, so that blocks outlive the engines that wrote them.

One thread, one Unix socket, one connection per attached instance. The end of a connection is the end of that
incarnation: its published blocks wait for the next one, all others are free at once. They wait for a limited time, or
until an incarnation that has claimed them has attached.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
from collections import deque
from collections.abc import Callable, Container, Mapping, Sequence

import msgspec

from penstock.core.clock import Clock, SystemClock
from penstock.core.errors import ConfigError
from penstock.core.layout import KVLayout
from penstock.core.wire import PROTOCOL
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
    decode_request,
    frame,
)
from penstock.kv.depot import Depot
from penstock.transfer.addresses import NO_ROOM, remove_stale
from penstock.transfer.memory import PAGE, PoolMemory
from penstock.transfer.records import RECORD_BYTES, Records

POOL_BYTES = 1 << 40  # address space of a pool at most; memory is used only where it was written
POOL_BLOCKS = 1 << 20  # blocks of a pool at most
MAX_CLIENTS = 512
TICK = 0.5  # seconds between two checks for expired blocks

log = logging.getLogger("penstock.kv_pool")


class BadRequest(ValueError):
    """An invalid request."""


class HostPool:
    """The blocks of one layout: who holds them, their memory, and what they contain.

    Args:
        num_blocks: room for so many.
        orphan_seconds: how long a failed instance's blocks wait for its next incarnation.
    """

    def __init__(self, layout: KVLayout, num_blocks: int, orphan_seconds: float) -> None:
        self.layout = layout
        self.depot = Depot(num_blocks)
        self.memory = PoolMemory.memfd(num_blocks, layout.block_bytes)
        try:
            self._table = PoolMemory.memfd(num_blocks, RECORD_BYTES)
        except OSError:
            self.memory.close()
            raise
        self.records = Records(self._table)
        self.fds = [self.memory.fd, self._table.fd]
        self._orphan_seconds = orphan_seconds
        self._orphaned_until: dict[str, float] = {}  # failed instance -> time
        self._left: dict[str, dict[bytes, int]] = {}  # what these left by key, of those that were looked for
        self._weights: dict[str, str] = {}  # by instance, see `Attach`

    def attach(self, name: str, incarnation: int, quota: int, weights: str = "") -> list[int]:
        """Attach an incarnation; returns the inherited blocks. Raises ConfigError."""
        inherited = self.depot.attach(name, incarnation, quota)
        if self._weights.get(name, weights) != weights:
            self.depot.drop(name, inherited)
            inherited = []
        self._weights[name] = weights
        self._orphaned_until.pop(name, None)
        self._left.pop(name, None)
        for block in inherited:
            record = self.records.get(block)
            self.records.begin(block, self.depot.generation(block))
            if record is not None:
                self.records.put(block, record.key, record.parent, record.checksum)
        self._trim()
        return inherited

    def exchange(self, name: str, give: Sequence[int], want: int) -> list[int]:
        if not self.depot.holds(name, give):
            raise BadRequest("it gives up what it does not hold")
        if not 0 <= want <= self.depot.room(name) + len(give):
            raise BadRequest(f"it wants {want} blocks and has room for {self.depot.room(name) + len(give)}")
        self.depot.drop(name, give)
        blocks = self.depot.lease(name, want)
        for block in blocks:
            self.records.begin(block, self.depot.generation(block))
        self._trim()
        return blocks

    def hold(self, name: str, blocks: Sequence[tuple[int, int]], give: Sequence[int]) -> bool:
        if not self.depot.holds(name, give):
            raise BadRequest("it gives up what it does not hold")
        if len(blocks) > self.depot.room(name) + len(give):
            raise BadRequest("it would hold more than its quota")
        held = self.depot.hold(name, blocks, give)
        self._trim()
        return held

    def find(self, name: str, keys: Sequence[bytes]) -> list[tuple[int, int] | None]:
        """Of what failed instances have left, the (block, generation) of each key, for another one."""
        for other in self._orphaned_until.keys() - self._left.keys():
            records = filter(None, map(self.records.get, self.depot.held(other)))
            self._left[other] = {record.key: record.block for record in records}
        alike = [left for other, left in self._left.items() if self._weights[other] == self._weights[name]]
        return [self._find(alike, key) for key in keys]

    def _find(self, alike: Sequence[Mapping[bytes, int]], key: bytes) -> tuple[int, int] | None:
        for left in alike:
            block = left.get(key)
            if block is None:
                continue
            record = self.records.get(block)  # it may have been used again since
            if record is not None and record.key == key:
                return block, record.generation
        return None

    def end(self, name: str, now: float) -> None:
        """An incarnation has ended."""
        self.depot.detach(name, [b for b in self.depot.held(name) if self.records.get(b) is not None])
        self._wait(name, now)
        self._trim()

    def promised(self, name: str) -> int:
        """Bytes of a failed instance's quota."""
        return self.depot.quota(name) * self.layout.block_bytes if name in self._orphaned_until else 0

    def wait_again(self, name: str, now: float) -> None:
        """The claimant of a failed instance's blocks disconnected before it attached."""
        if name in self._orphaned_until:
            self._wait(name, now)

    def expire(self, now: float, claimed: Container[str] = ()) -> None:
        """Free the blocks of failed instances that were not claimed in time."""
        late = [name for name, until in self._orphaned_until.items() if until <= now and name not in claimed]
        for name in late:
            if orphans := len(self.depot.held(name)):
                log.info("%s did not come back: %d blocks are free", name, orphans)
            del self._orphaned_until[name]
            self._left.pop(name, None)
            del self._weights[name]
            self.depot.expire(name)
        self._trim()

    def check(self) -> None:
        """Raise AssertionError unless blocks, records and incarnations agree."""
        self.depot.check()
        dead = {name for name in self.depot.names if self.depot.incarnation(name) is None}
        assert dead == set(self._orphaned_until), "an instance is dead and nobody waits for it, or the reverse"
        for name in self.depot.names:
            for block in self.depot.held(name):
                assert self.records.generation(block) == self.depot.generation(block), f"block {block}: generation"

    def close(self) -> None:
        self.memory.close()
        self._table.close()

    def _wait(self, name: str, now: float) -> None:
        self._orphaned_until[name] = now + (self._orphan_seconds if self.depot.held(name) else 0)

    def _trim(self) -> None:
        for run in self.depot.take_surplus():
            self.memory.punch(run.start, len(run))


class _Connection:
    """One client's connection, with its incomplete input and unsent output."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.received = MessageBuffer()
        self.outbox: deque[tuple[memoryview, Sequence[int]]] = deque()  # bytes, and descriptors that go along
        self.pool: HostPool | None = None  # once attached
        self.instance = ""  # until it has claimed or attached
        self.incarnation = 0


class KVPoolServer:
    """Serves until told to stop; see `run`.

    Args:
        path: of the Unix socket. A file left there by a KV pool server that was killed is replaced.
        orphan_seconds: how long a failed instance's published blocks wait for its next incarnation.

    Raises:
        ConfigError: `path` cannot be bound.
    """

    def __init__(self, path: str, orphan_seconds: float = 60.0, clock: Clock | None = None) -> None:
        self.path = path
        self._orphan_seconds = orphan_seconds
        self._clock = clock or SystemClock()
        self._pools: dict[str, HostPool] = {}  # of each model
        self._connections: set[_Connection] = set()
        self._listener = _listen(path)
        self._crowded = False  # there was no descriptor for the last connection that came
        self._accept_from: float | None = None  # time until which none is accepted
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)

    def run(self, ended: Callable[[], bool], tick: float = TICK, beat: Callable[[], None] = lambda: None) -> None:
        """Serve until `ended`. It is asked, and `beat` called, at least every `tick` seconds."""
        while not ended():
            beat()
            self.poll(tick)

    def poll(self, timeout: float) -> None:
        """Serve what has come, or comes within so many seconds."""
        if self._accept_from is not None and self._accept_from <= self._clock.now():
            self._accept_from = None
            self._selector.register(self._listener, selectors.EVENT_READ)
        for key, events in self._selector.select(timeout):
            if key.fileobj is self._listener:
                self._accept()
            elif key.data not in self._connections:
                continue  # closed while handling another connection
            elif events & selectors.EVENT_WRITE:
                self._write(key.data)
            else:
                self._read(key.data)
        now = self._clock.now()
        claimed = {c.instance for c in self._connections if c.pool is None}
        for pool in list(self._pools.values()):
            pool.expire(now, claimed)
            self._retire(pool)

    @property
    def clients(self) -> int:
        """Connections of attached instances."""
        return sum(connection.pool is not None for connection in self._connections)

    def close(self) -> None:
        for connection in self._connections:
            connection.sock.close()
        self._connections.clear()
        self._selector.close()
        self._listener.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()

    # --- connections

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError as error:
            if error.errno in NO_ROOM:  # the connection waits where it is, and would be announced again at once
                if not self._crowded:
                    log.warning("no connection can be accepted for now: %s", error)
                self._crowded = True
                self._selector.unregister(self._listener)
                self._accept_from = self._clock.now() + TICK
            return  # or else it has gone again
        self._crowded = False
        if len(self._connections) >= MAX_CLIENTS:
            log.warning("a connection was refused: there are %d already", MAX_CLIENTS)
            sock.close()
            return
        sock.setblocking(False)
        connection = _Connection(sock)
        self._connections.add(connection)
        self._selector.register(sock, selectors.EVENT_READ, connection)

    def _read(self, connection: _Connection) -> None:
        try:
            data = connection.sock.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._disconnect(connection, "its connection ended")
            return
        connection.received.feed(data)
        try:
            while connection in self._connections and (body := connection.received.take()) is not None:
                self._answer(connection, decode_request(body))
        except (BadFrame, BadRequest, msgspec.MsgspecError) as error:
            log.warning("a client is disconnected: %s: %s", connection.instance or "not attached", error)
            self._disconnect(connection, "it sent rubbish")

    def _send(self, connection: _Connection, reply: KVPoolReply, fds: Sequence[int] = ()) -> None:
        connection.outbox.append((memoryview(frame(reply)), fds))
        self._write(connection)

    def _write(self, connection: _Connection) -> None:
        """Send what the client takes now. Nothing is read from it meanwhile."""
        while connection.outbox:
            data, fds = connection.outbox[0]
            try:
                sent = socket.send_fds(connection.sock, [data], fds) if fds else connection.sock.send(data)
            except BlockingIOError:
                self._selector.modify(connection.sock, selectors.EVENT_WRITE, connection)
                return
            except OSError:
                self._disconnect(connection, "its connection ended")
                return
            if sent < len(data):
                connection.outbox[0] = (data[sent:], ())
            else:
                connection.outbox.popleft()
        if self._selector.get_key(connection.sock).events != selectors.EVENT_READ:
            self._selector.modify(connection.sock, selectors.EVENT_READ, connection)

    def _disconnect(self, connection: _Connection, why: str) -> None:
        self._connections.remove(connection)
        self._selector.unregister(connection.sock)
        connection.sock.close()
        pool = connection.pool
        if pool is not None:
            pool.end(connection.instance, self._clock.now())
            kept = len(pool.depot.held(connection.instance))
            log.info("%s (%x) is over, %s: %d blocks kept", connection.instance, connection.incarnation, why, kept)
            return
        for other in self._pools.values():
            other.wait_again(connection.instance, self._clock.now())

    # --- requests

    def _answer(self, connection: _Connection, request: KVPoolRequest) -> None:
        pool = connection.pool
        if isinstance(request, CountPool):
            self._send(connection, self._report())
        elif isinstance(request, Claim):
            if connection.instance:
                raise BadRequest("it has claimed or is attached already")
            self._claim(connection, request)
        elif isinstance(request, Attach):
            if pool is not None:
                raise BadRequest("it is attached already")
            self._attach(connection, request)
        elif pool is None:
            raise BadRequest("it is not attached")
        elif isinstance(request, Exchange):
            self._send(connection, Exchanged(pool.exchange(connection.instance, request.give, request.want)))
        elif isinstance(request, Find):
            self._send(connection, Found(pool.find(connection.instance, request.keys)))
        elif isinstance(request, Hold):
            self._send(connection, Held(pool.hold(connection.instance, request.blocks, request.give)))

    def _claim(self, connection: _Connection, request: Claim) -> None:
        self._end_earlier_life(request.instance, request.incarnation)
        connection.instance, connection.incarnation = request.instance, request.incarnation
        self._send(connection, Claimed(sum(pool.promised(request.instance) for pool in self._pools.values())))

    def _attach(self, connection: _Connection, request: Attach) -> None:
        name = request.instance
        if connection.instance not in ("", name):
            raise BadRequest(f"it has claimed {connection.instance} and attaches as {name}")
        try:
            if request.protocol != PROTOCOL:
                raise ConfigError(f"protocol: {PROTOCOL} here, {request.protocol} there")
            pool = self._pool(request.layout)
            self._end_earlier_life(name, request.incarnation)
            try:
                inherited = pool.attach(name, request.incarnation, request.quota, request.weights)
            finally:
                self._retire(pool)
        except (ConfigError, OSError) as error:
            log.warning("%s is refused: %s", name, error)
            self._send(connection, KVPoolRefused(str(error)))
            return
        connection.pool, connection.instance, connection.incarnation = pool, name, request.incarnation
        log.info(
            "%s (%x) is attached with %d blocks, %d inherited", name, request.incarnation, request.quota, len(inherited)
        )
        self._send(connection, Attached(pool.depot.num_blocks, inherited), pool.fds)

    def _pool(self, layout: KVLayout) -> HostPool:
        """The pool of a layout, made if need be. Raises ConfigError, OSError."""
        pool = self._pools.get(layout.model)
        if pool is None:
            if layout.block_bytes <= 0 or layout.block_bytes % PAGE or layout.block_bytes > POOL_BYTES:
                raise ConfigError(f"block_bytes: {layout.block_bytes}, whole pages of {PAGE} bytes are needed")
            num_blocks = min(POOL_BLOCKS, POOL_BYTES // layout.block_bytes)
            pool = self._pools[layout.model] = HostPool(layout, num_blocks, self._orphan_seconds)
        elif difference := pool.layout.difference(layout):
            raise ConfigError(f"the KV pool server holds this model's KV in another layout: {difference}")
        return pool

    def _end_earlier_life(self, name: str, incarnation: int) -> None:
        """A new incarnation may connect before the end of the previous connection was seen."""
        for old in [c for c in self._connections if c.instance == name and c.incarnation != incarnation]:
            self._disconnect(old, f"its successor {incarnation:x} is here")

    def _retire(self, pool: HostPool) -> None:
        """Remove a pool without any quota."""
        if not pool.depot.names:
            del self._pools[pool.layout.model]
            pool.close()

    def _report(self) -> PoolCounts:
        counts = {"free": 0, "orphaned": 0}
        broken = ""
        for pool in self._pools.values():
            for state, count in pool.depot.counts().items():
                counts[state] = counts.get(state, 0) + count
            try:
                pool.check()
                attached = {name for name in pool.depot.names if pool.depot.incarnation(name) is not None}
                assert attached == {c.instance for c in self._connections if c.pool is pool}, (
                    "an incarnation has no connection"
                )
            except AssertionError as error:
                log.exception("the pool of %s is broken", pool.layout.model)
                broken = f"{pool.layout.model}: {error}"
        counts["pools"] = len(self._pools)
        counts["clients"] = self.clients
        with contextlib.suppress(OSError):  # listing them opens one
            counts["open_files"] = len(os.listdir("/proc/self/fd")) - 1
        counts["resident_bytes"] = sum(pool.memory.resident_bytes for pool in self._pools.values())
        return PoolCounts(counts, broken)


def _listen(path: str) -> socket.socket:
    """Raises ConfigError."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        remove_stale(path)
        listener.bind(path)
        os.chmod(path, 0o600)
        listener.listen(MAX_CLIENTS)
    except OSError as error:
        listener.close()
        raise ConfigError(f"path: {path!r}, nobody can listen there: {error}", "path") from error
    listener.setblocking(False)
    return listener
