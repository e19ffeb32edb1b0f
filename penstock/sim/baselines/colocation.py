"""Two simple ways to share instances between online and offline work, which xLLM's is compared with."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import nsmallest

from penstock.sched.cluster.base import ClusterView, Decision, InstanceLoad, Later, fitting
from penstock.sched.cluster.colocation import AGAIN, AHEAD, COMPARED, has_room, may_hold, seconds_ahead


class Separate:
    """A fixed share of the instances runs offline work alone, each of them prompts and outputs.

    Args:
        share: of the instances, rounded; at least one of several, and never all. They are spread over the names in
            order, and so over groups of instances that are named alike.
    """

    name = "separate"

    def __init__(self, share: float = 0.25) -> None:
        assert 0 < share < 1
        self._share = share

    def online(self, view: ClusterView) -> Sequence[InstanceLoad]:
        apart = self._apart(view)
        return [i for i in view.instances if i.name not in apart]

    def decide(self, view: ClusterView) -> Decision | Later:
        apart = self._apart(view)
        return _first(view, [i for i in view.instances if i.name in apart], self.name, AHEAD)

    def _apart(self, view: ClusterView) -> frozenset[str]:
        names = sorted(i.name for i in view.instances)
        if len(names) < 2:
            return frozenset()
        count = min(len(names) - 1, max(1, round(self._share * len(names))))
        return frozenset(names[(2 * k + 1) * len(names) // (2 * count)] for k in range(count))


class OnlineFirst:
    """Offline work runs on any instance when no online sequence waits."""

    name = "online-first"

    def online(self, view: ClusterView) -> Sequence[InstanceLoad]:
        return view.instances

    def decide(self, view: ClusterView) -> Decision | Later:
        return Later() if view.queue else _first(view, view.instances, self.name, 2 * AHEAD)


def _first(view: ClusterView, instances: Sequence[InstanceLoad], policy: str, ahead: float) -> Decision | Later:
    """The oldest offline sequence to the instance that prefills it first, if one has room and so many seconds at most
    ahead of it. It decodes there, or on the emptiest of those that take over."""
    for demand in view.offline[:1]:
        able: Sequence[InstanceLoad] = [i for i in instances if may_hold(i, demand)]
        if not able:  # none of these is long enough: then all
            able = fitting(view, demand)
        free = [i for i in able if seconds_ahead(view, i) <= ahead and has_room(i, demand)]
        if free:
            compared = nsmallest(COMPARED, free, key=lambda i: (seconds_ahead(view, i), i.held_tokens, i.name))
            chosen = compared[0]
            return Decision(
                key=demand.key,
                prefill=chosen.name,
                decode=None,
                policy=policy,
                reason="offline",
                costs={"prefill": {i.name: 1e3 * seconds_ahead(view, i) for i in compared}},
            )
    return Later(view.now + AGAIN)
