"""Two hosts, as network namespaces joined by a cable."""

import ctypes
import json
import os
import shutil
import subprocess
import threading
from contextlib import closing

import pytest

from penstock.core.wire.handoff import Commit, Lease, Missing
from penstock.transfer.pool import memfd_pool
from penstock.transfer.transports import open_transport
from tests.helpers.links import LAYOUT, NEEDS_MOONCAKE, End, far_process

CLONE_NEWNET = 0x40000000


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture
def hosts():
    """Names of two namespaces, with addresses 10.77.0.1 and 10.77.0.2."""
    if shutil.which("ip") is None:
        pytest.skip("needs the `ip` command")
    tag = os.getpid()
    names = (f"pst{tag}a", f"pst{tag}b")
    made = []
    try:
        for name in names:
            try:
                ip("netns", "add", name)
            except subprocess.CalledProcessError as error:
                pytest.skip(f"may not make network namespaces: {error.stderr.strip()}")
            made.append(name)
        try:
            ip("link", "add", "cable", "netns", names[0], "type", "veth", "peer", "name", "cable", "netns", names[1])
        except subprocess.CalledProcessError as error:
            pytest.skip(f"may not make a veth pair: {error.stderr.strip()}")
        for number, name in enumerate(names):
            ip("-n", name, "address", "add", f"10.77.0.{number + 1}/24", "dev", "cable")
            ip("-n", name, "link", "set", "cable", "up")
        yield names
    finally:
        for name in made:
            ip("netns", "delete", name)


def in_host(name: str, work) -> None:
    """Runs `work` with this thread, and those that it starts, on that host."""

    def run() -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        descriptor = os.open(f"/run/netns/{name}", os.O_RDONLY)
        try:
            assert libc.setns(descriptor, CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
        finally:
            os.close(descriptor)
        try:
            work()
        except BaseException as error:
            failed.append(error)

    failed: list[BaseException] = []
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]


@pytest.mark.parametrize("kind", ["tcp", pytest.param("mooncake", marks=NEEDS_MOONCAKE)])
def test_blocks_cross_from_host_to_host_until_the_cable_is_cut(hosts, kind, tmp_path, monkeypatch):
    near, there = hosts
    prefix = ("ip", "netns", "exec", there)
    monkeypatch.setenv("MC_TCP_STATUS_TIMEOUT_SEC", "1")

    def work() -> None:
        with (
            far_process(kind, tmp_path, where="tcp:10.77.0.2:0", prefix=prefix) as (far, peer),
            closing(memfd_pool(LAYOUT, 200)) as pool,
            closing(open_transport(kind, "tcp:10.77.0.1:0", "a", 1, LAYOUT, pool)) as transport,
        ):
            assert peer.address.startswith("tcp:10.77.0.2:")
            end = End(transport, pool, "a", 1)
            for index in range(200):
                end.fill(index, index)
                end.push(peer, index, index)
            transport.send(peer, Commit(Lease("r", 0), 200, [1], 0, 0.0, 0.0))
            end.until(lambda: end.arrivals)
            assert json.loads(far.stdout.readline()) == {"landed": 200, "right": 200}
            transport.send(peer, Missing(Lease("r", 0), [0, 1]))
            end.until(lambda: len(end.arrivals) == 3)
            assert end.land(end.arrivals[1], 5) == 5
            ip("-n", there, "link", "set", "cable", "down")
            assert end.land(end.arrivals[2], 6) == (6 if kind == "tcp" else None)  # what came with the message is here
            far.kill()

    in_host(near, work)
