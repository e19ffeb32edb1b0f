"""Moves sequences between data-parallel groups that wait for each other in every layer with experts (xLLM, section
4.4.3, layer 2).

A step of all groups takes as long as that of the one whose sequences have the longest contexts. Where this has been
over the mean for a while, sequences of it go on in other groups, each alone or all together: by a hand-over, after
which they cost nothing more. What then is left, groups help each other with in parts (`sched.parallel.helping`), which
costs something in every step. Nothing swings: groups rest until what moves has arrived, and what has moved stays for a
while.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence, Set
from math import inf
from statistics import mean
from typing import NamedTuple

from penstock.core.plan import BLOCK_TOKENS
from penstock.sched.cluster.base import ClusterView, InstanceLoad, Key, Migration, Resident
from penstock.sched.cluster.conversion import OUTPUT, PAUSE
from penstock.sched.cluster.elastic_roles import interval
from penstock.sched.cluster.headroom import headroom
from penstock.sched.parallel.groups import BATCH, SEQUENCE, GroupLoad, Move, even_out, group_times, uneven

LASTS = 0.3  # seconds for which groups are uneven before anything moves
REST = 0.5  # seconds between two decisions for the same groups
DWELL = 5.0  # seconds that a sequence stays where it has moved to


class GroupBalance:
    """A `Balancer`."""

    name = "groups"

    def __init__(self) -> None:
        self._uneven: dict[str, float] = {}  # where groups meet -> since when
        self._decided: dict[str, float] = {}  # when something last moved there
        self._went: dict[Key, float] = {}  # when a sequence moved

    def balance(self, view: ClusterView, residents: Callable[[str], Sequence[Resident]]) -> Sequence[Migration]:
        now, meetings = view.now, dict[str, list[InstanceLoad]]()
        for load in view.instances:
            if load.meets:
                meetings.setdefault(load.meets, []).append(load)
        self._uneven = {at: self._uneven.get(at, now) for at, loads in meetings.items() if _Meeting(loads).uneven}
        self._went = {key: at for key, at in self._went.items() if now - at < DWELL}
        migrations: list[Migration] = []
        for at, since in self._uneven.items():
            if now - since < LASTS or now - self._decided.get(at, -inf) < REST:
                continue
            there = [residents(load.name) for load in meetings[at]]
            if any(len(found) < load.decoding for found, load in zip(there, meetings[at], strict=True)):
                continue  # something is on its way
            if found := _Meeting(meetings[at]).even_out(view, there, self._went):
                self._decided[at] = now
                self._went |= {migration.key: now for migration in found}
                migrations += found
        return migrations


class _Decoding(NamedTuple):
    """A sequence: tokens that it attends over, and steps that it is thought to have left."""

    key: Key
    tokens: int
    steps: float
    exclude: Set[str]


class _Meeting:
    """Groups that meet. The one that holds most waits for nobody, so its steps tell how long attention takes."""

    def __init__(self, loads: Sequence[InstanceLoad]) -> None:
        self._loads = loads
        most = max(loads, key=lambda load: (load.held_tokens, load.name))
        held, rows = most.held_tokens, most.requests
        self._rows_ms = most.times.step_ms(decodes=rows)
        self._token_ms = (most.times.step_ms(decodes=rows, kv_tokens=held) - self._rows_ms) / held if held else 0.0

    @property
    def uneven(self) -> bool:
        return self._token_ms > 0 and uneven([self._ms(load.held_tokens) for load in self._loads])

    def _ms(self, tokens: int) -> float:
        """Of a step that attends over so many tokens. What else it does takes all about as long."""
        return self._rows_ms + tokens * self._token_ms

    def even_out(
        self, view: ClusterView, there: Sequence[Sequence[Resident]], staying: Container[Key]
    ) -> list[Migration]:
        """
        Args:
            there: of each group, what decodes there.
            staying: of which these do not move.
        """
        output, names = view.rates.output_tokens or OUTPUT, {load.name for load in self._loads}
        groups, going = list[GroupLoad](), list[list[_Decoding]]()
        for load, residents in zip(self._loads, there, strict=True):
            linked = load.peers >= names - {load.name}
            found = [
                one
                for one in _decoding(view.now, load, residents, output)
                if linked and one.key not in staying and not one.exclude & names
                if self._pays(one.tokens * self._token_ms, [one])
            ]
            stays = max(0, load.held_tokens - sum([one.tokens for one in found]))
            lengths = tuple((i, one.tokens) for i, one in enumerate(found))
            groups.append(GroupLoad(lengths, _room(load, output) if linked else 0, self._ms(stays)))
            going.append(found)
        moves = list(_seated(even_out(groups, self._token_ms, kinds=(BATCH, SEQUENCE)), self._loads))
        saved = max(group_times(groups, self._token_ms)) - max(group_times(groups, self._token_ms, moves))
        moved = [(move, going[move.source][sequence]) for move in moves for sequence in move.sequences]
        if not moved or not self._pays(saved, [one for _, one in moved]):
            return []
        return [Migration(key=one.key, to=self._loads[move.target].name, reason=self._why(move)) for move, one in moved]

    def _pays(self, saved: float, going: Sequence[_Decoding]) -> bool:
        """Whether so many ms less in every step are more, for all that decode, than what these pause."""
        steps, waiting = mean([one.steps for one in going]), sum([load.decoding for load in self._loads])
        return saved / 1e3 * steps * waiting > PAUSE * len(going)

    def _why(self, move: Move) -> str:
        source, target = self._loads[move.source], self._loads[move.target]
        held = f"{source.name} attends over {source.held_tokens:,}, {target.name} over {target.held_tokens:,}"
        return f"{move.kind}: of {move.tokens:,} tokens, {held}"


def _decoding(now: float, load: InstanceLoad, residents: Sequence[Resident], output: float) -> Iterator[_Decoding]:
    """What a group holds besides their prompts they have generated, in proportion to their ages. One is to come to what
    others come to; having passed that, to twice what it has."""
    grown = max(0, load.held_tokens - sum([r.demand.prompt_tokens for r in residents]))
    ages = sum([now - r.since for r in residents])
    pace = 1 / interval(load) if load.requests > len(residents) else inf  # others may be what else it holds
    each = min(pace, grown / ages) if ages else 0.0
    for resident in residents:
        demand = resident.demand
        generated = min(demand.max_tokens, round(each * (now - resident.since)))
        steps = min(demand.max_tokens - generated, max(output - generated, generated))
        yield _Decoding(demand.key, demand.prompt_tokens + generated, steps, demand.exclude)


def _room(load: InstanceLoad, output: float) -> int:
    """Tokens of sequences that it could take, besides what they will come to."""
    room = headroom(load, output) - output if load.requests < load.max_sequences else 0.0
    return int(max(0.0, min(room, load.num_blocks * BLOCK_TOKENS)))


def _seated(moves: Sequence[Move], loads: Sequence[InstanceLoad]) -> Iterator[Move]:
    """Those for whose sequences there is a place."""
    places = [load.max_sequences - load.requests for load in loads]
    for move in moves:
        if len(move.sequences) <= places[move.target]:
            places[move.target] -= len(move.sequences)
            yield move
