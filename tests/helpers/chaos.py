"""What tests of failures need of a deployment of paced engines: load, the phases of a hand-off, and what must be true
of every process once all is quiet again."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import zmq

from penstock.bench.client import Call, Client
from penstock.bench.metrics import ClientRecord
from penstock.bench.server import Model, find_model
from penstock.bench.verify import Verification, verify
from penstock.core.layout import KVLayout
from penstock.core.wire import codec
from penstock.core.wire.engine import LEASE, Command, Event, Hello, Inspect, Inspection, Ready
from penstock.core.wire.master import Ended, Join, Place, Placed, decode_from_master
from penstock.drill.holdings import BUSY, FILES_OF_LINK, SPARE_FILES, ask, open_files, pool_inodes
from penstock.drill.launched import EXPECTED
from penstock.service.flight import peers_of
from penstock.transfer.kv_pool_client import pool_status
from penstock.transfer.pool import shared_pool
from tests.helpers.deployments import PACED, UpProcesses, deployed
from tests.helpers.waiting import eventually

BLOCKS = 256  # of each engine: few enough to be used again and again
# a step of 128 prompt tokens or of a few decodes takes about 30 ms: a phase is long beside the time to notice it
UNHURRIED = PACED | {"slowdown": 8, "kv-blocks": BLOCKS, "max-num-batched-tokens": 128}
PHASES = {"reserve": "Reserve", "push": "Push", "commit": "Commit", "committed": "Committed"}
MARGIN = 3.0  # seconds that an error may come later than the lease
PATIENCE = 45.0  # seconds after which an answer that has not ended is taken for a hang
MOONCAKES_FILES = 8  # these, when they are needed, and those to its last incarnation


@contextlib.contextmanager
def paced(
    kind: str = "shared", prefill: int = 1, decode: int = 1, faults: Mapping[str, Any] | None = None, **top: Any
) -> Iterator[Chaos]:
    """A deployment that restarts at once whatever dies, and that leaves nothing behind at its end."""
    transport = {"kind": kind, "lease": LEASE} | ({"faults": dict(faults)} if faults else {})
    content = {
        "model": "demo",
        "engine": UNHURRIED,
        "instances": [{"role": "prefill", "count": prefill}, {"role": "decode", "count": decode}],
        "policy": "least_loaded",  # all requests are handed over
        "transport": transport,
        "kv-pool": {"orphans": 3},
        "restart": {"backoff": 1e-6, "limit": 1000},
    }
    shm = shared_memory()
    with deployed(content | top) as up:
        chaos = Chaos(up)
        yield chaos
        chaos.stop()
        eventually(lambda: shared_memory() <= shm, what=lambda: str(shared_memory() - shm))


def shared_memory() -> set[str]:
    """Names of what is there; but for the semaphores of process pools, which other tests have."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.mp-")}


class Chaos:
    """
    Args:
        links: that an engine may come to have beyond those that it has at first.

    Attributes:
        up: the deployment.
        names: of all its processes.
        expected: what the exceptions that a process may show begin with.
    """

    def __init__(self, up: UpProcesses, links: int = 0) -> None:
        self.up = up
        self.expected = EXPECTED
        self.names = set(up.pids())
        self.frontends = sorted(name for name in self.names if name.startswith("frontend-"))
        self.engines = sorted(self.names - {"kv-pool", "master", *self.frontends})
        self.model = asyncio.run(served_model(up.url))
        roles = Counter(up.settings(name)["role"] for name in self.engines)
        links = max(links, max(roles.values()) - 1)  # to those of its role an instance has none before it fetches
        self._hands_over = len(roles) > 1 and up.settings("master")["policy"] == "least_loaded"  # all that come
        self._context = zmq.Context()
        self._files: dict[str, int] = {}
        transport = up.settings(self.engines[0])["transport"] or {}
        self._spare = SPARE_FILES + FILES_OF_LINK * links + MOONCAKES_FILES * (transport.get("kind") == "mooncake")
        self.start(self.bodies(2, tokens=4)).wait()  # so that everything is open that ever will be
        self.settle()
        self._files = {name: open_files(pid) for name, pid in up.pids().items()}

    # --- load

    def bodies(self, count: int, seed: int = 0, prompts: tuple[int, int] = (100, 1500), tokens: int = 60) -> list[Body]:
        """See `bodies`."""
        return bodies(self.model, count, seed, prompts, tokens)

    def start(self, bodies: Sequence[Body]) -> Load:
        return Load(self.up.urls, bodies)

    def run(self, bodies: Sequence[Body]) -> list[ClientRecord]:
        """Requests that all have to be answered in full."""
        load = self.start(bodies)
        records = load.wait()
        self.settle()
        assert not (failed := [r.detail for r in records if r.error]), f"{failed}{self.up.log()}"
        self.verify(load)
        return records

    def verify(self, load: Load) -> Verification:
        """No answer is wrong, neither the whole ones nor what came of the others."""
        result = asyncio.run(verified(self.up.url, self.model, load))
        assert result.differ == 0, result.differences
        return result

    # --- phases and deaths

    def reach(self, phase: str, mark: int) -> None:
        """Wait until a request is in that phase.

        Args:
            mark: lines of the log that were there before it was sent.
        """
        if phase == "decode":
            busy = eventually(lambda: next((n for n in self.engines if self._decodes(n)), None), what=self.up.log)
            steps = self._count(busy, "modelled_steps")
            eventually(lambda: self._count(busy, "modelled_steps") > steps + 3, what=self.up.log)
        else:
            said = f"stalled {PHASES[phase]} of "
            eventually(lambda: any(said in line for line in self.up.lines[mark:]), what=self.up.log)

    def _decodes(self, name: str) -> bool:
        return not name.startswith("prefill") and self._count(name, "running") > 0

    def _count(self, name: str, what: str) -> int:
        inspection = self.inspect(name)
        return inspection.counts[what] if inspection is not None else 0

    # --- when all is quiet

    def settle(self, timeout: float = 40) -> None:
        """Wait until every process runs, nobody holds anything and requests can be handed over again."""
        last: list[str] = []

        def quiet() -> bool:
            last[:] = self.troubles()
            return not last

        eventually(quiet, timeout, lambda: "; ".join(last) + self.up.log())

    def troubles(self) -> list[str]:
        """What an idle deployment has none of. AssertionError for what even a busy one must not have."""
        if missing := self.names - set(self.up.pids()):
            return [f"{', '.join(sorted(missing))}: not there"]
        found = []
        for name in self.engines:
            found += self._troubles_of_engine(name)
        found += self._troubles_of_kv_pool()
        found += [trouble for number in range(len(self.frontends)) for trouble in self._troubles_of_frontend(number)]
        found += self._troubles_of_master()
        for name, pid in self.up.pids().items():
            files, before = open_files(pid), self._files.get(name, 1 << 20)
            found += [f"{name}: {files} open files, {before} before"] * (files > before + self._spare)
        return found

    def _troubles_of_engine(self, name: str) -> list[str]:
        inspection = self.inspect(name)
        if inspection is None:
            return [f"{name}: does not answer"]
        counts = inspection.counts
        assert inspection.broken == "", f"{name}: {inspection.broken}: {counts}"
        found = [f"{name}: {counts[key]} {key}" for key in BUSY if counts.get(key)]
        blocks = counts["free_blocks"] + counts["idle_blocks"] + counts["spent_blocks"]
        return found or [f"{name}: {blocks} blocks"] * (blocks != BLOCKS)

    def _troubles_of_kv_pool(self) -> list[str]:
        status = pool_status(str(self.up.kv_pool_path))
        assert status.broken == "", status
        counts = {
            key: value for key, value in status.counts.items() if key.startswith(("held:", "orphaned", "clients"))
        }
        right = {"orphaned": 0, "clients": len(self.engines)} | {f"held:{name}": BLOCKS for name in self.engines}
        return [f"kv-pool: {counts}"] * (counts != right)

    def _troubles_of_frontend(self, number: int) -> list[str]:
        try:
            health = json.loads(self.up.get("/health", number))
            held = self.up.metric("num_requests_running", number) + self.up.metric("num_requests_waiting", number)
        except OSError as error:
            return [f"frontend-{number}: {error}"]
        found = [
            f"frontend-{number}: {i['name']} is {i['state']}" for i in health["instances"] if i["state"] != "ready"
        ]
        return found + [f"frontend-{number}: {held:g} requests"] * (held != 0)

    def _troubles_of_master(self) -> list[str]:
        """Whether it would have a request handed over, between lives that are there."""
        placed = self._place()
        if placed is None or (len(placed.route) < 2 and self._hands_over):
            return [f"master: {placed}"]
        lives = [(peer.name, peer.incarnation) for peer in peers_of(placed.route)]
        right = [(name, (self.inspect(name) or Inspection(0, {})).incarnation) for name, _ in lives]
        return [f"master: {lives}, right is {right}"] * (lives != right)

    def inspect(self, name: str) -> Inspection | None:
        """None when it does not answer."""
        answer = self._ask(name, Inspect(), Inspection)
        assert answer is None or isinstance(answer, Inspection)
        return answer

    def layout(self) -> KVLayout:
        """Of the engines' KV."""
        ready = self._ask(self.engines[0], Hello("probe", 1, "probe"), Ready)
        assert isinstance(ready, Ready)
        assert ready.layout is not None
        return ready.layout

    def _ask(self, name: str, command: Command, kind: type[Event]) -> Event | None:
        return ask(self._context, self.up.engine_address(name), command, kind)

    def _place(self) -> Placed | None:
        with self._context.socket(zmq.DEALER) as link:
            link.setsockopt(zmq.LINGER, 200)
            link.setsockopt(zmq.ROUTING_ID, b"probe")
            link.connect(self.up.settings("master")["address"])
            for message in (Join("probe", time.time_ns()), Place("probe", 10, 10, [])):
                link.send(codec.encode(message))
            placed = None
            while link.poll(1000):
                if isinstance(answer := decode_from_master(link.recv()), Placed):
                    placed = answer
                    break
            link.send(codec.encode(Ended(["probe"])))
        return placed

    # --- the end

    def stop(self) -> None:
        """End the deployment, and look for what it may have left. A test that has failed may leave it in the middle of
        anything, such as without a KV pool server: first all processes have to be there again, and the pool."""

        def whole() -> bool:
            assert self.up.process.poll() is None, f"the deployment has ended by itself{self.up.log()}"
            pids = self.up.pids()
            return self.names <= set(pids) and bool(pool_inodes(pids["kv-pool"]))

        eventually(whole, what=self.up.log)
        pids = self.up.pids()
        memory = pool_inodes(pids["kv-pool"])
        self._context.destroy(linger=0)
        assert self.up.stop() == 0, self.up.log()
        assert not [name for name, pid in pids.items() if Path(f"/proc/{pid}").exists()]
        assert not self.up.folder.exists(), "sockets are left"
        for process in Path("/proc").glob("[0-9]*"):
            assert not memory & pool_inodes(int(process.name)), f"{process.name} still has the pool"
        assert not [said for said in raised(self.up.lines) if not said.startswith(self.expected)]


Body = dict[str, Any]


@dataclass
class Load:
    """Requests that run while the test does something else.

    Attributes:
        at_once: of them, at most; each that ends makes way for the next.
        patience: seconds that `wait` waits for the end of all.
    """

    urls: Sequence[str]
    bodies: Sequence[Body]
    at_once: int = 1000
    patience: float = PATIENCE + 10
    records: list[ClientRecord] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._thread = threading.Thread(target=lambda: asyncio.run(self._send()), daemon=True)
        self._thread.start()

    async def _send(self) -> None:
        async with contextlib.AsyncExitStack() as stack:
            clients = [
                await stack.enter_async_context(Client(url, timeout=PATIENCE, keep_answers=True)) for url in self.urls
            ]
            calls = [
                Call(i, 0.0, msgspec.json.encode(body), len(body["prompt"]), body["max_tokens"])
                for i, body in enumerate(self.bodies)
            ]
            turns = asyncio.Semaphore(self.at_once)

            async def send(call: Call) -> ClientRecord:
                async with turns:
                    return await clients[call.number % len(clients)].send(call, time.monotonic())

            self.records = await asyncio.gather(*map(send, calls))

    @property
    def ended(self) -> bool:
        return not self._thread.is_alive()

    def wait(self) -> list[ClientRecord]:
        """All answers, whole or not."""
        self._thread.join(self.patience)
        assert not self._thread.is_alive()
        hung = [r.number for r in self.records if r.error == "timeout"]
        assert not hung, f"requests {hung} never ended"
        return self.records


def bodies(
    model: Model, count: int, seed: int = 0, prompts: tuple[int, int] = (100, 1500), tokens: int = 60
) -> list[Body]:
    """Requests, greedy and seeded, some of which begin alike.

    Args:
        prompts: the shortest and the longest, in tokens.
        tokens: of the longest answer.
    """
    rng = random.Random(seed)
    ids = model.sampled_ids
    assert ids is not None
    common = rng.choices(ids, k=prompts[1] // 2)
    made: list[Body] = []
    for i in range(count):
        prompt = common[: rng.choice([0, 64, len(common)])] + rng.choices(ids, k=rng.randint(*prompts))
        made.append(
            {
                "model": model.name,
                "prompt": prompt[: prompts[1]],
                "max_tokens": rng.randint(tokens // 2, tokens),
                "temperature": 0.9 * (i % 2),
                "seed": seed + i,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
                "return_token_ids": True,
            }
        )
    return made


async def served_model(url: str) -> Model:
    async with Client(url) as client:
        return await find_model(client, None)


async def verified(url: str, model: Model, load: Load) -> Verification:
    async with Client(url) as client:
        return await verify(client, model, load.bodies, load.records)


def raised(lines: Sequence[str]) -> list[str]:
    """The exceptions whose tracebacks are in a log; of several that led to each other, the last."""
    inside, found = False, []
    for line in lines:
        if line.startswith("Traceback "):
            inside = True
        elif inside and not line.startswith(" "):
            inside = False
            found.append(line)
        elif line.startswith(("The above exception was", "During handling of the above")):
            found.pop()
    return found


# --- a client of the KV pool server that is no engine


@contextlib.contextmanager
def borrower(chaos: Chaos) -> Iterator[Borrower]:
    settings = {"path": str(chaos.up.kv_pool_path), "layout": msgspec.to_builtins(chaos.layout())}
    command = [sys.executable, "-m", "tests.helpers.chaos", json.dumps(settings)]
    root = Path(__file__).parents[2]
    process = subprocess.Popen(command, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield Borrower(process, **json.loads(process.stdout.readline()))
    finally:
        process.kill()
        process.communicate()


@dataclass
class Borrower:
    """Holds blocks of its own, some of them published, and blocks that engines have published."""

    process: subprocess.Popen[str]
    own: int
    foreign: int

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


def main(path: str, layout: dict[str, Any]) -> None:
    """Attach, take hold of as much as there is, and wait until the end of input."""
    pool = shared_pool(path, "borrower", time.time_ns())(msgspec.convert(layout, KVLayout), 64)
    assert pool.client is not None
    rng = random.Random(1)
    mine = list(pool.blocks)
    for block in mine[:16]:
        pool.memory.block(block)[:] = bytes(pool.memory.block_bytes)
        pool.client.records.put(block, rng.randbytes(16), rng.randbytes(16), pool.memory.checksum(block))
    foreign = 0
    for block in range(4 * BLOCKS):
        record = pool.client.records.get(block)
        if record is not None and block not in mine[:16] and foreign < 32:
            foreign += pool.client.hold([(block, record.generation)], [mine[32 + foreign]])
    print(json.dumps({"own": 64 - foreign, "foreign": foreign}), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
