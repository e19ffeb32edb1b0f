"""Running offline sequences move between latency-strict and latency-relaxed instances (xLLM, sections 2.1 and 3.1).

A strict instance, one that decodes, pulls while prompts are in the way on a relaxed one, and it has room beside what is
online: it asks for a preferred length of context, at which arithmetic and memory of its steps would be in balance, and
for a greatest one, with which its steps keep the strictest online target and its memory bears it. It gets the running
sequence that is nearest to the first.

When there are no more prompts on a relaxed instance, which as a rule is before decoders have less to do, it takes
offline sequences back: those that are of least use to the balance, one after the other, as long as its steps are
clearly shorter. Nothing swings: it has to be without prompts for a while, and what has moved stays for a while.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from heapq import nsmallest
from math import inf
from typing import NamedTuple

from penstock.core.plan import BLOCK_TOKENS
from penstock.sched.cluster.base import ClusterView, InstanceLoad, Key, Migration, Resident, fitting
from penstock.sched.cluster.colocation import COMPARED, OUTPUT, ROOM, SHARE, LatencyRoles
from penstock.sched.cluster.elastic_roles import interval, short, step_seconds

EVERY = 0.2  # seconds between two looks
QUIET = 0.5  # seconds without prompts after which a relaxed instance takes sequences back
DWELL = 5.0  # seconds that a sequence stays where it has moved to
EASE = 0.7  # of a strict instance's step at most, that one on the relaxed instance takes which takes a sequence back


class Wanted(NamedTuple):
    """Lengths of context that a strict instance pulls, in tokens.

    Attributes:
        preferred: with one more of it the step's arithmetic and memory would take the same time; 0 where memory is the
            bound already, and `greatest` where arithmetic is even with that.
        greatest: with which its steps keep the target, also when all have grown, and its memory bears it; 0 for none.
    """

    preferred: int
    greatest: int


def wanted(load: InstanceLoad, target: float) -> Wanted:
    """
    Args:
        target: the strictest TPOT, in seconds.
    """
    rows, held, times = load.requests + 1, load.held_tokens, load.times
    room = min(_room(load), load.max_model_len)
    if room <= 0 or (load.requests and _pace(load) > SHARE * target):
        return Wanted(0, 0)
    limit_ms, grown = SHARE * target * 1e3, held + OUTPUT * rows
    lengths = range(1, room + 1)
    greatest = bisect_right(lengths, limit_ms, key=lambda n: times.step_ms((), rows, grown + n))
    if not greatest:
        return Wanted(0, 0)

    def memory_leads(tokens: int) -> bool:
        compute, memory = times.utilisation((), rows, held + tokens)
        return memory >= compute

    return Wanted(bisect_left(range(greatest), True, key=memory_leads), greatest)


class Pull:
    """A `Balancer`.

    Args:
        colocation: knows the strictest target.
    """

    name = "pull"

    def __init__(self, colocation: LatencyRoles) -> None:
        self._colocation = colocation
        self._again = -inf  # when it looks again
        self._quiet: dict[str, float] = {}  # relaxed instance -> since when it has no prompts
        self._went: dict[Key, float] = {}  # when a sequence moved

    def balance(self, view: ClusterView, residents: Callable[[str], Sequence[Resident]]) -> Sequence[Migration]:
        now, target = view.now, self._colocation.target(view)
        if now < self._again:
            return []
        self._again = now + EVERY
        self._went = {key: at for key, at in self._went.items() if now - at < DWELL}
        strict = [i for i in view.instances if i.role == "decode"]
        relaxed = [i for i in view.instances if i.role != "decode"]
        self._quiet = {i.name: self._quiet.get(i.name, now) for i in relaxed if not i.pending_tokens}
        busy = [i for i in relaxed if i.pending_tokens and i.offline_requests and i.decoding]
        free = [i for i in relaxed if now - self._quiet.get(i.name, inf) >= QUIET]
        migrations = self._pulled(view, strict, busy, target, residents) if busy and not short(strict) else []
        if free and not view.offline:
            migrations += self._given_back(view, strict, free, target, residents)
        self._went |= {migration.key: now for migration in migrations}
        return migrations

    def _pulled(
        self,
        view: ClusterView,
        strict: Iterable[InstanceLoad],
        busy: Sequence[InstanceLoad],
        target: float,
        residents: Callable[[str], Sequence[Resident]],
    ) -> list[Migration]:
        """One for each strict instance, those with the fewest tokens first."""
        there = {i.name: self._offline(view, i, residents) for i in busy}
        migrations: list[Migration] = []
        for taker in nsmallest(COMPARED, strict, key=lambda i: (i.held_tokens, i.name)):
            if not any(there.values()):
                break
            preferred, greatest = wanted(taker, target)
            offered = [
                (abs(length - preferred), place, i.name, resident)
                for i in busy
                if taker.name in i.peers
                for place, (length, resident) in enumerate(there[i.name])
                if length <= greatest and taker in fitting(view, resident.demand)
            ]
            if offered:
                _, place, name, resident = min(offered, key=lambda offer: offer[:3])
                del there[name][place]
                reason = f"pulled: {preferred} tokens preferred, {greatest} at most"
                migrations.append(Migration(key=resident.demand.key, to=taker.name, reason=reason))
        return migrations

    def _given_back(
        self,
        view: ClusterView,
        strict: Iterable[InstanceLoad],
        free: Sequence[InstanceLoad],
        target: float,
        residents: Callable[[str], Sequence[Resident]],
    ) -> list[Migration]:
        """One to each relaxed instance without prompts, from those with the longest steps first."""
        migrations: list[Migration] = []
        takers = sorted(free, key=lambda i: (i.held_tokens, i.name))
        for giver in sorted(strict, key=lambda i: (-interval(i), i.name)):
            if not takers:
                break
            if not giver.offline_requests:
                continue
            able = [i for i in takers if i.name in giver.peers]
            offline = self._offline(view, giver, residents) if able else []
            preferred = wanted(giver, target).preferred
            for length, resident in sorted(offline, key=lambda offer: -abs(offer[0] - preferred)):
                taker = next(
                    (i for i in able if _eases(i, giver, length) and i in fitting(view, resident.demand)), None
                )
                if taker is not None:
                    takers.remove(taker)
                    reason = f"given back: {taker.name} has no prompts"
                    migrations.append(Migration(key=resident.demand.key, to=taker.name, reason=reason))
                    break
        return migrations

    def _offline(
        self, view: ClusterView, load: InstanceLoad, residents: Callable[[str], Sequence[Resident]]
    ) -> list[tuple[int, Resident]]:
        """Offline sequences that decode there and have not just moved, with their lengths as they are thought to be."""
        pace, found = interval(load), []
        for resident in residents(load.name):
            demand = resident.demand
            if demand.offline and demand.max_tokens > 1 and demand.key not in self._went:
                generated = min(demand.max_tokens, round((view.now - resident.since) / pace))
                found.append((demand.prompt_tokens + generated, resident))
        return found


def _pace(load: InstanceLoad) -> float:
    """Seconds between two tokens there, with the prompts that it has."""
    return max(interval(load), step_seconds(load))


def _room(load: InstanceLoad) -> int:
    """Tokens that one more may have beside what its sequences will come to."""
    if load.requests + load.prefilling + 1 > ROOM * load.max_sequences:
        return 0
    held = max(load.held_tokens, (load.num_blocks - load.free_blocks) * BLOCK_TOKENS)
    return int(ROOM * load.num_blocks * BLOCK_TOKENS) - held - OUTPUT * (load.requests + 1)


def _eases(taker: InstanceLoad, giver: InstanceLoad, length: int) -> bool:
    """Whether a sequence is clearly better off with the taker."""
    step = taker.times.step_ms((), taker.requests + 1, taker.held_tokens + length) / 1e3
    return length <= _room(taker) and max(step, interval(taker) if taker.requests else 0.0) < EASE * interval(giver)
