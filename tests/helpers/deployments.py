"""A real `penstock up` with its processes, and a way to get at each of them by name."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from tests.helpers.servers import READY, Served
from tests.helpers.waiting import eventually

# quick to start, and small
DEMO = {"device": "cpu", "dtype": "float32", "max-model-len": 4096, "max-num-seqs": 64}
DEMO |= {"max-num-batched-tokens": 512, "kv-cache-memory": "64M"}
# quicker still: no torch; about 4 ms a token
PACED = {
    "device": "modelled:h200",
    "geometry": "qwen3-8b",
    "max-model-len": 4096,
    "max-num-seqs": 64,
    "kv-blocks": 1024,
}


class UpProcesses(Served):
    """
    Attributes:
        folder: where the sockets of its processes are.
    """

    def __init__(
        self,
        file: Path,
        *arguments: str,
        instances: Sequence[str],
        new_group: bool = False,
        frontends: int = 1,
        models: int = 1,
    ) -> None:
        super().__init__("up", str(file), *arguments, new_group=new_group)
        try:
            for _ in range(frontends * models):
                self.wait_for(READY)
            self.urls = [f"http://127.0.0.1:{port}" for port in self._ports()]
            for instance in instances:
                eventually(partial(self._master_knows, instance), 90, self.log)
            for frontend in range(frontends):
                eventually(partial(self._has_all, frontend, set(instances)), 90, self.log)
            self.folder = Path(self.settings("frontend-0")["heartbeat"]).parent
        except BaseException:
            self.close()
            raise

    def _master_knows(self, instance: str) -> bool:
        return any(f"{instance} is ready: " in line for line in self.lines)

    def _has_all(self, frontend: int, instances: set[str]) -> bool:
        return self._ready(frontend) == instances

    def _ready(self, frontend: int) -> set[str]:
        """Instances that a frontend is connected to; it serves as soon as it is to one."""
        said = json.loads(self.get("/health", frontend))["instances"]
        return {instance["name"] for instance in said if instance["state"] == "ready"}

    def _ports(self) -> list[int]:
        names = sorted((n for n in self.pids() if n.startswith("frontend-")), key=lambda n: int(n.split("-")[1]))
        return [self.settings(name)["server"]["port"] for name in names]

    # --- the processes

    @property
    def kv_pool_path(self) -> Path:
        return self.folder / "kv-pool"

    def engine_address(self, name: str) -> str:
        """ZMQ endpoint of an engine."""
        return f"ipc://{self.folder / name}"

    def kill(self, name: str, how: int = signal.SIGKILL) -> int:
        """Send a signal and return the process id that got it."""
        pid = self.pids()[name]
        os.kill(pid, how)
        return pid

    def wait_restarted(self, name: str, earlier: int, timeout: float = 30) -> int:
        """Wait until another process than `earlier` has that name; returns its id."""
        eventually(lambda: self.pids().get(name, earlier) != earlier, timeout, self.log)
        return self.pids()[name]

    def close(self) -> None:
        """Make an end, whatever the state."""
        if self.process.poll() is None:
            try:
                self.stop()
            except subprocess.TimeoutExpired:
                self.process.kill()  # the others end when they see it
                self.process.wait()


@contextlib.contextmanager
def deployed(content: Mapping[str, Any] | Path, *arguments: str, new_group: bool = False) -> Iterator[UpProcesses]:
    """A deployment that serves, on free ports.

    Args:
        content: of the file, or an existing file.
        arguments: further flags of `penstock up`.
        new_group: so that a signal can be sent to the whole group.
    """
    with tempfile.TemporaryDirectory() as folder:
        if isinstance(content, Path):
            file, settings = content, yaml.safe_load(content.read_text())
        else:
            file, settings = Path(folder) / "up.yaml", content
            file.write_text(yaml.safe_dump(dict(content), sort_keys=False))
        frontends = settings.get("frontends", 1)
        names = instance_names(settings)
        models = len(settings.get("models", [settings]))
        up = UpProcesses(file, *arguments, instances=names, new_group=new_group, frontends=frontends, models=models)
        try:
            yield up
        finally:
            up.close()


def instance_names(content: Mapping[str, Any]) -> list[str]:
    """Of those that are started at first."""
    names = []
    for model in content.get("models", [content]):
        prefix = f"{model['name']}/" if "models" in content else ""
        for group in model["instances"]:
            role = group.get("role", "any")
            name = group.get("name", "engine" if role == "any" else role)
            groups = {**model.get("engine", {}), **group}.get("data-parallel-size", 1)
            names += [f"{prefix}{name}-{number}" for number in range(group.get("count", 1) * groups)]
    return names


def colocated(count: int = 2, **top: Any) -> dict[str, Any]:
    """Demo engines that do all of the work each. With `engine=PACED`, modelled ones; so below."""
    return {"model": "demo", "engine": DEMO, "instances": [{"count": count}]} | top


def disaggregated(prefill: int = 1, decode: int = 1, kind: str = "shared", **top: Any) -> dict[str, Any]:
    """Demo engines, for prompts and for answers; unless `top` says otherwise all requests are handed over."""
    instances = [{"role": "prefill", "count": prefill}, {"role": "decode", "count": decode}]
    content = {"model": "demo", "engine": DEMO, "instances": instances, "transport": {"kind": kind}}
    return content | {"policy": "least_loaded"} | top
