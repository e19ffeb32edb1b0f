"""What a master costs that hears from many engines over real sockets: CPU, memory, and how late its event loop is.

    python tools/master_bench.py [--instances 1000] [--requests 0.2] [--blocks 1000] [--policy unified] [--seconds 15]

Another process speaks for all engines. Each sends a snapshot when its load has changed, but 50 ms after the last one at
the earliest, and else twice a second, as engines do. Each gets so many requests a second, at random, and each request
changes its load twice and replaces 1,024 tokens of its prefix cache, which holds so many blocks. With `--requests 0`
nothing changes, with `--requests inf` something always has. CPU time counts, whatever share of the machine others have.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import logging
import os
import random
import tempfile
import time
from collections import Counter
from math import inf, isfinite
from multiprocessing import get_context
from typing import Any

import msgspec
import uvloop
import zmq

from penstock.cli.http import allow_connections, make_master
from penstock.core.clock import SystemClock
from penstock.core.garbage import collect_rarely
from penstock.core.wire import codec
from penstock.core.wire.engine import CacheDelta, Event, Peer, Ready, Snapshot
from penstock.core.wire.master import Endpoint
from penstock.engine.server import REPORT_INTERVAL, SNAPSHOT
from penstock.sched.steptime import DEVICES, GEOMETRIES
from penstock.service.channel import make_context
from penstock.service.master_pump import MasterPump
from penstock.service.policies import BUNDLES, Circumstances
from penstock.service.registry import LocalRegistry

BLOCKS = 8000  # that an engine may hold
REPLACED = 16  # of them, by a request
PATIENCE = 120.0  # seconds until all are known
LISTEN = 0.2  # seconds between two looks at what the master says
READY = Ready(
    peer=Peer("", 1, ""),
    max_model_len=16384,
    vocab_size=128256,
    num_blocks=BLOCKS,
    token_budget=8192,
    device="modelled:h200",
    dtype="bfloat16",
    device_model=DEVICES["h200"],
    shape=GEOMETRIES["llama-3.1-8b"],
)
LOAD = Snapshot(
    incarnation=1,
    sequence=0,
    role="any",
    role_generation=0,
    draining=False,
    running=8,
    waiting=0,
    migrating=0,
    waiting_tokens=0,
    prefill_tokens=100,
    running_tokens=8000,
    free_blocks=BLOCKS // 2,
    reserved_blocks=0,
    num_blocks=BLOCKS,
    token_budget=READY.token_budget,
    ttft_ms=100.0,
    tpot_ms=20.0,
    interval_ms=20.0,
    factors={"linear:memory": 1.0, "prefill_attention:compute": 1.0, "decode_attention:memory": 1.0},
)


EMPTY, KEY = len(codec.encode(CacheDelta(1, 1 << 20, [], []))), 18  # bytes of a delta, and of a key in it


class Speaker:
    """One engine's end of the wire.

    Attributes:
        told: when it sent its last snapshot.
        changed: its load, since then.
    """

    def __init__(self, context: zmq.SyncContext, address: str, name: str) -> None:
        self.socket = context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.SNDHWM, 0)
        self.socket.bind(address)
        self.told, self.changed = 0.0, False
        self._name, self._master = name, b""
        self._keys: list[bytes] = []
        self._fresh: list[bytes] = []
        self._snapshots = self._deltas = 0

    def hear(self, blocks: int) -> None:
        """Take what has come; the first greeting is answered."""
        while self.socket.poll(0):
            who, _ = self.socket.recv_multipart()
            if not self._master:
                self._master = who
                self._send(msgspec.structs.replace(READY, peer=Peer(self._name, 1, "")))
                self._keys = [random.randbytes(16) for _ in range(blocks)]
                self._delta(self._keys, [], whole=True)

    def request(self, caches: bool) -> None:
        self.changed = True
        if caches:
            self._fresh += [random.randbytes(16) for _ in range(REPLACED)]

    def tell(self, now: float) -> None:
        if not self._master:
            return
        self._snapshots += 1
        load = random.randrange(64) if self.changed else LOAD.running
        tokens, free = 1000 * load, BLOCKS - 16 * load
        self._send(
            msgspec.structs.replace(
                LOAD, sequence=self._snapshots, running=load, running_tokens=tokens, free_blocks=free
            )
        )
        if self._fresh:
            count = min(len(self._fresh), len(self._keys))
            self._delta(self._fresh, self._keys[:count])
            self._keys = [*self._keys[count:], *self._fresh]
        self._fresh, self.changed, self.told = [], False, now

    def _delta(self, added: list[bytes], removed: list[bytes], whole: bool = False) -> None:
        self._deltas += 1
        self._send(CacheDelta(1, self._deltas, added, removed, whole=whole))

    def _send(self, event: Event) -> None:
        self.socket.send_multipart([self._master, codec.encode(event)])


def speak(folder: str, args: argparse.Namespace, parent: int) -> None:
    """For all engines, as long as the parent is there."""
    allow_connections()
    context, clock = make_context(), time.monotonic
    speakers = [Speaker(context, f"ipc://{folder}/{i}", f"e{i}") for i in range(args.instances)]
    busy, changes = not isfinite(args.requests), 2 * args.requests  # arrivals and ends
    every = SNAPSHOT if busy else REPORT_INTERVAL
    due = [(clock() + random.random() * every, i, False) for i in range(args.instances)]  # when, whose, a change
    due += [(clock() + random.expovariate(changes), i, True) for i in range(args.instances) if 0 < changes < inf]
    heapq.heapify(due)
    listened = 0.0
    while os.getppid() == parent:
        now = clock()
        if now - listened > LISTEN:
            listened = now
            for speaker in speakers:
                speaker.hear(args.blocks)
        at, i, is_change = due[0]
        if at > now:
            time.sleep(min(0.005, at - now))
            continue
        heapq.heappop(due)
        speaker = speakers[i]
        if is_change:
            if not speaker.changed:
                heapq.heappush(due, (max(now, speaker.told + SNAPSHOT), i, False))
            speaker.request(caches=args.blocks > 0 and random.random() < 0.5)
            heapq.heappush(due, (at + random.expovariate(changes), i, True))
            continue
        speaker.changed |= busy
        if speaker.changed or now - speaker.told >= 0.99 * every:
            speaker.tell(now)
            heapq.heappush(due, (now + every, i, False))


async def listen(folder: str, args: argparse.Namespace) -> str:
    """Be the master; what that took."""
    registry = LocalRegistry([Endpoint(f"e{i}", f"ipc://{folder}/{i}") for i in range(args.instances)])
    policies = BUNDLES[args.policy].make(Circumstances())
    pump = make_master(make_context(), registry, policies, 0, SystemClock())
    heard = count_events(pump)
    pump.start()
    deadline = time.monotonic() + PATIENCE
    while heard[CacheDelta] < args.instances:
        if time.monotonic() > deadline:
            raise SystemExit(f"{heard[CacheDelta]} of {args.instances} engines were heard of after {PATIENCE:g} s")
        await asyncio.sleep(0.2)
    collect_rarely()
    heard.clear()
    cpu, began, late = time.process_time(), time.monotonic(), list[float]()
    while (before := time.monotonic()) - began < args.seconds:
        await asyncio.sleep(0.05)
        late.append(time.monotonic() - before - 0.05)
    share, took = time.process_time() - cpu, time.monotonic() - began
    with open("/proc/self/statm") as file:
        memory = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20
    late.sort()
    await pump.close()
    told = heard[CacheDelta] * EMPTY + heard["keys"] * KEY
    return (
        f"{heard[Snapshot] / took:.0f} snapshots and {heard[CacheDelta] / took:.0f} deltas a second "
        f"({told / took / 1e3:.0f} kB/s): "
        f"{100 * share / took:.0f} % of a core, {memory} MiB, "
        f"event loop late by {1e3 * late[int(0.99 * len(late))]:.1f} ms (p99)"
    )


def count_events(pump: MasterPump) -> Counter[Any]:
    """Of each kind, from now on; and of keys in deltas."""
    heard: Counter[Any] = Counter()
    handle = pump.handle

    def counted(happening: object) -> None:
        event = getattr(happening, "event", None)
        heard[type(event)] += 1
        if isinstance(event, CacheDelta):
            heard["keys"] += len(event.added) + len(event.removed)
        handle(happening)  # type: ignore[arg-type]

    pump.handle = counted  # type: ignore[method-assign]
    return heard


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instances", type=int, default=1000)
    parser.add_argument("--requests", type=float, default=0.2, help="a second, that each instance gets; inf for always")
    parser.add_argument("--blocks", type=int, default=1000, help="in each instance's prefix cache")
    parser.add_argument("--policy", choices=sorted(BUNDLES), default="unified")
    parser.add_argument("--seconds", type=float, default=15.0)
    args = parser.parse_args()
    logging.getLogger("penstock").setLevel(logging.ERROR)
    allow_connections()
    with tempfile.TemporaryDirectory() as folder:
        engines = get_context("fork").Process(target=speak, args=(folder, args, os.getpid()), daemon=True)
        engines.start()
        try:
            print(uvloop.run(listen(folder, args)))
        finally:
            engines.kill()
            engines.join()


if __name__ == "__main__":
    main()
