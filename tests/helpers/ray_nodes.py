"""Ray nodes on this machine, each at a loopback address of its own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.helpers.waiting import eventually

ROOT = Path(__file__).parents[2]
LOOK = """
import json, sys, ray
from ray.util import list_named_actors
from ray.util.placement_group import placement_group_table
ray.init(sys.argv[1], log_to_driver=False, configure_logging=False)
groups = [group["name"] for group in placement_group_table().values() if group["state"] != "REMOVED"]
print(json.dumps({"actors": [actor["name"] for actor in list_named_actors(all_namespaces=True)], "groups": groups}))
"""


@dataclass
class RayNode:
    """
    Attributes:
        address: where others reach it.
        process: `ray start`, which ends with what it has started.
    """

    address: str
    process: subprocess.Popen[bytes]

    def raylet(self) -> int:
        """Its process id."""
        return next(pid for pid in _children(self.process.pid) if "raylet/raylet" in _command(pid))

    def kill(self) -> None:
        """As a node fails: none of its processes can do anything any more."""
        os.kill(self.raylet(), signal.SIGKILL)

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


@dataclass
class RayNodes:
    """
    Attributes:
        head: "HOST:PORT" by which drivers and nodes find the cluster.
    """

    head: str
    nodes: list[RayNode] = field(default_factory=list)

    def start(self, cpus: int, *more: str) -> RayNode:
        """One more node, which can be used when this returns."""
        address = f"127.0.0.{2 + len(self.nodes)}"
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]
        command += [f"--node-ip-address={address}", f"--num-cpus={cpus}", *more]
        command += [] if "--head" in more else [f"--address={self.head}"]
        # several nodes at loopback addresses are taken for those of a laptop, and refused without that word
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1"}
        process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        node = RayNode(address, process)
        self.nodes.append(node)

        def runs() -> bool:
            assert process.poll() is None, f"ray start ended with {process.returncode}"
            return any("raylet/raylet" in _command(pid) for pid in _children(process.pid))

        eventually(runs, 60)
        return node

    def left(self) -> dict[str, Any]:
        """Names of the "actors" and placement "groups" that there are."""
        done = subprocess.run([sys.executable, "-c", LOOK, self.head], capture_output=True, text=True, check=True)
        return json.loads(done.stdout.splitlines()[-1])


@contextlib.contextmanager
def ray_nodes(*cpus: int) -> Iterator[RayNodes]:
    """A cluster of nodes with so many CPUs each."""
    ports = [_free_port() for _ in range(2)]
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        cluster = RayNodes(f"127.0.0.2:{ports[0]}")
        try:
            head = ("--head", f"--port={ports[0]}", f"--ray-client-server-port={ports[1]}", "--include-dashboard=false")
            cluster.start(cpus[0], *head, f"--temp-dir={folder}")
            for more in cpus[1:]:
                cluster.start(more)
            yield cluster
        finally:
            for node in reversed(cluster.nodes):
                node.stop()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""
