"""The stages of a request: candidates for prefill, and for decode after it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence

from penstock.core.wire.engine import Role
from penstock.sched.cluster.base import ClusterView, Demand, InstanceLoad, fitting

HAND_OVERS = {("prefill", "decode"), ("prefill", "any"), ("any", "decode")}


def hands_over(source: Role, target: Role) -> bool:
    """Whether instances of one role hand requests over to instances of another."""
    return (source, target) in HAND_OVERS


def prefillers(view: ClusterView, demand: Demand) -> Sequence[InstanceLoad]:
    """Instances with the role "prefill" or "any"; all when there is none of these. Empty when none could hold it."""
    able = fitting(view, demand)
    return [i for i in able if i.role != "decode"] or able


def takers(view: ClusterView, demand: Demand, prefill: InstanceLoad) -> list[InstanceLoad]:
    """The instances that the prefiller can hand over to; one of "any" may also keep what it has prefilled."""
    return [i for i in fitting(view, demand) if i.name in prefill.peers and hands_over(prefill.role, i.role)]


def why(prefill: InstanceLoad, decode: str | None) -> str:
    """The reason of a decision that follows the roles."""
    if decode is not None:
        return "hand-off"
    if prefill.role == "any":
        return "colocated"
    if prefill.role == "decode":
        return "no-prefill: no instance that prefills prompts can be given more"
    reasons = "; ".join(f"{name}: {reason}" for name, reason in prefill.unlinked.items())
    return f"no-decode: {reasons or 'no instance that decodes can be given more'}"


class Candidates:
    """`prefillers` and `takers` of one view, found once for all demands to which the same instances are long enough: a
    queue of hundreds over a thousand instances is looked through in a millisecond.

    Args:
        weight: of an instance; those that take over come in the order of it.
    """

    def __init__(self, view: ClusterView, weight: Callable[[InstanceLoad], float]) -> None:
        self.view = view
        self._weight = weight
        self._lengths = sorted({i.max_model_len for i in view.instances})
        self._prefillers: dict[int, Sequence[InstanceLoad]] = {}
        self._decoders: dict[int, Sequence[InstanceLoad]] = {}

    def prefillers(self, demand: Demand) -> Sequence[InstanceLoad]:
        """In the order of the view."""
        if demand.exclude:
            return prefillers(self.view, demand)
        group = bisect_left(self._lengths, demand.tokens)
        if group not in self._prefillers:
            self._prefillers[group] = prefillers(self.view, demand)
        return self._prefillers[group]

    def may_prefill(self, demand: Demand, load: InstanceLoad) -> bool:
        """Whether an instance is among the prefillers."""
        if demand.tokens > load.max_model_len or load.name in demand.exclude:
            return False
        return load.role != "decode" or self.prefillers(demand)[0].role == "decode"

    def takers(self, demand: Demand, prefill: InstanceLoad) -> Iterator[InstanceLoad]:
        """Found as they are asked for."""
        if not prefill.peers:
            return
        group = bisect_left(self._lengths, demand.tokens)
        if group not in self._decoders:
            able = [i for i in self.view.instances if i.role != "prefill" and demand.tokens <= i.max_model_len]
            self._decoders[group] = sorted(able, key=self._weight)
        for load in self._decoders[group]:
            if load.name in prefill.peers and hands_over(prefill.role, load.role) and load.name not in demand.exclude:
                yield load

    def hands_over(self, demand: Demand, prefill: InstanceLoad) -> bool:
        """Whether any instance takes over."""
        return next(self.takers(demand, prefill), None) is not None

    def homes(self, demand: Demand, prefill: InstanceLoad) -> Iterator[InstanceLoad]:
        """Where a sequence may decode that `prefill` prefills: itself unless it only prefills, and who takes over;
        never empty."""
        if prefill.role != "prefill" or not self.hands_over(demand, prefill):
            yield prefill
        yield from self.takers(demand, prefill)
