"""What the processes of a deployment hold when nothing is to be done, and what is left of one that has ended."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import zmq

from penstock.core.errors import Unavailable
from penstock.core.wire import codec
from penstock.core.wire.engine import Command, Event, Inspect, Inspection, decode_event
from penstock.service.curve import Curve
from penstock.transfer.kv_pool_client import pool_status

ANSWER_MS = 2000  # that a process has to say what it holds
SPARE_FILES = 2  # that a process may have open beyond what it had at first
FILES_OF_LINK = 4  # connections to each peer
GROWTH = 1.25  # of a process's own memory, from when the load has run for a while to its end
SPARE_MEMORY = 32 << 20  # bytes that it may grow by in any case
# what an idle engine has none of
BUSY = (
    "running", "waiting", "migrating", "owners", "outgoing", "incoming", "pulls", "held_blocks", "mapped_blocks",
    "transfer_blocks", "used", "live",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Holdings:
    """
    Attributes:
        files: process -> descriptors that it has open.
        ports: TCP ports at which any of them listens.
        busy: one line on each thing that an idle deployment has none of.
    """

    files: Mapping[str, int] = field(default_factory=dict)
    ports: frozenset[int] = frozenset()
    busy: tuple[str, ...] = ()


def look(
    pids: Mapping[str, int], engines: Mapping[str, str], kv_pools: Mapping[str, str], secret: str | None = None
) -> Holdings:
    """
    Args:
        pids: of all processes, by name.
        engines: ZMQ endpoint of each, by name.
        kv_pools: socket of each KV pool server.
        secret: of the deployment, where its links need one.
    """
    busy = [each for name, endpoint in engines.items() for each in _of_engine(name, inspect(endpoint, secret))]
    busy += [each for name, path in kv_pools.items() for each in _of_kv_pool(name, path, engines)]
    return Holdings(
        files={name: open_files(pid) for name, pid in pids.items()},
        ports=listening(pids.values()),
        busy=tuple(busy),
    )


def more_than(before: Holdings, now: Holdings, links: int = 0) -> list[str]:
    """One line on each thing that is held now and was not, or that no idle deployment holds. Empty is as it should be.

    Args:
        links: to peers that a process may have come to need.
    """
    found = list(now.busy)
    found += [f"{name}: it does not run" for name in before.files if name not in now.files]
    found += [f"{name}: it runs, and did not at first" for name in now.files if name not in before.files]
    spare = SPARE_FILES + FILES_OF_LINK * links
    for name, files in now.files.items():
        if files > before.files.get(name, files) + spare:
            found.append(f"{name}: {files} open files, {before.files[name]} at first")
    if more := len(now.ports) - len(before.ports):
        found += [f"{more} more ports than at first: {sorted(now.ports)}"] * (more > 0)
    return found


def _of_engine(name: str, inspection: Inspection | None) -> list[str]:
    if inspection is None:
        return [f"{name}: it does not say what it holds"]
    broken = [f"{name}: {inspection.broken}"] * bool(inspection.broken)
    return broken + [f"{name}: {inspection.counts[key]} {key}" for key in BUSY if inspection.counts.get(key)]


def _of_kv_pool(name: str, path: str, engines: Iterable[str]) -> list[str]:
    try:
        status = pool_status(path)
    except Unavailable as error:
        return [f"{name}: {error}"]
    strangers = [key for key in status.counts if key.startswith("held:") and key.removeprefix("held:") not in engines]
    found = [f"{name}: {status.counts[key]} blocks of {key.removeprefix('held:')}" for key in strangers]
    return found + [f"{name}: {status.broken}"] * bool(status.broken)


def inspect(endpoint: str, secret: str | None = None) -> Inspection | None:
    """What an engine says; None when it does not answer."""
    with zmq.Context() as context:
        answer = ask(context, endpoint, Inspect(), Inspection, None if secret is None else Curve(secret))
    assert answer is None or isinstance(answer, Inspection)
    return answer


def ask(
    context: zmq.Context[zmq.Socket[bytes]],
    endpoint: str,
    command: Command,
    kind: type[Event],
    curve: Curve | None = None,
) -> Event | None:
    """The first event of a kind that an engine answers a command with; None when none comes."""
    with context.socket(zmq.DEALER) as link:
        link.setsockopt(zmq.LINGER, 0)
        link.setsockopt(zmq.ROUTING_ID, b"probe")
        if curve is not None:
            curve.connect(link)
        link.connect(endpoint)
        link.send(codec.encode(command))
        while link.poll(ANSWER_MS):
            event = decode_event(link.recv())
            if isinstance(event, kind):
                return event
    return None


# --- what the system says of processes


def open_files(pid: int) -> int:
    try:
        return len(os.listdir(f"/proc/{pid}/fd"))
    except (FileNotFoundError, ProcessLookupError):
        return 0


def own_memory(pid: int) -> int:
    """Bytes that a process has to itself (anonymous PSS); 0 when it has gone."""
    with contextlib.suppress(OSError):
        found = re.search(r"Pss_Anon:\s+(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text())
        return int(found[1]) << 10 if found else 0
    return 0


def grown(samples: Mapping[str, Sequence[tuple[float, int, int]]]) -> list[str]:
    """Processes that lived through all of a run, and that hold far more memory at its end than in its middle.

    Args:
        samples: process -> (time, process id, bytes), in order of time.
    """
    found = []
    for name, rows in samples.items():
        if len(rows) < 2 or len({pid for _, pid, _ in rows}) > 1:
            continue
        middle = rows[len(rows) // 2][2]
        if rows[-1][2] > max(GROWTH * middle, middle + SPARE_MEMORY):
            found.append(f"{name}: {rows[-1][2] >> 20} MiB at the end, {middle >> 20} in the middle")
    return found


def listening(pids: Iterable[int]) -> frozenset[int]:
    """TCP ports at which any of them listens."""
    found: set[int] = set()
    for pid in pids:
        inodes = set()
        with contextlib.suppress(OSError):
            for descriptor in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    inodes.add(os.readlink(f"/proc/{pid}/fd/{descriptor}"))
            for table in ("tcp", "tcp6"):
                for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                    words = line.split()
                    if words[3] == "0A" and f"socket:[{words[9]}]" in inodes:
                        found.add(int(words[1].rpartition(":")[2], 16))
    return frozenset(found)


def pool_inodes(pid: int) -> set[int]:
    """Of the KV memory that a process has open or mapped."""
    found = set()
    with contextlib.suppress(OSError):
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                if "memfd:penstock" in os.readlink(f"/proc/{pid}/fd/{fd}"):
                    found.add(os.stat(f"/proc/{pid}/fd/{fd}").st_ino)
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            if "memfd:penstock" in line:
                found.add(int(line.split()[4]))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Marks:
    """By what the remains of a deployment are found, once it has ended; taken while it runs."""

    pids: Mapping[str, int]
    memory: frozenset[int]
    folders: frozenset[Path]

    @classmethod
    def of(cls, pids: Mapping[str, int], folders: Iterable[Path]) -> Marks:
        """
        Args:
            folders: for its temporary files, and for nothing else.
        """
        memory = frozenset(inode for pid in pids.values() for inode in pool_inodes(pid))
        return cls(pids=dict(pids), memory=memory, folders=frozenset(folders))

    def left(self) -> list[str]:
        """One line on each thing that is still there."""
        found = [f"{name}: process {pid} is left" for name, pid in self.pids.items() if Path(f"/proc/{pid}").exists()]
        for process in Path("/proc").glob("[0-9]*"):
            if self.memory & pool_inodes(int(process.name)):
                found.append(f"process {process.name} still has the KV pool's memory")
        return found + [f"{path} is left" for folder in self.folders for path in sorted(folder.glob("penstock-*"))]
