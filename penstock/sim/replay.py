"""Replay: recorded decisions made again by another policy, over the recorded views.

Policies measure costs each in its own way, so both choices are judged by one model, in milliseconds: when the first
token would come if the instance's other prompts take as long as predicted, and this one what its steps take. The regret
of a choice is by how much another instance would have been sooner. It sees the prompt's side only: a policy that gives
some of it away for the sake of later requests, or of those that decode, has regret too.

Recorded views show what the recorded policy's choices led to. The cluster that another policy would have produced is
not considered: use the simulator for that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from math import ceil, inf
from typing import Any

from msgspec.structs import replace

from penstock.sched.cluster import (
    ClusterView,
    Decision,
    Demand,
    DispatchPolicy,
    InstanceLoad,
    Later,
    Random,
    fitting,
)
from penstock.service.history import first_token
from penstock.service.recorder import DecidedEntry

PATIENCE = 16  # times that a policy which waits for a moment of its own choice is asked at that moment


def prefillers(view: ClusterView, demand: Demand) -> Sequence[InstanceLoad]:
    """Instances that could prefill the prompt."""
    able = fitting(view, demand)
    return [load for load in able if load.role != "decode"] or able


@dataclass(frozen=True, slots=True)
class Redecided:
    """
    Attributes:
        decision: the other policy's; None when it would have waited for something to happen.
        waited: seconds that it would have waited first, because it wanted to.
        regret: of the recorded decision, seconds.
        other_regret: of the other policy's, with what it waited.
    """

    recorded: DecidedEntry
    decision: Decision | None
    waited: float
    regret: float
    other_regret: float | None

    @property
    def agrees(self) -> bool:
        was, now = self.recorded.decision, self.decision
        return now is not None and (was.key, was.prefill, was.decode) == (now.key, now.prefill, now.decode)


def redecide(policy: DispatchPolicy, recorded: DecidedEntry, rng: Random) -> Redecided:
    """Ask a policy, which remembers what it was asked before."""
    view = recorded.view
    regret = _regret(view, recorded.demand, recorded.decision)
    verdict = policy.decide(view, rng)
    now = view.now
    if isinstance(verdict, Later) and verdict.at < inf:  # in the recording another event comes first
        verdict, now = _insist(*deepcopy((policy, rng)), view, verdict)
    if isinstance(verdict, Later):
        return Redecided(recorded, None, 0.0, regret, None)
    demand = next(d for d in (*view.queue, *view.offline, recorded.demand) if d.key == verdict.key)
    waited = now - view.now
    return Redecided(recorded, verdict, waited, regret, _regret(view, demand, verdict, waited))


def _insist(policy: DispatchPolicy, rng: Random, view: ClusterView, later: Later) -> tuple[Decision | Later, float]:
    """What it says at the time that it named, and when that is."""
    now, verdict = view.now, later
    for _ in range(PATIENCE):
        if not now < verdict.at < inf:
            break
        now = verdict.at
        answer = policy.decide(replace(view, now=now), rng)
        if not isinstance(answer, Later):
            return answer, now
        verdict = answer
    return verdict, now


def _regret(view: ClusterView, demand: Demand, decision: Decision, waited: float = 0.0) -> float:
    """Seconds that the first token comes later than from the best instance, at once."""
    chosen = next(load for load in view.instances if load.name == decision.prefill)
    best = min((first_token(view, demand, load) for load in prefillers(view, demand)), default=inf)
    late = replace(view, now=view.now + waited)
    cost = waited + first_token(late, demand, chosen)
    return max(0.0, cost - best)  # excluded instances and those that only decode may be below the best


def replay(recorded: Iterable[DecidedEntry], make: Callable[[], DispatchPolicy], rng: Random) -> Iterable[Redecided]:
    """Replay every decision, with a new policy wherever a recording restarts."""
    policy, newest = make(), -inf
    for entry in recorded:
        if entry.now < newest:
            policy = make()
        newest = entry.now
        yield redecide(policy, entry, rng)


def summary(redecided: Sequence[Redecided]) -> dict[str, Any]:
    """Of a replay: shares, and milliseconds. Regrets of both are of the decisions that the other policy made too."""
    made = [again for again in redecided if again.other_regret is not None]
    count = len(redecided)
    return {
        "decisions": count,
        "agreement": sum(again.agrees for again in redecided) / count if count else None,
        "waits": count - len(made),
        "regret_ms": {
            "recorded": spread([again.regret * 1e3 for again in made]),
            "replayed": spread([again.other_regret * 1e3 for again in made if again.other_regret is not None]),
        },
    }


def spread(values: Iterable[float]) -> dict[str, float | None]:
    """Mean, median and 95th percentile, each a value that there is; None without any."""
    ordered = sorted(values)
    if not ordered:
        return {"mean": None, "p50": None, "p95": None}
    ranks = {f"p{q}": ordered[ceil(q / 100 * len(ordered)) - 1] for q in (50, 95)}
    return {"mean": sum(ordered) / len(ordered), **ranks}
