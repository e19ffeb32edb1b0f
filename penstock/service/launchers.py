"""What the master's process hears from launchers and tells them: instances are registered, started and stopped."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol
from zlib import crc32

from penstock.core.wire import PROTOCOL
from penstock.core.wire.engine import LEASE, Role
from penstock.core.wire.master import (
    HostRefused,
    HostReport,
    HostTaken,
    RestartInstance,
    StartInstance,
    StopInstance,
    ToLauncher,
)
from penstock.service.registry import LocalRegistry

log = logging.getLogger("penstock.master")
GIVERS = 8  # instances that a launcher is told of, of however many give weights
AGAIN = 5.0  # seconds after which an instance that has not been started is to be started once more


class Fleet(Protocol):
    """Starts and stops instances."""

    def start(self, name: str, role: Role) -> None: ...

    def stop(self, name: str) -> None:
        """Without regard to its requests: it has drained."""

    def restart(self, name: str, times: int) -> None:
        """The same, and then start it again; `times`: see `RestartInstance`."""


@dataclass(slots=True)
class _Host:
    """
    Attributes:
        sender: where its launcher is told something.
        heard: when it was last.
    """

    sender: bytes
    heard: float
    said: HostReport


class Launchers:
    """
    Args:
        registry: gets the instances of launchers that are heard; None when these register elsewhere.
        tell: sends a message to a launcher.
        ready: instances that are given requests.
        givers: those that give weights to other hosts -> where.
        own: the host whose launcher started this process: it is there as long as this is, though it may stand still.
    """

    def __init__(
        self,
        registry: LocalRegistry | None,
        tell: Callable[[bytes, ToLauncher], None],
        ready: Callable[[], list[str]] = list,
        givers: Callable[[], dict[str, str]] = dict,
        own: str = "",
    ) -> None:
        self._registry, self._tell, self._ready, self._givers, self._own = registry, tell, ready, givers, own
        self._hosts: dict[str, _Host] = {}
        self._to_start: dict[str, tuple[float, StartInstance]] = {}  # by instance, with when that was said
        self._now = 0.0

    def hear(self, now: float, sender: bytes, said: HostReport) -> None:
        self._now = now
        if why := self._objection(said):
            log.warning("the instances of %s are not taken: %s", said.host, why)
            self._tell(sender, HostRefused(why))
            return
        before = self._hosts.get(said.host)
        self._hosts[said.host] = _Host(sender, now, said)
        self._tell(sender, self._taken(said))
        self._pass_on(said, None if before is None else before.said)
        if self._registry is not None:
            for endpoint in said.instances:
                self._registry.put(endpoint)
            if before is not None:
                kept = {endpoint.name for endpoint in said.instances}
                for endpoint in before.said.instances:
                    if endpoint.name not in kept:
                        self._registry.remove(endpoint.name, f"{said.host} has stopped it")
        for endpoint in said.instances:
            self._remind(sender, endpoint.name, stopped=endpoint.state == "stopped")

    def _taken(self, said: HostReport) -> HostTaken:
        """What a launcher is answered."""
        leader = next((host.said for host in self._hosts.values() if host.said.began), None)
        joined = {name: host.said.progress for name, host in self._hosts.items() if host.said.progress is not None}
        return HostTaken(
            self._ready(),
            self._givers_to(said),
            None if leader is None else leader.orders.get(said.host),
            "" if leader is None else leader.model,
            joined if said.began else {},
        )

    def _pass_on(self, said: HostReport, before: HostReport | None) -> None:
        """Who begins something on other hosts, and who says how far it is there, need not wait for their reports."""
        for name, host in self._hosts.items():
            orders = {} if before is None else before.orders
            ordered = said.orders.get(name) != orders.get(name)
            progressed = host.said.began and said.progress != (None if before is None else before.progress)
            if name != said.host and (ordered or progressed):
                self._tell(host.sender, self._taken(host.said))

    def _givers_to(self, said: HostReport) -> dict[str, str]:
        """Not the same first ones to every launcher: many may start engines at once."""
        mine = {endpoint.name for endpoint in said.instances if not said.spread}
        givers = {name: where for name, where in self._givers().items() if name not in mine}
        order = sorted(givers, key=lambda name: crc32(f"{said.host} {name}".encode()))
        return {name: givers[name] for name in order[:GIVERS]}

    def _objection(self, said: HostReport) -> str:
        """Why its instances cannot be part of the deployment; "" when they can."""
        if said.protocol != PROTOCOL:
            return f"it speaks protocol {said.protocol}, the master {PROTOCOL}"
        others = [host.said for name, host in self._hosts.items() if name != said.host]
        mine = {endpoint.name for endpoint in said.instances}
        for other in others:
            if taken := sorted(mine & {endpoint.name for endpoint in other.instances}):
                return f"instances: {', '.join(taken)} is a name at {other.host} too, give the group one of its own"
        leaders = [other for other in others if other.began]
        for other in leaders if leaders or said.began else others:
            if _checkpoints(said).isdisjoint(_checkpoints(other)):
                return f"model: its checkpoint is another one than that of {other.host}"
        return ""

    def _remind(self, sender: bytes, name: str, *, stopped: bool) -> None:
        if name not in self._to_start:
            return
        since, message = self._to_start[name]
        if not stopped:
            del self._to_start[name]
        elif self._now - since >= AGAIN:  # the launcher was not connected when it was told
            self._to_start[name] = self._now, message
            self._tell(sender, message)

    def tick(self, now: float) -> None:
        """Forget launchers that have fallen silent, but not what serves nevertheless; call it a few times a second."""
        self._now = now
        for name, host in list(self._hosts.items()):
            if now - host.heard > LEASE and name != self._own:
                del self._hosts[name]
                log.warning("the launcher of %s was not heard for %g s", name, LEASE)
                if self._registry is not None:
                    for endpoint in host.said.instances:
                        self._registry.lapse(endpoint.name, f"nothing was heard of {name} for {LEASE:g} s")

    @property
    def troubles(self) -> Mapping[str, str]:
        """Of all instances whose launchers are heard."""
        return {name: why for host in self._hosts.values() for name, why in host.said.troubles.items()}

    # --- the fleet

    def start(self, name: str, role: Role) -> None:
        message = StartInstance(name, role)
        self._to_start[name] = self._now, message
        self._tell_host_of(name, message)

    def stop(self, name: str) -> None:
        self._to_start.pop(name, None)
        self._tell_host_of(name, StopInstance(name))

    def restart(self, name: str, times: int) -> None:
        self._tell_host_of(name, RestartInstance(name, times))

    def _tell_host_of(self, name: str, message: ToLauncher) -> None:
        for host in self._hosts.values():
            if any(endpoint.name == name for endpoint in host.said.instances):
                self._tell(host.sender, message)


def _checkpoints(said: HostReport) -> set[str]:
    """That a launcher serves, or could, in a change."""
    return {said.model, said.other or said.model}
