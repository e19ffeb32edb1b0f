"""Who may prefill a sequence's prompt, and who may go on from there."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence

from penstock.sched.cluster.base import ClusterView, Decision, Demand, InstanceLoad, Stage, fitting
from penstock.sched.cluster.dispatch import hands_over, why


def prefillers(view: ClusterView, demand: Demand) -> Sequence[InstanceLoad]:
    """Instances of "prefill" and "any"; when those have nobody to give, all. Empty when nobody could hold it."""
    able = fitting(view, demand)
    return [i for i in able if i.role != "decode"] or able


def takers(view: ClusterView, demand: Demand, prefill: InstanceLoad) -> list[InstanceLoad]:
    """To whom the prefiller can hand over; one of "any" may as well keep what it has prefilled."""
    return [i for i in fitting(view, demand) if i.name in prefill.peers and hands_over(prefill.role, i.role)]


def read_and_home(
    policy: str,
    view: ClusterView,
    demand: Demand,
    prefiller: InstanceLoad,
    home: InstanceLoad,
    costs: Mapping[str, float],
    home_costs: Mapping[str, float],
) -> Decision:
    """It is prefilled by one instance behind the prompts that are there, and decodes at another or at the same.

    Args:
        costs, home_costs: of the candidates for each stage; none where a stage had no choice.
    """
    decode = home.name if home is not prefiller else None
    both: dict[Stage, Mapping[str, float]] = {"prefill": costs}
    if home_costs:
        both["decode"] = home_costs
    begins = max(view.now, prefiller.free_at)
    return Decision(
        key=demand.key,
        prefill=prefiller.name,
        decode=decode,
        policy=policy,
        reason=why(prefiller, decode),
        costs=both,
        predicted_ttft=begins + prefiller.prefill_seconds(demand.prompt_tokens) - demand.arrived,
    )


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
        """Whether anybody takes over."""
        return next(self.takers(demand, prefill), None) is not None

    def homes(self, demand: Demand, prefill: InstanceLoad) -> Iterator[InstanceLoad]:
        """Where a sequence may decode that `prefill` prefills: itself unless it only prefills, and who takes over;
        never empty."""
        if prefill.role != "prefill" or not self.hands_over(demand, prefill):
            yield prefill
        yield from self.takers(demand, prefill)
