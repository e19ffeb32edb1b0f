"""Instances come and go: a registry, what the master's process makes of launchers' reports, and what frontends hear."""

import socket

import msgspec
import pytest

from penstock.core.errors import ConfigError
from penstock.core.wire.engine import LEASE
from penstock.core.wire.master import Endpoint, HostRefused, HostReport, HostTaken, Members, StartInstance, StopInstance
from penstock.service import etcd
from penstock.service.etcd import EtcdRegistry
from penstock.service.instances import InstanceJoined, InstanceLeft
from penstock.service.launchers import AGAIN, GIVERS, Launchers
from penstock.service.master_pump import Roll
from penstock.service.registry import LocalRegistry, ToldRegistry

A, B, C = (Endpoint(name, f"tcp://{name}:1") for name in "abc")
MOVED = Endpoint("a", "tcp://elsewhere:1")


def test_who_watches_late_sees_all_and_then_each_change_once():
    registry, early, late = LocalRegistry([A]), [], []
    registry.watch(early.append)
    registry.put(B)
    registry.put(B)
    registry.watch(late.append)
    registry.put(MOVED)
    registry.remove("b", "gone")
    registry.remove("b", "gone")
    changes = [InstanceJoined(MOVED), InstanceLeft("b", "gone")]
    assert early == [InstanceJoined(A), InstanceJoined(B), *changes]
    assert late == [InstanceJoined(A), InstanceJoined(B), *changes]


class Wire:
    """From a master's roll to a frontend's registry; loses what it is told to."""

    def __init__(self):
        self.lossy = False
        self.frontend = ToldRegistry(lambda: self.roll.call(b"f"))

    def begin(self, incarnation, *instances):
        self.registry = LocalRegistry(instances)
        self.roll = Roll(incarnation, self.registry, self.send)
        self.join()

    def join(self):
        """What a frontend does every second."""
        self.frontend.expect(self.roll._incarnation, self.roll.sequence)

    def send(self, listener, message):
        if not self.lossy:
            self.frontend.hear(message)


def test_a_frontend_that_missed_something_asks_for_all():
    wire = Wire()
    wire.begin(1, A)
    assert wire.frontend.instances == {"a": A}
    wire.registry.put(B)
    assert wire.frontend.instances == {"a": A, "b": B}
    wire.lossy = True
    wire.registry.put(C)
    wire.lossy = False
    wire.registry.put(MOVED)  # it sees the gap
    assert wire.frontend.instances == {"a": MOVED, "b": B, "c": C}
    wire.lossy = True
    wire.registry.remove("a", "stopped")
    wire.lossy = False
    wire.join()
    assert "a" in wire.frontend.instances, "this master may not know all yet"
    wire.roll.complete()
    assert wire.frontend.instances == {"b": B, "c": C}


def test_what_a_new_master_does_not_know_yet_has_not_left():
    wire = Wire()
    wire.begin(1, A, B)
    wire.begin(2)
    assert wire.frontend.instances == {"a": A, "b": B}
    wire.registry.put(A)
    wire.registry.put(C)
    wire.registry.remove("c", "stopped")  # that is certain
    assert wire.frontend.instances == {"a": A, "b": B}
    wire.roll.complete()
    assert wire.frontend.instances == {"a": A}
    wire.frontend.hear(Members(1, 9, [B]))  # from before
    assert wire.frontend.instances == {"a": A}


class Hosts:
    def __init__(self, own=""):
        self.registry, self.told, self.taken, self.givers = LocalRegistry(), [], [], {}
        self.launchers = Launchers(self.registry, self._tell, givers=lambda: self.givers, own=own)

    def _tell(self, sender, message):
        if isinstance(message, HostTaken):
            self.taken.append(sender)
            self.told_givers = message.givers
        else:
            self.told.append((sender, message))

    def report(self, now, host, *instances, **more):
        self.launchers.hear(now, host.encode(), HostReport(host, 1, list(instances), **more))


def test_the_launcher_of_the_masters_host_only_stands_still_when_it_is_silent():
    """Were it gone, so would be the master; its instances serve on."""
    hosts = Hosts(own="one")
    hosts.report(0.0, "one", A)
    hosts.report(0.0, "two", B)
    hosts.launchers.tick(2 * LEASE)
    hosts.registry.look(lambda name: False)
    assert hosts.registry.instances == {"a": A}


def test_a_launcher_that_falls_silent_takes_its_instances_along():
    hosts, seen = Hosts(), []
    hosts.registry.watch(seen.append)
    hosts.report(0.0, "one", A, troubles={"a": "burnt"})
    hosts.report(0.0, "two", B, C)
    hosts.report(LEASE - 1, "one", A)
    hosts.report(LEASE - 1, "two", B)
    assert hosts.registry.instances == {"a": A, "b": B}, "it says that it has stopped one"
    hosts.report(LEASE + 1, "two", B, troubles={"b": "burnt"})
    hosts.launchers.tick(2 * LEASE)
    hosts.registry.look(lambda name: False)
    assert hosts.registry.instances == {"b": B}
    assert hosts.launchers.troubles == {"b": "burnt"}
    assert seen[-1] == InstanceLeft("a", f"nothing was heard of one for {LEASE:g} s")


def test_what_serves_stays_while_its_launcher_stands_still():
    hosts = Hosts()
    hosts.report(0.0, "one", A, B, C)
    hosts.launchers.tick(2 * LEASE)
    hosts.registry.look({"a": True, "b": True, "c": False}.get)
    assert hosts.registry.instances == {"a": A, "b": B}
    hosts.report(2 * LEASE, "one", A)  # it goes on; and b is another launcher's by now
    hosts.report(2 * LEASE, "two", B)
    hosts.registry.look(lambda name: False)
    assert hosts.registry.instances == {"a": A, "b": B}
    registry = EtcdRegistry()
    registry.read({"a": msgspec.json.encode(A), "b": msgspec.json.encode(B)})
    registry.read({})
    registry.look(lambda name: name == "a")
    assert registry.instances == {"a": A}
    registry.look(lambda name: False)
    assert not registry.instances


@pytest.mark.parametrize(
    ("report", "why"),
    [
        ({"protocol": 0}, "protocol 0"),
        ({"model": "another"}, "model: its checkpoint is another one than that of one"),
        ({}, "instances: a is a name at one too"),
    ],
)
def test_what_cannot_be_part_of_a_deployment_is_refused_by_name(report, why):
    hosts = Hosts()
    hosts.report(0.0, "one", A)
    hosts.report(0.0, "two", *([B] if report else [MOVED]), **report)
    assert hosts.registry.instances == {"a": A}
    ((sender, refused),) = hosts.told
    assert sender == b"two"
    assert isinstance(refused, HostRefused)
    assert hosts.taken == [b"one"]
    assert why in refused.message


def test_the_launcher_of_an_instance_is_told_to_start_it_until_it_does():
    hosts, stopped = Hosts(), Endpoint("a", A.address, state="stopped")
    hosts.report(0.0, "one", stopped)
    hosts.report(0.0, "two", B)
    hosts.launchers.start("a", "decode")
    hosts.report(1.0, "one", stopped)
    hosts.report(AGAIN, "one", stopped)
    assert hosts.told == [(b"one", StartInstance("a", "decode"))] * 2
    hosts.report(AGAIN + 1, "one", A)
    hosts.launchers.stop("a")
    hosts.report(3 * AGAIN, "one", stopped)
    assert hosts.told[2:] == [(b"one", StopInstance("a"))]


def test_a_launcher_is_told_who_of_others_gives_weights():
    hosts = Hosts()
    hosts.givers = {"a": "tcp:one:1", "b": "tcp:two:2"}
    hosts.report(0.0, "one", A)
    assert hosts.told_givers == {"b": "tcp:two:2"}
    hosts.report(0.0, "three", C)
    assert hosts.told_givers == hosts.givers
    hosts.givers = {f"e-{number}": f"tcp:{number}:1" for number in range(100)}
    spread = Hosts()
    spread.givers = {"a": "tcp:one:1"}
    spread.report(0.0, "ray", A, spread=True)
    assert spread.told_givers == spread.givers, "its instances are on hosts of their own"
    firsts = set()
    for number in range(40):
        hosts.report(0.0, f"host-{number}")
        assert len(hosts.told_givers) == GIVERS
        assert hosts.told_givers.items() <= hosts.givers.items()
        firsts.add(next(iter(hosts.told_givers)))
    assert len(firsts) > 10, "not all ask the same one"


def test_an_etcd_that_is_not_there_is_named_in_time(monkeypatch):
    monkeypatch.setattr(etcd, "PATIENCE", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as unused:
        address = f"etcd://127.0.0.1:{unused.getsockname()[1]}/x"
    with pytest.raises(ConfigError, match=f"cluster.registry: '{address}', no member answers for 0.3 s"):
        etcd.read_settings(address)
