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

from penstock.core.parallel import Placement


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
        found += [tuple(members[i] for i in rank) for rank in within.ranks]
    return Placement(tuple(found))


def aligned(old: Placement, new: Placement, within: int | None = None) -> Placement:
    """The same with ranks renamed such that little changes: an expert that is on a rank already is not loaded there.

    Args:
        within: ranks of a host, among which names may change; None is all.
    """
    count, size = len(new.ranks), within or len(new.ranks)
    ranks: list[tuple[int, ...]] = [()] * count
    for start in range(0, count, size):
        host = range(start, start + size)
        mine = {rank: set(new.ranks[rank]) for rank in host}
        theirs = {rank: set(old.ranks[rank]) for rank in host}
        alike = sorted((-len(mine[a] & theirs[b]), a, b) for a in host for b in host)
        named, taken = set[int](), set[int]()
        for _, a, b in alike:
            if a not in named and b not in taken:
                ranks[b] = new.ranks[a]
                named.add(a)
                taken.add(b)
    return min(Placement(tuple(ranks)), new, key=lambda each: len(old.changes(each)))


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
