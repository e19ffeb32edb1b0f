"""Hosts that are network namespaces of this machine, linked by a bridge."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

import pytest


def _ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


NEEDS_IPV6 = pytest.mark.skipif(not _ipv6(), reason="this machine has no loopback with IPv6, ::1")


@dataclass(frozen=True, slots=True)
class Host:
    """
    Attributes:
        name: of its namespace.
        address: by which the others reach it.
    """

    name: str
    address: str

    @property
    def enter(self) -> tuple[str, ...]:
        """A command line's first words, with which the rest runs there."""
        return ("ip", "netns", "exec", self.name)

    def link(self, state: str) -> None:
        """Plug the cable in ("up"), or out ("down")."""
        ip("link", "set", f"{self.name}-br", state)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


def why_not() -> str:
    """Why there can be no hosts here; "" when there can."""
    if shutil.which("ip") is None:
        return "there is no ip (iproute2)"
    name = f"pst{os.getpid() % 10000}t"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode:
        return f"no network namespaces: {made.stderr.strip()}"
    bridge = subprocess.run(["ip", "link", "add", name, "type", "bridge"], capture_output=True, text=True, check=False)
    subprocess.run(["ip", "link", "del", name], capture_output=True, check=False)
    subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    return f"no bridges: {bridge.stderr.strip()}" if bridge.returncode else ""


@contextlib.contextmanager
def hosts(count: int, *, ipv6: bool = False) -> Iterator[list[Host]]:
    """Hosts that reach one another, and that this namespace reaches, by addresses of one family."""
    base = f"pst{os.getpid() % 10000}"
    own = os.getpid()
    net, size, more = f"10.{77 + own % 100}.{own // 100 % 250}.", "24", list[str]()
    if ipv6:  # which nobody else is asked about first
        net, size, more = f"fd77:{own % 0x10000:x}::", "64", ["nodad"]
    made: list[Host] = []
    ip("link", "add", base, "type", "bridge")
    try:
        ip("addr", "add", f"{net}254/{size}", "dev", base, *more)
        ip("link", "set", base, "up")
        for number in range(count):
            host = Host(f"{base}h{number}", f"{net}{number + 1}")
            ip("netns", "add", host.name)
            made.append(host)
            ip("link", "add", f"{host.name}-br", "type", "veth", "peer", "name", "eth0", "netns", host.name)
            ip("link", "set", f"{host.name}-br", "master", base, "up")
            ip("-n", host.name, "addr", "add", f"{host.address}/{size}", "dev", "eth0", *more)
            ip("-n", host.name, "link", "set", "eth0", "up")
            ip("-n", host.name, "link", "set", "lo", "up")
        yield made
    finally:
        for host in made:
            subprocess.run(["ip", "netns", "del", host.name], capture_output=True, check=False)
        subprocess.run(["ip", "link", "del", base], capture_output=True, check=False)
