"""An etcd of three members on this machine, from Debian's package."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import tempfile
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from penstock.core.host_port import join_host_port
from tests.helpers.network import Host
from tests.helpers.waiting import eventually

PACKAGE = "etcd-server"


def executable() -> str:
    """Installed, or fetched into a folder of its own, which needs no root. Skips the test where there is none."""
    if found := shutil.which("etcd"):
        return found
    folder = Path(tempfile.gettempdir()) / "penstock-test-etcd"
    unpacked = folder / "usr" / "bin" / "etcd"
    if not unpacked.exists():
        with tempfile.TemporaryDirectory() as fetched:
            try:
                subprocess.run(
                    ["apt-get", "download", PACKAGE], cwd=fetched, check=True, capture_output=True, timeout=60
                )
                (archive,) = Path(fetched).glob("*.deb")
                subprocess.run(["dpkg", "-x", str(archive), str(folder)], check=True, capture_output=True)
            except (OSError, ValueError, subprocess.SubprocessError) as error:
                pytest.skip(f"there is no etcd, and {PACKAGE} cannot be fetched: {error}")
    return str(unpacked)


@dataclass
class Members:
    """
    Attributes:
        clients: "HOST:PORT" for clients, of each member.
    """

    clients: list[str]
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def address(self) -> str:
        return "etcd://" + ",".join(self.clients) + "/test"

    def kill(self, number: int) -> None:
        self.processes[number].kill()
        self.processes[number].wait()

    def healthy(self, number: int) -> bool:
        with contextlib.suppress(OSError):
            url = f"http://{self.clients[number]}/health"
            return b'"true"' in urllib.request.urlopen(url, timeout=2).read()
        return False


@contextlib.contextmanager
def three_members(hosts: Sequence[Host] = (), loopback: str = "127.0.0.1") -> Iterator[Members]:
    """
    Args:
        hosts: of each member; by default this one is for all, at its `loopback`.
    """
    program = executable()
    ports = _free_ports(6)
    places = [host.address for host in hosts] or [loopback] * 3
    members = Members([join_host_port(*place) for place in zip(places, ports[:3], strict=True)])
    peers = [f"http://{join_host_port(*place)}" for place in zip(places, ports[3:], strict=True)]
    names = [f"m{i}={peer}" for i, peer in enumerate(peers)]
    with tempfile.TemporaryDirectory() as folder:
        try:
            for number, (address, other) in enumerate(zip(members.clients, peers, strict=True)):
                client, enter = f"http://{address}", hosts[number].enter if hosts else ()
                words = [*enter, program, "--name", f"m{number}", "--data-dir", f"{folder}/{number}"]
                words += ["--listen-client-urls", client, "--advertise-client-urls", client]
                words += ["--listen-peer-urls", other, "--initial-advertise-peer-urls", other]
                words += ["--initial-cluster", ",".join(names)]
                with Path(folder, f"{number}.log").open("wb") as log:
                    members.processes.append(subprocess.Popen(words, stdout=log, stderr=log))
            eventually(lambda: all(map(members.healthy, range(3))), 30)
            yield members
        finally:
            for process in members.processes:
                process.kill()
                process.wait()


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [probe.getsockname()[1] for probe in probes]
