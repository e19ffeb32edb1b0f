"""Two engines' ends of a link, without the engines. As a program: one end in a process of its own."""

import json
import os
import resource
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from penstock.core.layout import KVLayout, attention_groups
from penstock.core.wire.engine import Peer
from penstock.core.wire.handoff import Commit, Committed, Lease, Missing, PeerMessage, Push, Release
from penstock.kv.connector import Moved
from penstock.transfer import mooncake, transports
from penstock.transfer.kv_pool_server import KVPoolServer
from penstock.transfer.pool import KVPool, memfd_pool, shared_pool
from penstock.transfer.transports import TRANSPORTS, KVTransport, LinkDown, ReceivedMessage
from tests.helpers.certificates import certificate

BLOCK_BYTES = 16 << 10
LAYOUT = KVLayout(
    model="m",
    order="block",
    dtype="float32",
    groups=attention_groups((None,) * 2, 1, 16, "float32"),
    block_bytes=BLOCK_BYTES,
)
KEY = b"0123456789abcdef"
LEASE = Lease("r", 0)
LEASE_OVER = Release(LEASE, "over")
NEEDS_MOONCAKE = pytest.mark.skipif(bool(mooncake.missing()), reason=mooncake.missing())
KINDS = [pytest.param(kind, marks=[NEEDS_MOONCAKE] if kind == "mooncake" else []) for kind in TRANSPORTS]
TLS = "tcp under TLS"  # to these helpers a kind like the others


def open_transport(kind: str, *arguments: Any, tls: dict[str, str] | None = None, **named: Any) -> KVTransport:
    """As the one of `transports`; with certificates where the kind is TLS."""
    if kind == TLS:
        kind, tls = "tcp", tls or certificate()
    return transports.open_transport(kind, *arguments, tls=tls, **named)


@contextmanager
def pool_server(path: Path) -> Iterator[str]:
    """A KV pool server in a thread of its own, at `path`."""
    server, over = KVPoolServer(str(path)), threading.Event()
    thread = threading.Thread(target=server.run, args=(over.is_set, 0.02))
    thread.start()
    try:
        yield str(path)
    finally:
        over.set()
        thread.join()
        server.close()


class End:
    """One engine's side: its transport, its pool, and what has come so far."""

    def __init__(self, transport: KVTransport, pool: KVPool, name: str, incarnation: int) -> None:
        self.transport = transport
        self.pool = pool
        self.peer = Peer(name, incarnation, transport.address)
        self.news: list[ReceivedMessage | LinkDown] = []

    @property
    def arrivals(self) -> list[ReceivedMessage]:
        return [news for news in self.news if isinstance(news, ReceivedMessage)]

    @property
    def messages(self) -> list[PeerMessage]:
        return [arrival.message for arrival in self.arrivals]

    @property
    def downs(self) -> list[LinkDown]:
        return [news for news in self.news if isinstance(news, LinkDown)]

    def until(self, reached: Callable[[], Any], seconds: float = 10.0) -> None:
        """Receives until `reached()`; AssertionError after `seconds`."""
        deadline = time.monotonic() + seconds
        while not reached():
            assert time.monotonic() < deadline, f"not reached in {seconds} s; so far {self.news}"
            select.select([self.transport], [], [], 0.02)
            self.news += self.transport.receive()

    def fill(self, block: int, seed: int, key: bytes = KEY) -> bytes:
        """Writes a full block and records it; returns its bytes."""
        data = contents(seed)
        self.pool.memory.block(block)[:] = data
        if self.pool.client is not None and key:
            self.pool.client.records.put(block, key, bytes(16), self.pool.memory.checksum(block))
        return data

    def land(self, arrival: ReceivedMessage, into: int, seconds: float = 10.0) -> int | None:
        """Pulls a pushed block, and waits until that is over: the block that has it, or None."""
        handle = self.transport.pull(arrival, into)
        ((ended, blocks, _),) = self.pulled(seconds)
        assert ended == handle
        return blocks[0] if blocks else None

    def pulled(self, seconds: float = 10.0) -> list[Moved]:
        """The next pulls that are over, or none within so many seconds."""
        deadline = time.monotonic() + seconds
        while not (over := self.transport.poll()) and (left := deadline - time.monotonic()) > 0:
            select.select([self.transport._path], [], [], left)  # messages wait: a test takes them when it will
        return over

    def push(self, to: Peer, block: int, index: int = 0, request: str = "r", key: bytes = KEY) -> Push:
        message = Push(Lease(request, 0), index, key, block, *self.transport.stamp(block))
        self.transport.send(to, message)
        return message


@contextmanager
def ends(
    kind: str, folder: Path, *names: str, faults: dict[str, Any] | None = None, **other: Any
) -> Iterator[list[End]]:
    """Open ends of one kind; the first has the faults. `other`: arguments of open_transport for all."""
    opened: list[End] = []
    with ExitStack() as stack:
        path = stack.enter_context(pool_server(folder / "kv-pool.sock")) if kind == "shared" else ""
        for number, name in enumerate(names or ("a", "b")):
            arguments = {"layout": LAYOUT, "faults": faults if number == 0 else None, **other}
            pool = stack.enter_context(closing(open_pool(kind, path, name, number + 1)))
            where = address(kind, folder, name)
            transport = stack.enter_context(
                closing(open_transport(kind, where, name, number + 1, pool=pool, **arguments))
            )
            opened.append(End(transport, pool, name, number + 1))
        yield opened


def open_pool(kind: str, kv_pool_path: str, name: str, incarnation: int) -> KVPool:
    """16 blocks."""
    if kind != "shared":
        return memfd_pool(LAYOUT, 16)
    return shared_pool(kv_pool_path, name, incarnation)(LAYOUT, 16)


def contents(seed: int) -> bytes:
    """Of a block."""
    return bytes((seed + i * 7) % 251 for i in range(256)) * (BLOCK_BYTES // 256)


def address(kind: str, folder: Path, name: str) -> str:
    return f"unix:{folder}/{name}.sock" if kind == "shared" else "tcp:127.0.0.1:0"


def connected_to() -> set[tuple[str, int]]:
    """Addresses at the other ends of this process's TCP connections."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # it is gone by now, or not connected
            if os.readlink(f"/proc/self/fd/{number}").startswith("socket:"):
                with socket.socket(fileno=os.dup(int(number))) as sock:
                    if sock.family == socket.AF_INET:
                        found.add(sock.getpeername())
    return found


def open_files() -> set[tuple[int, str]]:
    """Descriptors of this process, and what is behind each: one that is used again for something else is another."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # that by which the folder was read
            found.add((int(number), os.readlink(f"/proc/self/fd/{number}")))
    return found


@contextmanager
def no_descriptors() -> Iterator[None]:
    """Nothing can be opened or accepted in this process."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def transfer_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "transfer"]


@contextmanager
def far_process(
    kind: str, folder: Path, kv_pool_path: str = "", where: str = "", prefix: Sequence[str] = ()
) -> Iterator[tuple[subprocess.Popen[str], Peer]]:
    """An end named "far", incarnation 2, in a process of its own; see `main`. `prefix`: of its command line."""
    options: dict[str, Any] = {"kind": kind, "address": where or address(kind, folder, "far"), "kv_pool": kv_pool_path}
    options["tls"] = certificate() if kind == TLS else None
    command = [*prefix, sys.executable, "-m", "tests.helpers.links", json.dumps(options)]
    root = Path(__file__).parents[2]
    far = subprocess.Popen(command, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert far.stdout is not None
    assert far.stdin is not None
    try:
        yield far, Peer("far", 2, far.stdout.readline().strip())
    finally:
        far.stdin.close()
        far.wait(10)
        far.stdout.close()


def main(kind: str, address: str, kv_pool: str, tls: dict[str, str] | None) -> None:
    """Lands every push, pushes what is Missing and answers every Commit, until its input ends.

    Prints its address, then for each Commit {"landed": blocks, "right": those that are what `End.fill` writes for their
    index}.
    """
    pool = open_pool(kind, kv_pool, "far", 2)
    end = End(open_transport(kind, address, "far", 2, LAYOUT, pool, tls=tls), pool, "far", 2)
    print(end.transport.address, flush=True)
    landed: dict[int, bytes] = {}
    while sys.stdin not in select.select([end.transport, sys.stdin], [], [])[0]:
        for news in end.transport.receive():
            if isinstance(news, LinkDown):
                continue
            if isinstance(news.message, Push):
                block = end.land(news, pool.blocks[0])
                if block is not None:
                    landed[news.message.index] = bytes(pool.memory.block(block))
            elif isinstance(news.message, Missing):
                for index in news.message.indices:
                    end.fill(pool.blocks[index], index)
                    end.push(news.peer, pool.blocks[index], index)
            elif isinstance(news.message, Commit):
                right = sum(data == contents(index) for index, data in landed.items())
                print(json.dumps({"landed": len(landed), "right": right}), flush=True)
                end.transport.send(news.peer, Committed(news.message.lease))
    end.transport.close()
    pool.close()


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
