"""Load of data-parallel groups, which wait for each other in every layer with experts (xLLM, section 4.4.3).

1. A new sequence goes to the group with the most free KV (`admit`).
2. Groups that take longer than others give work away (`even_out`): their whole batch, a sequence, or a part of a
   sequence. What goes as a whole is handed over, and costs nothing after that (`sched.cluster.group_balance`). Of a
   part the other group is sent the KV and, in every step, the query; it returns sums of pieces, which the owner merges
   with its own in the order of positions (`sched.parallel.helping`).
3. In a group, work is spread over the units of its device (`sched.parallel.units`).

What a sequence's attention is cut into are pieces of SPLIT tokens, counted from its start, whoever computes
them, and they are merged in their order: so tokens do not depend on who did.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from penstock.core.plan import BLOCK_TOKENS, HELPED_BLOCKS

SPLIT = HELPED_BLOCKS * BLOCK_TOKENS  # tokens of KV
LEAST_MS, SHARE = 1.0, 0.05  # the slowest group over the mean, from which on work is given away
BATCH, SEQUENCE, PART = "batch", "sequence", "part"


@dataclass(frozen=True, slots=True)
class GroupLoad:
    """What a group computes in a step.

    Attributes:
        sequences: (which, tokens of KV that this group attends over for it) of those that decode.
        room: tokens of KV that it has room for, besides.
        ms: of all but attention of decodes.
    """

    sequences: tuple[tuple[int, int], ...]
    room: int
    ms: float = 0.0


@dataclass(frozen=True, slots=True)
class Move:
    """
    Attributes:
        sequences: of `source`; one, but of a batch.
        tokens: of KV that go; of a part whole pieces, and not all that the sequence has.
    """

    kind: Literal["batch", "sequence", "part"]
    source: int
    target: int
    sequences: tuple[int, ...]
    tokens: int


def admit(free: Sequence[int], needed: int) -> int | None:
    """The group with the most free KV, the first of several; None when it does not fit even there.

    Args:
        free: tokens that each has room for.
        needed: by the new sequence.
    """
    most = max(range(len(free)), key=lambda group: (free[group], -group))
    return most if free[most] >= needed else None


def uneven(times: Sequence[float]) -> bool:
    """Whether groups that take so many ms wait for one so long that work is to be given away."""
    mean = sum(times) / len(times)
    return max(times) - mean > max(LEAST_MS, SHARE * mean)


def group_times(groups: Sequence[GroupLoad], token_ms: float, moves: Sequence[Move] = ()) -> list[float]:
    """Of each group, ms of a step, once batches and sequences have moved."""
    times = [group.ms + token_ms * sum([tokens for _, tokens in group.sequences]) for group in groups]
    for move in moves:
        times[move.source] -= move.tokens * token_ms
        times[move.target] += move.tokens * token_ms
    return times


def even_out(
    groups: Sequence[GroupLoad], token_ms: float, part_ms: float = 0.0, kinds: Collection[str] = (BATCH, SEQUENCE, PART)
) -> list[Move]:
    """What to move such that the slowest group is nearer the mean. Each move is from the slowest group to the fastest
    that has room, of what makes the slower of the two fastest; a sequence moves once.

    Args:
        groups: as they will be, with moves on their way counted as done.
        token_ms: of attention over one token of KV.
        part_ms: that a part costs both groups in every step.
        kinds: of moves that there may be.
    """
    times = group_times(groups, token_ms)
    mean, room = sum(times) / len(times), [group.room for group in groups]
    there = [dict(group.sequences) for group in groups]
    moves: list[Move] = []
    for _ in range(2 * len(groups)):
        if not uneven(times):
            break
        slow = max(range(len(groups)), key=lambda group: times[group])
        over = times[slow] - mean
        open_to = [group for group in range(len(groups)) if room[group] >= SPLIT and times[group] < mean]
        if not open_to:
            break
        fast = min(open_to, key=lambda group: times[group])
        wanted = min(over, mean - times[fast]) / token_ms
        move = _best(there[slow], slow, fast, wanted, room[fast], part_ms / token_ms, kinds)
        if move is None:
            break
        added = part_ms if move.kind == PART else 0.0
        times[slow] += added - move.tokens * token_ms
        times[fast] += added + move.tokens * token_ms
        room[fast] -= move.tokens
        for sequence in move.sequences:
            del there[slow][sequence]
        moves.append(move)
    return moves


def _best(
    there: dict[int, int], slow: int, fast: int, wanted: float, room: int, part_cost: float, kinds: Collection[str]
) -> Move | None:
    """Of what the slow group has, the move nearest to what is wanted; None when nothing makes it better.

    Args:
        there: sequence -> tokens.
        part_cost: of a part, in tokens.
    """
    found: list[tuple[float, int, Move]] = []  # tokens that it misses by, coarser ones first
    total = sum(there.values())
    if len(there) > 1 and total <= min(wanted, room):
        found.append((wanted - total, 0, Move("batch", slow, fast, tuple(there), total)))
    fitting = [(abs(wanted - tokens), sequence) for sequence, tokens in there.items() if 0 < tokens <= room]
    if fitting:
        missed, sequence = min(fitting)
        found.append((missed, 1, Move("sequence", slow, fast, (sequence,), there[sequence])))
    if there:
        longest = max(there, key=lambda sequence: (there[sequence], -sequence))
        pieces = int(min(wanted, room, there[longest] - 1)) // SPLIT
        if pieces:
            tokens = pieces * SPLIT
            found.append((wanted - tokens + part_cost, 2, Move("part", slow, fast, (longest,), tokens)))
    found = [option for option in found if option[0] < wanted and option[2].kind in kinds]
    return min(found)[2] if found else None
