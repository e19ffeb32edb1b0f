"""What a block's hand-off takes on each transport, between two processes of this machine.

    python tools/transfer_bench.py [--block-mib 7] [--blocks 64] [--transports shared,tcp,mooncake]
        [--tls CERTIFICATE KEY CA]

Times are from a push to the answer that the block is there and verified, one block at a time: the shortest, which other
work on the machine disturbs least, and the median. `MB/s` is of as many blocks at once.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import select
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from penstock.core.errors import ConfigError
from penstock.core.layout import KVLayout, attention_groups
from penstock.core.wire.engine import Peer
from penstock.core.wire.handoff import Commit, Lease, Push, Release
from penstock.transfer.kv_pool_server import KVPoolServer
from penstock.transfer.peer_link import LinkDown, ReceivedMessage
from penstock.transfer.pool import KVPool, memfd_pool, shared_pool
from penstock.transfer.transports import TRANSPORTS, KVTransport, open_transport

WARM = 4  # blocks that are not measured
TLSFiles = dict[str, str] | None  # as `open_transport` has them
SPAWN = multiprocessing.get_context("spawn")


def layout_of(block_bytes: int) -> KVLayout:
    groups = attention_groups((None,), 1, 16, "float32")
    return KVLayout(model="bench", order="block", dtype="float32", groups=groups, block_bytes=block_bytes)


def serve_pool(path: str) -> None:
    parent = os.getppid()
    KVPoolServer(path).run(lambda: os.getppid() != parent)


@contextmanager
def opened(
    kind: str, folder: str, name: str, incarnation: int, layout: KVLayout, blocks: int, tls: TLSFiles
) -> Iterator[tuple[KVPool, KVTransport]]:
    with ExitStack() as stack:
        if kind == "shared":
            pool = shared_pool(f"{folder}/pool", name, incarnation)(layout, blocks)
        else:
            pool = memfd_pool(layout, blocks)
        stack.enter_context(closing(pool))
        for block in pool.blocks:
            pool.memory.block(block)[:] = bytes([block % 251 + 1]) * layout.block_bytes
        where = f"unix:{folder}/{name}" if kind == "shared" else "tcp:127.0.0.1:0"
        transport = open_transport(kind, where, name, incarnation, layout, pool, tls=tls)
        yield pool, stack.enter_context(closing(transport))


def news(transport: KVTransport) -> list[ReceivedMessage]:
    """What has arrived, after a wait for something."""
    select.select([transport], [], [])
    found = transport.receive()
    for one in found:
        if isinstance(one, LinkDown):
            raise SystemExit(one.message)
    return [one for one in found if isinstance(one, ReceivedMessage)]


def take(
    kind: str, folder: str, layout: KVLayout, blocks: int, tls: TLSFiles, tell: multiprocessing.connection.Connection
) -> None:
    """The end that takes blocks over, and answers each with a Commit."""
    with opened(kind, folder, "far", 2, layout, blocks, tls) as (pool, transport):
        tell.send(transport.address)
        while True:
            for arrival in news(transport):
                if not isinstance(arrival.message, Push):
                    return
                peer = arrival.peer
                transport.pull(arrival, pool.blocks[arrival.message.index])
            for _, came, _ in transport.poll():
                assert came, "a block did not come"
                transport.send(peer, Commit(Lease("r", 0), 1, [], 0, 0.0, 0.0))


def measure(kind: str, block_bytes: int, blocks: int, tls: TLSFiles) -> tuple[list[float], float]:
    """Seconds of each block alone, and of all of as many at once."""
    layout, quota = layout_of(block_bytes), 2 * blocks + WARM
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        if kind == "shared":
            server = SPAWN.Process(target=serve_pool, args=(f"{folder}/pool",), daemon=True)
            server.start()
            stack.callback(server.terminate)
            while not Path(folder, "pool").exists():
                time.sleep(0.01)
        hear, tell = SPAWN.Pipe(duplex=False)
        far = SPAWN.Process(target=take, args=(kind, folder, layout, quota, tls, tell), daemon=True)
        far.start()
        stack.callback(far.join)
        pool, transport = stack.enter_context(opened(kind, folder, "near", 1, layout, quota, tls))
        peer = Peer("far", 2, hear.recv())

        def run(indices: range) -> float:
            stamped = [(i, pool.blocks[i], *transport.stamp(pool.blocks[i])) for i in indices]
            began, answers = time.perf_counter(), 0
            for index, block, generation, checksum in stamped:
                transport.send(peer, Push(Lease("r", 0), index, b"", block, generation, checksum))
            while answers < len(indices):
                answers += len(news(transport))
            return time.perf_counter() - began

        run(range(WARM))
        alone = [run(range(i, i + 1)) for i in range(WARM, WARM + blocks)]
        together = run(range(WARM + blocks, quota))
        transport.send(peer, Release(Lease("r", 0), "done"))
        far.join()
        return alone, together


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--block-mib", type=float, default=7.0)
    parser.add_argument("--blocks", type=int, default=64)
    parser.add_argument("--transports", default=",".join(TRANSPORTS))
    parser.add_argument("--tls", nargs=3, metavar=("CERTIFICATE", "KEY", "CA"), help="PEM files, for tcp")
    given = parser.parse_args()
    tls = None if given.tls is None else dict(zip(("certificate", "key", "ca"), given.tls, strict=True))
    block_bytes = int(given.block_mib * 2**20) // 4096 * 4096
    print(f"{'transport':10}{'least ms':>10}{'median':>10}{'MB/s':>8}   blocks of {block_bytes / 2**20:g} MiB")
    for kind in given.transports.split(","):
        try:
            alone, together = measure(kind, block_bytes, given.blocks, tls)
        except ConfigError as error:
            print(f"{kind:10}  {error}")
            continue
        speed = given.blocks * block_bytes / together / 1e6
        print(f"{kind:10}{min(alone) * 1e3:10.3f}{statistics.median(alone) * 1e3:10.3f}{speed:8.0f}")


if __name__ == "__main__":
    main()
