"""`penstock up --apply` where other hosts have joined: all of them change under load, or all return."""

import contextlib
import os
import re
import signal
import threading
import time
from pathlib import Path

import pytest
import yaml

from penstock.drill.launched import told
from tests.e2e.test_apply import Applying, apply, checkpoints, ready, stream, under_load
from tests.e2e.test_fleet import free_port, joined
from tests.helpers.deployments import DEMO, PACED, colocated, deployed
from tests.helpers.servers import serving
from tests.helpers.waiting import eventually

__all__ = ["checkpoints"]
pytestmark = pytest.mark.slow
REAL = DEMO | {"kv-cache-memory": "32M", "weight-cache": False}
OLD, NEW = {"engine-0", "near-0", "far-0", "far-1"}, {"engine-0.1", "near-0.1", "far-0.1", "far-1.1"}


class Hosts:
    """The deployment with a host that has one instance, and a host that has two, all on loopback."""

    def __init__(self, stack, folder, checkpoints, engine):
        self.stack, self.folder, self.checkpoints, self.engine = stack, folder, checkpoints, engine
        self.cluster = {"host": "127.0.0.1", "port": free_port(), "secret": "of these hosts"}
        self.up = stack.enter_context(deployed(self.content("old")))
        self.near = self.join("near", 1)
        self.far = self.join("far", 2)
        self.await_ready(OLD)

    def content(self, checkpoint, **more):
        model = {"model": str(self.checkpoints / checkpoint), "served-model-name": "demo", "cluster": self.cluster}
        return colocated(1, engine=self.engine, policy="round_robin", transport={"kind": "tcp"}) | model | more

    def join(self, name, count, checkpoint="old"):
        content = self.content(checkpoint, instances=[{"name": name, "count": count}])
        del content["served-model-name"]  # it is the first host's
        cluster, where = content.pop("cluster"), f"127.0.0.1:{self.cluster['port']}"
        (folder := self.folder / f"{name}-{time.monotonic_ns()}").mkdir()
        return self.stack.enter_context(joined(folder, where, cluster, **content))

    def await_ready(self, wanted, seconds=120):
        eventually(lambda: ready(self.up) == wanted, seconds, self.log)
        eventually(lambda: self.running().keys() == wanted, 30, self.log)

    def running(self):
        """Engines with a process, of all hosts -> their checkpoints."""
        found = {}
        for host in (self.up, self.near, self.far):
            if host.process.poll() is None:
                engines = [(name, said) for name, said in told(host.process.pid).values() if "options" in said]
                found |= {name: Path(said["options"]["model"]).name for name, said in engines}
        return found

    def log(self):
        return "\n".join(f"{name}:{getattr(self, name).log()}" for name in ("up", "near", "far"))

    def doors(self):
        """Ports on which the launchers listen."""
        return sum(listening(host.process.pid) for host in (self.up, self.near, self.far))


def pids_of(launcher):
    return {name: pid for pid, (name, _) in told(launcher).items()}


def listening(launcher):
    """How many sockets of a process wait for connections over TCP."""
    inodes = {line.split()[9] for line in Path("/proc/net/tcp").read_text().splitlines()[1:] if line.split()[3] == "0A"}
    held = {os.readlink(link) for link in Path(f"/proc/{launcher}/fd").iterdir() if link.is_symlink()}
    return len({f"socket:[{inode}]" for inode in inodes} & held)


def kill_when_it_starts(hosts, host, name):
    """An engine, once."""

    def kill():
        launcher = getattr(hosts, host).process
        while name not in pids_of(launcher.pid):
            time.sleep(0.01)
        os.kill(pids_of(launcher.pid)[name], signal.SIGKILL)

    threading.Thread(target=kill, daemon=True).start()


@pytest.fixture
def hosts(tmp_path, checkpoints, request):
    with contextlib.ExitStack() as stack:
        yield Hosts(stack, tmp_path, checkpoints, getattr(request, "param", PACED))


@pytest.mark.parametrize("hosts", [PACED, REAL], ids=["paced", "demo"], indirect=True)
def test_all_hosts_change_under_load_and_return_where_one_of_them_cannot(hosts, tmp_path):
    up, before, doors = hosts.up, stream(hosts.up.url), hosts.doors()
    assert doors == 1 + len(OLD)  # frontend, and a door for each engine
    with under_load(up) as load:
        code, said = apply(up, tmp_path, hosts.content("new"), "--check")
        assert code == 0, said
        assert re.search(r"^\S+/\d+: far-1 is replaced: model$", said, re.M), said
        kill_when_it_starts(hosts, "far", "far-1.1")
        code, said = apply(up, tmp_path, hosts.content("new"))
        assert code == 1, said
        assert re.search(r"far-1.1 is not fit to serve \(it ended with SIGKILL", said), said
        hosts.await_ready({"engine-0", "near-0", "far-0", "far-1"})
    assert set(load.texts) >= {before}
    with under_load(up) as load:
        code, said = apply(up, tmp_path, hosts.content("new"))
        assert code == 0, said + hosts.log()
        hosts.await_ready(NEW)
        after = stream(up.url)
        assert {*hosts.running().values()} == {"new"}
    assert hosts.engine is PACED or before != after
    assert set(load.texts) == {before, after}
    assert hosts.doors() == doors
    late = hosts.join("late", 1)
    late.wait_for("its checkpoint is another one than that of")
    assert late.process.wait(60) == 2
    for host in (hosts.near, hosts.far, up):
        assert host.stop() == 0


def await_process(hosts, host, name):
    """Process id of an engine that has just been started."""
    launcher = getattr(hosts, host).process
    eventually(lambda: name in pids_of(launcher.pid), 60, hosts.log)
    return pids_of(launcher.pid)[name]


def test_a_launcher_that_is_killed_or_stands_still_or_the_masters_in_the_middle(hosts, tmp_path):
    up = hosts.up
    with under_load(up) as load:
        # the host that changes is killed with its launcher: all others return
        applying = Applying(up, tmp_path, hosts.content("new"))
        await_process(hosts, "near", "near-0.1")
        hosts.near.process.kill()
        code, said = applying.end()
        assert code == 1, said
        assert "it has left, or cannot be reached" in said
        hosts.near = hosts.join("near", 1)
        hosts.await_ready(OLD)
        # the master: nobody notices
        applying = Applying(up, tmp_path, hosts.content("new"))
        await_process(hosts, "far", "far-1.1")
        up.kill("master")
        code, said = applying.end()
        assert code == 0, said + hosts.log()
        hosts.await_ready(NEW)
        # a launcher that stands still in the middle: all return, and it does once it can
        applying = Applying(up, tmp_path, hosts.content("old"))
        await_process(hosts, "far", "far-0")
        hosts.far.process.send_signal(signal.SIGSTOP)
        code, said = applying.end()
        assert code == 1, said
        hosts.far.process.send_signal(signal.SIGCONT)
        hosts.await_ready(NEW)
        assert {*hosts.running().values()} == {"new"}
    assert not load.failures
    for host in (hosts.near, hosts.far, up):
        assert host.stop() == 0


@pytest.mark.parametrize("begun", ["old", "new"])
def test_a_deployment_that_is_begun_again_in_the_middle_is_finished_or_returned(hosts, tmp_path, begun):
    """Its launcher was killed: hosts that joined do what the next one serves."""
    applying = Applying(hosts.up, tmp_path, hosts.content("new"))
    await_process(hosts, "far", "far-1.1")
    hosts.up.process.kill()
    applying.end()
    hosts.up.process.wait()
    (file := tmp_path / "again.yaml").write_text(yaml.safe_dump(hosts.content(begun)))
    hosts.up = hosts.stack.enter_context(serving(str(file), command="up"))
    wanted = {"engine-0", *(name for name in (NEW if begun == "new" else OLD) if "engine" not in name)}
    eventually(lambda: {*hosts.running().values()} == {begun}, 90, hosts.log)
    eventually(lambda: len(ready(hosts.up)) == len(wanted), 60, hosts.log)
    assert ready(hosts.up) == hosts.running().keys()
    stream(hosts.up.url)
