"""What balance between data-parallel groups gains: lengths that are drawn, `admit` and `GroupBalance` as they are, and
the step-time model.

Groups decode, each with sequences of its own, and wait for each other in every step. Where a sequence ends the next one
comes, whose prompt was computed elsewhere. One that moves to another group pauses for a while.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from penstock.core.plan import BLOCK_TOKENS
from penstock.sched.cluster.base import ClusterView, Demand, InstanceLoad, Rates, Resident
from penstock.sched.cluster.conversion import PAUSE
from penstock.sched.cluster.group_balance import GroupBalance
from penstock.sched.parallel.groups import admit
from penstock.sched.parallel.units import busiest, in_turn, spread_rows
from penstock.sched.steptime import StepTime
from penstock.workload.lengths import LengthPairs, Tokens

TICK = 0.1  # seconds between two looks of the master
EVERY = 50  # steps, of which one is looked at for its units
PIECE = 512  # tokens, of which pieces of long sequences have multiples
MOST = 1 << 15  # tokens that any sequence may generate


@dataclass(frozen=True, slots=True)
class Evenness:
    """Of all steps but those of the first half, in the mean.

    Attributes:
        apart: tokens of KV that the group with the most attends over, less those of the one with the fewest.
        step_ms: of all groups, and how much of it each waits for the slowest.
        in_turn: tokens of the busiest unit of the group with the most, when its units get whole sequences in turn;
            `spread`: when these are spread evenly, long ones in pieces; `mean`: of a unit.
        moved: moves, for each thousand sequences that end.
    """

    apart: float
    step_ms: float
    wait_ms: float
    in_turn: float
    spread: float
    mean: float
    moved: float


class _Decoding:
    """Sequences that decode; where one ends the next has its number.

    Attributes:
        where: groups. `began`: when its first token was there; `pauses`: until when.
    """

    def __init__(self, prompts: Tokens, outputs: Tokens, groups: int, rng: np.random.Generator) -> None:
        self.where = np.arange(len(prompts)) % groups
        self.prompts, self.outputs = prompts, outputs
        self.generated = (outputs * rng.random(len(prompts))).astype(np.int64)  # they have begun at any time
        self.began, self.pauses = np.zeros(len(prompts)), np.zeros(len(prompts))
        self.lives = np.zeros(len(prompts), np.int64)

    def held(self, groups: int) -> npt.NDArray[np.int64]:
        """Tokens of each group."""
        return np.bincount(self.where, self.prompts + self.generated, groups).astype(np.int64)

    def lengths(self, group: int) -> list[int]:
        """Tokens of each of its sequences."""
        here = self.where == group
        found: list[int] = (self.prompts + self.generated)[here].tolist()
        return found

    def residents(self, group: int, now: float, step: float) -> list[Resident]:
        found = []
        for i in np.flatnonzero((self.where == group) & (self.pauses <= now)).tolist():
            demand = Demand(key=("", f"{i}.{self.lives[i]}"), prompt_tokens=int(self.prompts[i]), max_tokens=MOST)
            found.append(Resident(demand=demand, at=str(group), since=now - step * int(self.generated[i])))
        return found


def simulate_groups(
    lengths: LengthPairs,
    times: StepTime,
    rng: np.random.Generator,
    *,
    groups: int,
    sequences: int,
    room: int,
    units: int,
    steps: int,
    by_room: bool,
    moves: bool,
) -> Evenness:
    """
    Args:
        times: of a group.
        sequences: of each group, in the mean.
        room: of a group, tokens of KV; `units`: of its device, that attend.
        by_room: a sequence goes to the group with the most room, rather than to each in turn.
        moves: sequences move.
    """
    drawn, draws = rng.spawn(2)
    decoding = _Decoding(*lengths.draw(groups * sequences, drawn), groups, rng)
    balance, now, look_at, turn = GroupBalance(), 0.0, 0.0, 0
    names, output = frozenset(map(str, range(groups))), float(decoding.outputs.mean())
    ended = moved = 0
    seen: list[tuple[float, float, float]] = []
    of_units: list[tuple[int, int, float]] = []
    for number in range(steps):
        held = decoding.held(groups)
        each = [times.step_ms(decodes=sequences, kv_tokens=tokens) for tokens in held.tolist()]  # rows share experts
        step = max(each) / 1e3
        now += step
        if 2 * number >= steps:
            seen.append((float(held.max() - held.min()), max(each), max(each) - sum(each) / groups))
            if number % EVERY == 0:
                fullest = decoding.lengths(int(held.argmax()))
                spread = busiest(spread_rows(fullest, units, PIECE))
                of_units.append((in_turn(fullest, units), spread, sum(fullest) / units))
        decoding.generated[decoding.pauses <= now] += 1
        over = np.flatnonzero(decoding.generated >= decoding.outputs)
        for i, prompt, generates in zip(over.tolist(), *lengths.draw(len(over), draws), strict=True):
            held[decoding.where[i]] -= decoding.prompts[i] + decoding.generated[i]
            to = admit([room - int(tokens) for tokens in held], int(prompt)) if by_room else turn % groups
            assert to is not None, "there is no room"
            held[to] += prompt
            turn += 1
            decoding.where[i], decoding.prompts[i], decoding.outputs[i] = to, prompt, generates
            decoding.generated[i], decoding.lives[i] = 0, decoding.lives[i] + 1
        ended += len(over) if 2 * number >= steps else 0
        if moves and now >= look_at:
            look_at = now + TICK
            went = _move(balance, decoding, _view(now, step, decoding, times, names, room, output), step)
            moved += went if 2 * number >= steps else 0
    apart, step_ms, wait_ms = np.mean(seen, axis=0).tolist()
    turns, spread, mean = np.mean(of_units, axis=0).tolist()
    return Evenness(apart, step_ms, wait_ms, turns, spread, mean, 1000 * moved / max(1, ended))


def _view(
    now: float, step: float, decoding: _Decoding, times: StepTime, names: frozenset[str], room: int, output: float
) -> ClusterView:
    held, rows = decoding.held(len(names)).tolist(), np.bincount(decoding.where, minlength=len(names)).tolist()
    loads: Sequence[InstanceLoad] = [
        InstanceLoad(
            name=str(group),
            times=times,
            max_sequences=1 << 20,
            max_model_len=1 << 20,
            num_blocks=room // BLOCK_TOKENS,
            free_blocks=(room - held[group]) // BLOCK_TOKENS,
            requests=rows[group],
            decoding=rows[group],
            held_tokens=held[group],
            interval=step,
            meets="all",
            peers=names,
        )
        for group in range(len(names))
    ]
    return ClusterView(now=now, instances=loads, rates=Rates(output_tokens=output))


def _move(balance: GroupBalance, decoding: _Decoding, view: ClusterView, step: float) -> int:
    """Returns how many."""
    found = balance.balance(view, lambda name: decoding.residents(int(name), view.now, step))
    for migration in found:
        i = int(migration.key[1].partition(".")[0])
        decoding.where[i], decoding.pauses[i] = int(migration.to), view.now + PAUSE
    return len(found)
