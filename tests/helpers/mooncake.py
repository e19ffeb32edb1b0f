"""A Mooncake Store on this machine: its master, and a process that gives memory."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.helpers.waiting import eventually

OWNER = """
import sys, time
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
assert store.setup("127.0.0.1", "P2PHANDSHAKE", int(sys.argv[2]), 0, "tcp", "", sys.argv[1]) == 0
print("ready", flush=True)
time.sleep(3600)
"""


@dataclass
class MooncakeMaster:
    """
    Attributes:
        address: "HOST:PORT".
        flags: of the next start.
    """

    folder: Path
    flags: tuple[str, ...] = ()
    ports: tuple[int, int] = (0, 0)
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.ports[0]}"

    def start(self) -> None:
        import mooncake

        program = Path(mooncake.__file__).with_name("mooncake_master")
        program.chmod(0o755)
        self.ports = self.ports if self.ports[0] else _free_ports()
        words = [str(program), "--rpc_address=127.0.0.1", f"--rpc_port={self.ports[0]}"]
        words += [
            f"--metrics_port={self.ports[1]}",
            "--enable_metric_reporting=false",
            "--logtostderr=true",
            *self.flags,
        ]
        with (self.folder / "master.log").open("ab") as log:
            self.process = subprocess.Popen(words, stdout=log, stderr=log, cwd=self.folder)
        eventually(self.listens, 20)

    def listens(self) -> bool:
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", self.ports[0]), 1).close()
            return True
        return False

    def send(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


@contextlib.contextmanager
def mooncake_master(folder: Path, *flags: str) -> Iterator[MooncakeMaster]:
    master = MooncakeMaster(folder, flags)
    try:
        master.start()
        yield master
    finally:
        master.kill()


@contextlib.contextmanager
def memory_owner(address: str, size: int) -> Iterator[subprocess.Popen[str]]:
    words = [sys.executable, "-c", OWNER, address, str(size)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            while "ready" not in (line := process.stdout.readline()):
                assert line, "it has ended"
            yield process
        finally:
            process.kill()


def _free_ports() -> tuple[int, int]:
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2)]
        one, other = (probe.getsockname()[1] for probe in probes)
        return one, other
