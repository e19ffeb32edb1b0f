"""Blocks between engines by Mooncake's transfer engine: RDMA where it finds hardware for it, else TCP of its own.

A push says where a block lies, and the puller has Mooncake read it straight into a block of its own, where it is
verified. So no peer ever writes to an engine's memory: one that is slow, dead, or another incarnation than it was
can only fail to bring what is believed, and it is the puller's own process that knows when nothing writes any longer.
Incarnations, leases, checksums and failures travel as messages over our links, as with every transport.

Mooncake's ports authenticate nobody: whoever reaches them can read and write the registered memory.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import count, takewhile
from queue import Empty, SimpleQueue
from time import monotonic, sleep
from typing import Any

from penstock.core.errors import ConfigError
from penstock.core.layout import KVLayout
from penstock.kv.connector import Move, Moved
from penstock.transfer.finished import Finished
from penstock.transfer.peer_link import ReceivedMessage
from penstock.transfer.pool import KVPool, Stamps

log = logging.getLogger(__name__)
LOOK_EVERY = 50e-6  # seconds between two looks at reads under way; Mooncake tells nobody when they are over
COMPLETED, FAILED = 1, -1  # of transfer_check_status; anything else, time-outs too, may still be written
# More than the four connections that it makes to a peer. It does not notice that the peer has closed one of them before
# a read over it fails, which it does at once; one that fails later was no victim of that.
TRIES, AT_ONCE = 5, 0.1
HOW_TO_INSTALL = 'pip install "penstock[mooncake]", and the system\'s libibverbs1, librdmacm1 and libnuma1'


def missing() -> str:
    """Why there is no Mooncake here; "" when there is."""
    try:
        import mooncake.engine  # noqa: F401
    except ImportError as error:
        return f"{error}; it needs {HOW_TO_INSTALL}"
    return ""


class Engine:
    """A transfer engine of this process. Making one takes milliseconds, ending one a second, so none is ever ended.

    Args:
        host: where peers reach it.

    Raises:
        ConfigError: it cannot be made.
    """

    def __init__(self, host: str) -> None:
        if reason := missing():
            raise ConfigError(f"transport: mooncake, {reason}", "transport")
        from mooncake.engine import TransferEngine

        self._engine: Any = TransferEngine()
        if status := self._engine.initialize(host, "P2PHANDSHAKE", "tcp", ""):
            raise ConfigError(f"address: {host}, Mooncake cannot listen there (status {status})", "address")
        self.session = f"{host}:{self._engine.get_rpc_port()}"
        self._lock = threading.Lock()
        self._users: Counter[int] = Counter()  # of each registered address

    def register(self, address: int, size: int) -> None:
        """Raises ConfigError when the hardware refuses."""
        with self._lock:
            # with a place given, it does not walk the pages of the memory, which is sparse, to find theirs
            if not self._users[address] and (status := self._engine.register_memory(address, size, "cpu:0")):
                raise ConfigError(
                    f"transport: mooncake cannot register {size / 2**30:.0f} GiB (status {status}); "
                    "allowed: tcp, or MC_FORCE_TCP=1 in the environment",
                    "transport",
                )
            self._users[address] += 1

    def unregister(self, address: int) -> None:
        with self._lock:
            self._users[address] -= 1
            if not self._users[address]:
                self._engine.unregister_memory(address)

    def read(self, session: str, there: int, here: int, size: int) -> int:
        """Begin a read; 0 when that failed. May wait for the peer, when it is the first one."""
        started: int = self._engine.batch_transfer_async_read(session, [here], [there], [size])
        return started

    def status(self, read: int) -> int:
        """A read that is COMPLETED or FAILED is forgotten, and nothing writes for it any longer."""
        status: int = self._engine.transfer_check_status(read)
        return status


@cache
def engine_of(host: str) -> Engine:
    """The one whose memory peers read."""
    return Engine(host)


class Read:
    """Of one block.

    Attributes:
        came: whether it has brought the block, once it is over.
    """

    def __init__(self, engine: Engine, session: str, there: int, here: int, size: int, tries: int = TRIES) -> None:
        self.came = False
        self._engine, self._tries = engine, tries
        self._read = partial(engine.read, session, there, here, size)
        self._begin()

    def is_over(self) -> bool:
        """Whether nothing writes for it any longer; it must not be asked again then."""
        status = self._engine.status(self._number) if self._number else FAILED
        if status == FAILED and self._number and self._tries and monotonic() - self._began < AT_ONCE:
            self._begin()
            return False
        self.came = status == COMPLETED
        return status in (COMPLETED, FAILED)

    def _begin(self) -> None:
        self._tries -= 1
        self._began = monotonic()
        self._number = self._read()


@dataclass(slots=True)
class _Pull:
    """
    Attributes:
        reads: of its moves, from the first on, as far as they could begin; `open`: those that are not over.
    """

    handle: int
    moves: Sequence[Move]
    source: ReceivedMessage
    began: float
    reads: list[Read] = field(default_factory=list)
    open: list[Read] = field(default_factory=list)


class MooncakeBlocks:
    """Pulls are made by a thread of their own, several at once.

    Raises:
        ConfigError: Mooncake is not there, or cannot have the address or the memory.
    """

    shares = False
    sockets = 1
    payload_bytes = 0
    pool_name = ""

    def __init__(self, pool: KVPool, layout: KVLayout, address: str) -> None:
        kind, _, rest = address.partition(":")
        if kind != "tcp":
            raise ConfigError(f"address: {address}, transport mooncake needs tcp:host:port", "address")
        self._host = rest.rpartition(":")[0]
        self._memory = pool.memory
        self._size = pool.memory.num_blocks * pool.memory.block_bytes
        self._stamps = Stamps(pool)
        self.stamp = self._stamps.of
        self._reader = self._ours = engine_of(self._host)
        self._ours.register(self._memory.address, self._size)
        self.memory = f"{self._ours.session}/{self._memory.address:x}"
        self._readers = [self._reader]
        self._known: dict[str, int] = {}  # session -> the incarnation that the reader has met there
        self._sessions: dict[str, str] = {}  # name of a peer -> where it was met last
        self._farewells: list[Read] = []  # which nobody waits for
        self._scratch = ctypes.create_string_buffer(1)
        self._handles = count(1)
        self._finished = Finished()
        self._orders: SimpleQueue[_Pull | None] = SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="transfer-mooncake", daemon=True)
        self._thread.start()

    def payload(self, block: int) -> memoryview | None:
        return None

    def pull(self, moves: Sequence[Move], source: ReceivedMessage) -> int:
        handle = next(self._handles)
        for move in moves:
            assert 0 <= move.block < self._memory.num_blocks
            self._stamps.forget(move.block)
        self._orders.put(_Pull(handle, moves, source, monotonic()))
        return handle

    def poll(self) -> list[Moved]:
        return self._finished.take()

    def fileno(self) -> int:
        return self._finished.fileno()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._orders.put(None)
        self._thread.join()
        self._finished.close()
        for reader in self._readers:
            reader.unregister(self._memory.address)

    # --- the thread

    def _work(self) -> None:
        try:
            self._serve()
        except BaseException as error:
            log.error("the thread of Mooncake's reads failed", exc_info=error)
            self._finished.fail(error)

    def _serve(self) -> None:
        under_way: list[_Pull] = []
        while True:
            try:
                order = self._orders.get(block=not under_way and not self._farewells)
            except Empty:
                sleep(LOOK_EVERY)
            else:
                if order is not None and not self._closed:
                    self._begin(order)
                    under_way.append(order)
            under_way = [pull for pull in under_way if not self._is_over(pull)]
            self._farewells = [read for read in self._farewells if not read.is_over()]
            if self._closed and not under_way and not self._farewells:
                return

    def _begin(self, pull: _Pull) -> None:
        session, _, base = pull.source.memory.rpartition("/")
        size = self._memory.block_bytes
        try:
            self._part_from_earlier(pull.source.peer.name, session)
            reader = self._reader_of(session, pull.source.peer.incarnation)
            for move in pull.moves:
                there, here = int(base, 16) + move.slot * size, self._memory.address + move.block * size
                pull.reads.append(Read(reader, session, there, here, size))
        except Exception as error:  # what a peer says may be nonsense, and what is foreign may fail in any way
            log.warning("blocks of %s cannot be read: %s: %s", pull.source.peer.name, type(error).__name__, error)
        pull.open = pull.reads

    def _reader_of(self, session: str, incarnation: int) -> Engine:
        """An engine remembers for ever where a session's memory and port are. Of another incarnation that listens
        where one did before, which is rare, only one that has never met it can read."""
        if self._known.setdefault(session, incarnation) != incarnation:
            self._reader = Engine(self._host)
            self._reader.register(self._memory.address, self._size)
            self._readers.append(self._reader)
            self._known = {session: incarnation}
        return self._reader

    def _part_from_earlier(self, name: str, session: str) -> None:
        """Connections to an earlier incarnation stay open until one more read fails over each of them."""
        before = self._sessions.setdefault(name, session)
        if before == session:
            return
        self._sessions[name] = session
        scratch = ctypes.addressof(self._scratch)
        self._farewells += [Read(self._reader, before, 0, scratch, 1, tries=1) for _ in range(2 * TRIES)]

    def _is_over(self, pull: _Pull) -> bool:
        pull.open = [read for read in pull.open if not read.is_over()]
        if pull.open:
            return False
        pairs = zip(pull.moves, pull.reads, strict=False)
        came = takewhile(lambda pair: pair[1].came and self._is_what_was_meant(pair[0]), pairs)
        blocks = tuple(move.block for move, _ in came)
        self._finished.put(Moved(pull.handle, blocks, monotonic() - pull.began))
        return True

    def _is_what_was_meant(self, move: Move) -> bool:
        return self._memory.checksum(move.block) == move.checksum
