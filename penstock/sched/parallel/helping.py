"""Which parts of its sequences a data-parallel group has others help with, while they decode (xLLM, section 4.4.3).

Every group knows how many tokens each group's sequences attend over, and decides for its own alone: `even_out` says
what of all is to go where, and what of it is this group's becomes parts. Copies of a part's KV are made beside steps,
in the share that this group has of the other one's memory for copies; from then on each step says where they are.

Nothing depends on who then computes which pieces of a part: both sides take what they come to. So a part that is not
needed any longer costs a copy of queries in each step, and its place; it ends when the group would not be over the mean
without it, or the other one has come to be slower.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from penstock.core.plan import HELPED_BLOCKS, Helped
from penstock.sched.parallel.groups import PART, SPLIT, GroupLoad, even_out

PART_TOKENS = 256  # of attention, that posting a part costs both sides in each step


@dataclass(slots=True)
class Part:
    """The first pieces of a sequence.

    Attributes:
        places: of copies of pieces, in the memory of the group that helps.
        copying: until all copies are there, or no more are made. Set by whoever makes them.
        ended: it is not needed, and nothing more is to be copied.
    """

    request_id: str
    group: int
    places: tuple[int, ...]
    copying: bool = True
    ended: bool = False

    @property
    def tokens(self) -> int:
        return len(self.places) * SPLIT

    @property
    def blocks(self) -> tuple[int, ...]:
        return tuple(place * HELPED_BLOCKS + i for place in self.places for i in range(HELPED_BLOCKS))


@dataclass
class Helping:
    """Of one group.

    Attributes:
        group: its number, of `groups`.
        room: pieces that fit into each group's memory for copies.
        ahead: plans that may not have run while further ones are made.
        parts: by request.
    """

    group: int
    groups: int
    room: int
    ahead: int
    parts: dict[str, Part] = field(default_factory=dict)
    _free: dict[int, list[int]] = field(init=False)
    _used: deque[tuple[int, Part]] = field(default_factory=deque)  # since which plan ended, of those with places
    _plans: int = 0

    def __post_init__(self) -> None:
        others = [group for group in range(self.groups) if group != self.group]
        each = self.room // len(others)
        # in another group's memory every group but that one has a share, in their order
        shares = {group: (self.group - (self.group > group)) * each for group in others}
        self._free = {group: list(range(shares[group], shares[group] + each)) for group in others}

    def planned(self, released: Collection[str]) -> list[Helped]:
        """A plan is made, and these sequences have given back their blocks. Returns what may be helped with in it."""
        self._plans += 1
        for request_id in released:
            if request_id in self.parts:
                self._end(request_id)
        while self._used and self._used[0][0] + self.ahead < self._plans:
            self._reclaim(self._used.popleft()[1])
        return [Helped(part.request_id, part.group, 0, part.blocks) for part in self.parts.values() if not part.copying]

    def look(
        self, sequences: Mapping[str, tuple[int, int]], alone: float, loads: Sequence[float], token_ms: float
    ) -> list[Part]:
        """What to copy.

        Args:
            sequences: of those that decode, tokens of KV, and of how many from the first on that will not change.
            loads: tokens that each group attends over: for its sequences, and for those that it helps with.
            alone: those that this group would without help.
            token_ms: of attention over a token.
        """
        mean = sum(loads) / len(loads)
        for part in list(self.parts.values()):
            if alone <= mean or loads[part.group] > loads[self.group] + part.tokens:
                self._end(part.request_id)
                return []  # and see what comes of it
        names = [name for name, (_, settled) in sequences.items() if settled >= SPLIT and name not in self.parts]
        those = tuple((i, min(sequences[name][0], sequences[name][1] + 1)) for i, name in enumerate(names))
        rest = max(0.0, loads[self.group] - sum([tokens for _, tokens in those]))
        groups = [
            GroupLoad(those, 0, rest * token_ms)
            if group == self.group
            else GroupLoad(((-1 - group, round(load)),), len(self._free[group]) * SPLIT)
            for group, load in enumerate(loads)
        ]
        found = list[Part]()
        for move in even_out(groups, token_ms, PART_TOKENS * token_ms, (PART,)):
            if move.source == self.group:
                free, name = self._free[move.target], names[move.sequences[0]]
                places = tuple(free.pop() for _ in range(move.tokens // SPLIT))
                found.append(Part(name, move.target, places))
        self.parts.update({part.request_id: part for part in found})
        return found

    def _end(self, request_id: str) -> None:
        part = self.parts.pop(request_id)
        part.ended = True
        self._used.append((self._plans, part))

    def _reclaim(self, part: Part) -> None:
        """No step has it."""
        if part.copying:
            self._used.append((self._plans, part))
        else:
            self._free[part.group] += part.places

    def check(self) -> None:
        """Raise AssertionError unless every place is free or in one part."""
        held = [*self.parts.values(), *(part for _, part in self._used)]
        for group, free in self._free.items():
            places = [*free, *(place for part in held if part.group == group for place in part.places)]
            assert len(places) == len(set(places)) == self.room // (self.groups - 1), places
