"""Which instances the deployment has: they join and leave while it runs.

A `Registry` tells master and frontends of them. In a process of its own the master keeps it, in a `LocalRegistry`: the
launchers register their instances there (`launchers.py`), and the frontends know what the master tells them
(`ToldRegistry`). With etcd (`etcd.py`) the launchers register them there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from penstock.core.wire.master import Endpoint, Members
from penstock.service.instances import Change, InstanceJoined, InstanceLeft

Changed = Callable[[Change], None]


class Registry(Protocol):
    def watch(self, changed: Changed) -> None:
        """Call `changed` for every instance that is there, and from now on for each that joins, changes or leaves."""


class LocalRegistry:
    """The registry of this process.

    Attributes:
        instances: that are there, by name.
    """

    def __init__(self, instances: Iterable[Endpoint] = ()) -> None:
        self.instances = {endpoint.name: endpoint for endpoint in instances}
        self._watchers: list[Changed] = []
        self._lapsed: dict[str, str] = {}  # instances that nobody vouches for -> why

    def watch(self, changed: Changed) -> None:
        self._watchers.append(changed)
        for endpoint in list(self.instances.values()):
            changed(InstanceJoined(endpoint))

    def put(self, endpoint: Endpoint) -> None:
        """It is there, as this says. No effect when that is known."""
        self._lapsed.pop(endpoint.name, None)
        if self.instances.get(endpoint.name) != endpoint:
            self.instances[endpoint.name] = endpoint
            self._tell(InstanceJoined(endpoint))

    def remove(self, name: str, why: str) -> None:
        """It is not there. No effect when that is known."""
        self._lapsed.pop(name, None)
        if self.instances.pop(name, None) is not None:
            self._tell(InstanceLeft(name, why))

    def lapse(self, name: str, why: str) -> None:
        """Its launcher is not heard any more. It may stand still, and the instance serve on."""
        if name in self.instances:
            self._lapsed.setdefault(name, why)

    def look(self, serves: Callable[[str], bool]) -> None:
        """Remove what has lapsed, as soon as it does not serve."""
        for name, why in list(self._lapsed.items()):
            if not serves(name):
                self.remove(name, why)

    def replace(self, instances: Mapping[str, Endpoint], why: str) -> None:
        """These are there and no others."""
        for name in self.instances.keys() - instances.keys():
            self.remove(name, why)
        for endpoint in instances.values():
            self.put(endpoint)

    def _tell(self, change: Change) -> None:
        for changed in self._watchers:
            changed(change)


class ToldRegistry(LocalRegistry):
    """A frontend's: what the master told it.

    Args:
        ask: asks the master for everything.
    """

    def __init__(self, ask: Callable[[], None]) -> None:
        super().__init__()
        self._ask = ask
        self._known: tuple[int, int] | None = None  # master's incarnation, and number of its last message

    def expect(self, incarnation: int, sequence: int) -> None:
        """The master says what its last message was."""
        if self._known != (incarnation, sequence):
            self._ask()

    def hear(self, members: Members) -> None:
        joined = {endpoint.name: endpoint for endpoint in members.joined}
        if members.whole:
            self._known = members.incarnation, members.sequence
            there = joined if members.complete else self.instances | joined
            self.replace(there, "it is not in the deployment any more")
        elif self._known == (members.incarnation, members.sequence - 1):
            self._known = members.incarnation, members.sequence
            for endpoint in joined.values():
                self.put(endpoint)
            for name, why in members.left.items():
                self.remove(name, why)
        else:
            self._ask()
