"""What hosts of a simulated cluster offer to an instance that starts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from penstock.sched.cluster.startup import Path, Surroundings
from penstock.sim.scenario import Scaling
from penstock.sim.slots import InstanceSlot


class Hosts:
    """Each has the same number of instances, and a pool of warm processes. Where weights were read once, the host's
    memory has the files from then on.

    Args:
        places: every instance, by name.
    """

    def __init__(self, scaling: Scaling | None, places: Mapping[str, InstanceSlot]) -> None:
        self._scaling, self._places = scaling, places
        self._taken: Counter[int] = Counter()  # warm processes that are not replaced yet, by host
        self._copies: set[int] = set()

    def host_of(self, place: InstanceSlot) -> int:
        return 0 if self._scaling is None else place.number // self._scaling.per_host

    def path(self, place: InstanceSlot) -> Path:
        """By which an instance would start now."""
        host = self.host_of(place)
        sources = {self.host_of(other) for other in self._places.values() if other.instance is not None}
        pool = 0 if self._scaling is None else self._scaling.warm_pool
        return Surroundings(
            warm=self._taken[host] < pool, neighbour=host in sources, peer=bool(sources), copy=host in self._copies
        ).path

    def take(self, place: InstanceSlot) -> None:
        """A warm process of its host becomes this instance."""
        self._taken[self.host_of(place)] += 1

    def replace(self, place: InstanceSlot) -> None:
        """There is another warm process in the place of the one that was taken."""
        self._taken[self.host_of(place)] -= 1

    def loaded(self, place: InstanceSlot) -> None:
        """An instance has its weights."""
        self._copies.add(self.host_of(place))
