"""What handing a request over costs per block: two processes, a real KV pool server, real transports, and no model.

    python tools/handoff_bench.py [--blocks 32] [--requests 50] [--block-bytes 131072 7340032]

The prefiller has a prompt of --blocks blocks computed at once and hands it over; timed is everything from the first
push to the decoder's `Committed`, on both sides, so one block's share of it. Blocks are touched before.
"""

from __future__ import annotations

import argparse
import multiprocessing
import select
import statistics
import tempfile
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

from penstock.core.layout import KVLayout
from penstock.core.plan import BLOCK_TOKENS, StepResult
from penstock.core.request import Request, TokenOutput
from penstock.core.sampling import SamplingParams
from penstock.core.wire.engine import Peer
from penstock.kv.pool import BlockPool
from penstock.sched.local import Limits, Scheduler
from penstock.sched.local.handoff import Handoffs
from penstock.transfer.kv_pool_server import KVPoolServer
from penstock.transfer.pool import shared_pool
from penstock.transfer.transports import open_transport

LEASE = 30.0


class Node:
    """One end: everything of an engine but the model."""

    def __init__(self, name: str, folder: Path, kind: str, block_bytes: int, quota: int) -> None:
        layout = KVLayout(
            model="bench", order="digest", dtype="uint64", layers=1, kv_heads=1, head_dim=1, block_bytes=block_bytes
        )
        self.pool = shared_pool(str(folder / "kv-pool"), name, 1)(layout, quota)
        address = f"unix:{folder / name}" if kind == "shared" else "tcp:127.0.0.1:0"
        self.transport = open_transport(kind, address, name, 1, layout, self.pool)
        self.peer = Peer(name, 1, self.transport.address)
        for block in self.pool.blocks:
            self.pool.memory.block(block)[:] = bytes(block_bytes)
        limits = Limits(token_budget=quota * BLOCK_TOKENS, max_sequences=8, max_model_len=quota * BLOCK_TOKENS)
        self.scheduler = Scheduler(limits, BlockPool(self.pool.blocks, self.pool.client), prefix_cache=False)
        self.handoffs = Handoffs(self.scheduler, self.transport, self, LEASE)
        self.joins = 0

    def refuses(self, request: Request, frontend: str) -> str:
        return ""

    def spent(self, request_id: str) -> tuple[float, float]:
        return 0.0, 0.0

    def migrated(self, request_id: str) -> None:
        pass

    def joined(
        self, now: float, request: Request, frontend: str, generation: int, queue: float, prefill: float
    ) -> None:
        self.joins += 1
        self.scheduler.cancel(request.id)

    def failed(self, output: TokenOutput) -> None:
        raise AssertionError("a hand-off failed")

    def serve(self) -> None:
        """Wait for messages and handle them."""
        select.select([self.transport.fileno()], [], [], 0.05)
        for arrival in self.transport.receive():
            if not hasattr(arrival, "message") or isinstance(arrival.message, str):
                raise AssertionError(f"the link is down: {arrival}")
            self.handoffs.on(time.monotonic(), arrival)
        self.handoffs.tick(time.monotonic())


def decoder(folder: str, kind: str, block_bytes: int, quota: int, requests: int, pipe: Connection) -> None:
    node = Node("decoder", Path(folder), kind, block_bytes, quota)
    pipe.send(node.peer)
    while node.joins < requests:
        node.serve()
    pipe.recv()


def hand_over(node: Node, peer: Peer, name: str, prompt: list[int]) -> float:
    """Seconds from the first push to the last word."""
    request = Request(
        id=name, prompt=prompt, params=SamplingParams(), seed=0, stop_ids=frozenset(), max_tokens=10, priority=0
    )
    node.scheduler.add(request, migrates=True)
    node.handoffs.begin(request, 0, "nobody", peer)
    plan = node.scheduler.schedule()
    node.handoffs.started(time.monotonic(), plan)
    while not node.handoffs.promised(name):
        node.serve()
    node.scheduler.update(plan, StepResult([5], [None]))
    begin = time.perf_counter()
    node.handoffs.progress(time.monotonic())
    while node.handoffs.busy:
        node.serve()
    return time.perf_counter() - begin


def measure(kind: str, block_bytes: int, blocks: int, requests: int) -> list[float]:
    """Seconds of every hand-over."""
    quota = 4 * blocks
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        server = multiprocessing.get_context("spawn").Process(target=keep, args=(f"{folder}/kv-pool",), daemon=True)
        server.start()
        while not Path(folder, "kv-pool").exists():
            time.sleep(0.01)
        ours, theirs = multiprocessing.get_context("spawn").Pipe()
        child = multiprocessing.get_context("spawn").Process(
            target=decoder, args=(folder, kind, block_bytes, quota, requests, theirs), daemon=True
        )
        child.start()
        peer = ours.recv()
        node = Node("prefiller", Path(folder), kind, block_bytes, quota)
        times = [
            hand_over(node, peer, f"r{i}", [i + 1] * (blocks * BLOCK_TOKENS - 1))
            for i in track(range(requests), f"{kind}, {block_bytes >> 10} KiB a block", transient=True)
        ]
        ours.send(None)
        child.join()
        server.terminate()
        server.join()
    return times


def keep(path: str) -> None:
    server = KVPoolServer(path)
    server.run(threading.Event().is_set)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=32)
    parser.add_argument("--requests", type=int, default=50)
    parser.add_argument("--block-bytes", type=int, nargs="+", default=[131072, 7340032])
    args = parser.parse_args()
    table = Table("transport", "block", "per block, p50", "p90", title=f"{args.blocks} blocks a request")
    for block_bytes in args.block_bytes:
        for kind in ("shared", "tcp"):
            shares = sorted(t / args.blocks * 1e6 for t in measure(kind, block_bytes, args.blocks, args.requests))
            p90 = shares[int(0.9 * (len(shares) - 1))]
            median = statistics.median(shares)
            table.add_row(kind, f"{block_bytes >> 10} KiB", f"{median:,.0f} us", f"{p90:,.0f} us")
    Console().print(table)


if __name__ == "__main__":
    main()
