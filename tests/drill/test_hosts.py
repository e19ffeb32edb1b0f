"""Hosts that are namespaces: what is cut, full or away is so for those that it was done to, until it is undone."""

import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from penstock.core.errors import PenstockError
from penstock.drill.hosts import LINK, Hosts, why_not

PORT = 7000
SERVER = f"import socket; s = socket.create_server(('', {PORT})); print(flush=True)\nwhile True: s.accept()"
CLIENT = f"import socket, sys; socket.create_connection((sys.argv[1], {PORT}), float(sys.argv[2]))"


def reaches(hosts, one, other, patience="5"):
    words = [*hosts.enter(one), sys.executable, "-S", "-c", CLIENT, hosts.addresses[other], patience]
    return subprocess.run(words, capture_output=True, check=False).returncode == 0


def links():
    return {name for name in os.listdir("/sys/class/net") if name.startswith(LINK)}


def test_cables_are_cut_and_disks_are_full_until_that_is_undone(tmp_path):
    if why := why_not(cables=True):
        pytest.skip(why)
    before = links()
    disk, other = tmp_path / "disk", tmp_path / "other"
    for folder in (disk, other):
        folder.mkdir()
        (folder / "ours").touch()
    with ExitStack() as stack:
        hosts = stack.enter_context(Hosts(3, disk))
        for host in range(3):
            words = [*hosts.enter(host), sys.executable, "-S", "-c", SERVER]
            server = subprocess.Popen(words, stdout=subprocess.PIPE)
            stack.callback(server.communicate)
            stack.callback(server.kill)
            server.stdout.readline()
        assert reaches(hosts, 1, 2)
        with hosts.cut(1, 2):
            assert not reaches(hosts, 1, 2, "0.3")
            assert not reaches(hosts, 2, 1, "0.3")
            assert reaches(hosts, 0, 1)
            assert reaches(hosts, 2, 0)
        assert reaches(hosts, 1, 2)
        with hosts.cut(1, None):
            assert not reaches(hosts, 0, 1, "0.3")
            assert reaches(hosts, 0, 2)
        assert reaches(hosts, 0, 1)

        path = hosts.seen(1, disk) / "theirs"
        path.write_bytes(bytes(1 << 20))
        with hosts.full(1):
            with pytest.raises(OSError, match="No space"), path.open("ab", buffering=0) as file:
                file.write(bytes(1 << 16))
            (hosts.seen(2, disk) / "its own").write_bytes(bytes(1 << 16))
        path.write_bytes(bytes(2 << 20))
        with hosts.away(1, other):
            assert os.listdir(hosts.seen(1, other)) == []
            assert os.listdir(hosts.seen(2, other)) == os.listdir(other) == ["ours"]
        assert os.listdir(hosts.seen(1, other)) == ["ours"]
        assert os.listdir(disk) == ["ours"], "nothing of this machine's"
    assert links() <= before


def test_where_there_can_be_none_it_is_said_why(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert why_not(cables=True) == "there is no unshare (util-linux)"
    with pytest.raises(PenstockError, match="unshare"):
        Hosts(1, Path("/tmp")).__enter__()
