"""When experts move between ranks, and how: nothing waits for it, and no token changes (xLLM, section 4.4.2).

Tokens that each expert was chosen by are counted beside the steps. From time to time layers whose busiest rank would
have less to do get a new placement, one after the other, the greatest gain first:

1. `Prepare`: every rank loads what is new to it into spare memory, while the old weights serve.
2. When all ranks have said that they are ready, `Switch`: between two steps, the same two on every rank, the layer's
   new weights take the place of the old, whose memory is spare from then on.
3. A rank that fails, is lost or takes too long before that ends it by `Abandon`, and everything is as it was. After the
   order to switch there is no way back: a rank that starts again is given the new placement.

A replica has the same weights as any other, and a row's sum over its experts is taken in the order of experts, wherever
each was computed: so tokens do not depend on placements.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

from penstock.core.errors import ConfigError
from penstock.core.parallel import Placement, Switch
from penstock.sched.parallel.placement import aligned, balanced, group_limited

GAIN = 0.05  # of the busiest rank's load, by which it has to fall at least: a move has to win back its cost
ENOUGH = 4000  # choices for each rank and layer, in the mean: the busiest of them by chance alone has some 4 % more
EPLB_CONFIG = "eplb-config"
PATIENCE = 30.0  # seconds until a rank that is not ready is given up


@dataclass(frozen=True, slots=True, kw_only=True)
class EplbConfig:
    """As vLLM has it.

    Attributes:
        window_size: steps before a look in which experts are counted.
        step_interval: steps from one look to the next.
        num_redundant_experts: replicas in a layer, on all ranks together; more where ranks would have unlike numbers.
        log_balancedness: whether every look says how even ranks are.
    """

    window_size: int = 1000
    step_interval: int = 3000
    num_redundant_experts: int = 0
    log_balancedness: bool = False


def make_eplb(asked: str) -> EplbConfig:
    """
    Args:
        asked: vLLM's JSON object, of the fields of `EplbConfig`; "use_async" may be true and "policy" "default", which
            they are.

    Raises ConfigError, naming what is allowed.
    """
    try:
        return _parsed(asked)
    except ValueError as error:
        raise ConfigError(f"{EPLB_CONFIG}: {asked!r}, allowed is {error}", EPLB_CONFIG) from None


def checked_eplb(asked: str) -> str:
    """The same text. Raises ValueError that says what is allowed."""
    _parsed(asked)
    return asked


def _parsed(asked: str) -> EplbConfig:
    try:
        config = json.loads(asked)
    except ValueError:
        config = None
    if not isinstance(config, dict):
        raise ValueError('a JSON object such as {"num_redundant_experts": 8}')
    for name, only in (("use_async", True), ("policy", "default")):
        if config.pop(name, only) != only:
            raise ValueError(f'"{name}": {json.dumps(only)}')
    for name, least in (("window_size", 1), ("step_interval", 1), ("num_redundant_experts", 0)):
        if name in config and (type(config[name]) is not int or not least <= config[name] <= 10**9):
            raise ValueError(f'"{name}": {least} to {10**9}')
    if not isinstance(config.get("log_balancedness", False), bool):
        raise ValueError('"log_balancedness": true or false')
    if unknown := config.keys() - {each.name for each in fields(EplbConfig)}:
        raise ValueError(f"no {json.dumps(min(unknown))}")
    return EplbConfig(**config)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertRanks:
    """
    Attributes:
        experts, layers: that a rank's slots are for.
        slots: experts that each rank has of a layer; together at least as many as there are, and the rest replicas.
        groups: of experts, of which a row's are in few; 1 places them globally.
        hosts: that ranks are on.
    """

    experts: int
    layers: int
    ranks: int
    slots: int
    groups: int = 1
    hosts: int = 1

    def placement(self, counts: Sequence[float]) -> Placement:
        """For such loads of a layer."""
        if self.groups > 1:
            return group_limited(counts, self.groups, self.hosts, self.ranks, self.slots)
        return balanced(counts, self.ranks, self.slots)

    @property
    def renamed_within(self) -> int:
        """Ranks that are alike."""
        return self.ranks // self.hosts if self.groups > 1 else self.ranks


@dataclass(frozen=True, slots=True)
class Prepare:
    """Load (rank, expert) of a layer into spare memory."""

    version: int
    layer: int
    loads: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Abandon:
    """What was loaded for this version is not needed."""

    version: int
    layer: int


Order = Prepare | Switch | Abandon


@dataclass(slots=True)
class _Move:
    """What is being prepared, or was ordered and not yet done."""

    version: int
    layer: int
    placement: Placement
    until: float
    missing: set[int]  # ranks that are not ready
    ordered: bool = False


class Rebalancer:
    """Of one model's ranks. Events in, orders out; orders are for all ranks.

    Attributes:
        placements: of each layer, as it is from the next step on.
    """

    def __init__(self, ranks: ExpertRanks) -> None:
        self.placements = [Placement.even(ranks.experts, ranks.ranks)] * ranks.layers
        self._ranks = ranks
        self._due: list[tuple[int, Placement]] = []  # layers that are worth a move, the best one last
        self._version = 0
        self._move: _Move | None = None
        self._lost: set[int] = set()

    @property
    def moves(self) -> bool:
        """Whether a layer is being prepared, which may take too long."""
        return self._move is not None and not self._move.ordered

    def look(self, counts: Sequence[Sequence[float]], rest: Callable[[], None] = lambda: None) -> None:
        """Of each layer, how many tokens have chosen each expert of late; what was due by earlier ones is not.

        Args:
            rest: called after each layer, since one takes some milliseconds.
        """
        gains = list[tuple[float, Placement, int]]()
        for layer, each in enumerate(counts):
            gains.append((*self._gain(layer, each), layer))
            rest()
        gains.sort(key=lambda found: (found[0], -found[2]))
        self._due = [(layer, placement) for gain, placement, layer in gains if gain > 0]

    def tick(self, now: float) -> Order | None:
        """What is due."""
        move = self._move
        if move is not None:
            late = now >= move.until and not move.ordered
            return self._abandon() if late else None
        return None if self._lost or not self._due else self._prepare(now, *self._due.pop())

    def ready(self, rank: int, version: int) -> Switch | None:
        """A rank has loaded what a version needs."""
        move = self._move
        if move is None or move.version != version or move.ordered:
            return None
        move.missing.discard(rank)
        if move.missing:
            return None
        move.ordered = True
        self.placements[move.layer] = move.placement
        return Switch(move.version, move.layer, move.placement)

    def failed(self, version: int) -> Abandon | None:
        """A rank cannot load what a version needs."""
        move = self._move
        return self._abandon() if move is not None and move.version == version and not move.ordered else None

    def switched(self, version: int) -> None:
        """The first step with it has begun."""
        if self._move is not None and self._move.version == version:
            assert self._move.ordered
            self._move = None

    def lost(self, rank: int) -> Abandon | None:
        """A rank has ended. Nothing moves until it is `back`."""
        self._lost.add(rank)
        return self._abandon() if self._move is not None and not self._move.ordered else None

    def back(self, rank: int) -> None:
        """It has started again, with `placements`."""
        self._lost.discard(rank)

    def check(self) -> None:
        """Raise AssertionError unless placements are whole, and a move is one of an idle layer to another placement."""
        for placement in self.placements:
            placement.check()
            assert placement.experts == self._ranks.experts
        if (move := self._move) is not None:
            assert move.version == self._version
            assert move.ordered == (not move.missing)
            assert move.ordered == (self.placements[move.layer] is move.placement)
            assert move.ordered or not self._lost

    def _prepare(self, now: float, layer: int, placement: Placement) -> Prepare:
        self._version += 1
        missing = set(range(self._ranks.ranks))
        self._move = _Move(self._version, layer, placement, now + PATIENCE, missing)
        return Prepare(self._version, layer, tuple(self.placements[layer].changes(placement)))

    def _gain(self, layer: int, counts: Sequence[float]) -> tuple[float, Placement]:
        """(tokens by which the busiest rank's load falls, or 0 where that is too little; with which placement)."""
        old = self.placements[layer]
        if sum(counts) < ENOUGH * self._ranks.ranks:
            return 0.0, old
        new = aligned(old, self._ranks.placement(counts), self._ranks.renamed_within)
        before, after = max(old.loads(counts)), max(new.loads(counts))
        return (before - after if after < (1 - GAIN) * before else 0.0), new

    def _abandon(self) -> Abandon:
        move, self._move = self._move, None
        assert move is not None
        self._due.clear()  # until the next look: others would probably end as this one
        return Abandon(move.version, move.layer)
