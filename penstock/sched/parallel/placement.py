"""Which experts of a layer are on which ranks, such that ranks have equally much to do (xLLM, section 4.4.2;
DeepSeek-V3, section 3.4).

Each rank has the same number of slots, more of them together than there are experts. The expert with the greatest load
for each replica gets one more until slots are used; then replicas go, greatest first, to the least loaded rank that has
room. Group-limited, for prefill: experts are in groups, a row's experts are in few of these, and groups are put on
hosts first, so that a row goes to few hosts. Global, for decode: all ranks as one.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Placement:
    """Of one layer.

    Attributes:
        slots: of each rank the experts in its slots, each at most once on a rank.
    """

    slots: tuple[tuple[int, ...], ...]

    @property
    def experts(self) -> int:
        return 1 + max(max(rank) for rank in self.slots)

    def ranks_of(self) -> list[list[int]]:
        """Of each expert, the ranks that have it."""
        found: list[list[int]] = [[] for _ in range(self.experts)]
        for rank, experts in enumerate(self.slots):
            for expert in experts:
                found[expert].append(rank)
        return found

    def loads(self, counts: Sequence[float]) -> list[float]:
        """Of each rank, when an expert's load is spread evenly over its replicas."""
        each = [count / len(ranks) for count, ranks in zip(counts, self.ranks_of(), strict=True)]
        return [sum([each[expert] for expert in experts]) for experts in self.slots]

    def imbalance(self, counts: Sequence[float]) -> float:
        """The busiest rank's load over the mean; 1 without any load."""
        loads = self.loads(counts)
        total = sum(loads)
        return max(loads) * len(loads) / total if total > 0 else 1.0

    def changes(self, new: Placement) -> list[tuple[int, int, int]]:
        """(rank, slot, expert) of what is another expert's weight in `new`."""
        return [
            (rank, slot, expert)
            for rank, (mine, theirs) in enumerate(zip(self.slots, new.slots, strict=True))
            for slot, (before, expert) in enumerate(zip(mine, theirs, strict=True))
            if before != expert
        ]

    def check(self) -> None:
        """Raise AssertionError unless every expert is somewhere, at most once on a rank, and ranks have equal slots."""
        assert len({len(rank) for rank in self.slots}) == 1
        assert all(len(set(rank)) == len(rank) for rank in self.slots)
        assert {expert for rank in self.slots for expert in rank} == set(range(self.experts))


def in_order(experts: int, ranks: int, slots: int) -> Placement:
    """Before anything was counted: each rank has the experts that follow those of the rank before, and, in slots that
    are left, the first of the next rank's."""
    assert slots <= experts <= ranks * slots
    starts = [rank * experts // ranks for rank in range(ranks)]
    return Placement(tuple(tuple((start + i) % experts for i in range(slots)) for start in starts))


def balanced(counts: Sequence[float], ranks: int, slots: int) -> Placement:
    """All ranks as one.

    Args:
        counts: load of each expert.
        slots: of each rank; at most as many as there are experts, and together at least.
    """
    experts = len(counts)
    assert slots <= experts <= ranks * slots
    replicas = _replicated(counts, ranks, ranks * slots)
    pieces = sorted(range(experts), key=lambda e: (-counts[e] / replicas[e], e))
    placed: list[set[int]] = [set() for _ in range(ranks)]
    waiting = [(0.0, rank) for rank in range(ranks)]  # ranks with room, least loaded first
    for expert in pieces:
        each, passed = counts[expert] / replicas[expert], []
        for _ in range(replicas[expert]):
            if not waiting:
                _exchange(placed, slots, expert)
                continue
            load, rank = heapq.heappop(waiting)
            placed[rank].add(expert)
            if len(placed[rank]) < slots:
                passed.append((load + each, rank))  # it has this expert: not again for the next replica
        for entry in passed:
            heapq.heappush(waiting, entry)
    return Placement(tuple(tuple(sorted(rank)) for rank in placed))


def group_limited(counts: Sequence[float], groups: int, hosts: int, ranks: int, slots: int) -> Placement:
    """Groups of experts to hosts, then inside each host.

    Args:
        groups: of consecutive experts; a multiple of `hosts`, as `ranks` are; hosts have equally many of both.
    """
    experts = len(counts)
    assert experts % groups == groups % hosts == ranks % hosts == 0
    size, per_host, inside = experts // groups, groups // hosts, ranks // hosts
    loads = [sum(counts[group * size : (group + 1) * size]) for group in range(groups)]
    waiting, chosen = [(0.0, host) for host in range(hosts)], [list[int]() for _ in range(hosts)]
    for group in sorted(range(groups), key=lambda g: (-loads[g], g)):
        load, host = heapq.heappop(waiting)
        chosen[host].append(group)
        if len(chosen[host]) < per_host:
            heapq.heappush(waiting, (load + loads[group], host))
    found: list[tuple[int, ...]] = []
    for own in chosen:
        members = [expert for group in sorted(own) for expert in range(group * size, (group + 1) * size)]
        within = balanced([counts[expert] for expert in members], inside, slots)
        found += [tuple(members[i] for i in rank) for rank in within.slots]
    return Placement(tuple(found))


def aligned(old: Placement, new: Placement, within: int | None = None) -> Placement:
    """The same with ranks renamed and slots reordered such that little changes: a weight that is on a rank already is
    not loaded there.

    Args:
        within: ranks of a host, among which names may change; None is all.
    """
    count, size = len(new.slots), within or len(new.slots)
    names: dict[int, int] = {}  # of `new` -> of `old`
    for start in range(0, count, size):
        host = range(start, start + size)
        mine = {rank: set(new.slots[rank]) for rank in host}
        theirs = {rank: set(old.slots[rank]) for rank in host}
        alike = sorted((-len(mine[a] & theirs[b]), a, b) for a in host for b in host)
        taken: set[int] = set()
        for _, a, b in alike:
            if a not in names and b not in taken:
                names[a] = b
                taken.add(b)
    slots: list[tuple[int, ...]] = [()] * count
    for rank, name in names.items():
        slots[name] = _in_place(old.slots[name], new.slots[rank])
    return Placement(tuple(slots))


def _replicated(counts: Sequence[float], ranks: int, slots: int) -> list[int]:
    """Of each expert, replicas: so many slots in all, at most one for each rank."""
    replicas = [1] * len(counts)
    heap = [(-count, expert) for expert, count in enumerate(counts)]
    heapq.heapify(heap)
    for _ in range(slots - len(counts)):
        _, expert = heapq.heappop(heap)
        replicas[expert] += 1
        if replicas[expert] < ranks:
            heapq.heappush(heap, (-counts[expert] / replicas[expert], expert))
    return replicas


def _exchange(placed: list[set[int]], slots: int, expert: int) -> None:
    """Make room for another replica of an expert where only ranks that have it already have room: one of them takes
    what a rank without it has, and that rank takes it."""
    room = next(rank for rank in placed if len(rank) < slots)
    other = next(rank for rank in placed if expert not in rank)
    given = min(other - room)  # `other` is full and `room` is not, so there is one
    other.remove(given)
    room.add(given)
    other.add(expert)


def _in_place(before: tuple[int, ...], after: tuple[int, ...]) -> tuple[int, ...]:
    """`after`, in which what both have is in the same slot."""
    new = [expert for expert in after if expert not in before]
    return tuple(expert if expert in after else new.pop() for expert in before)
