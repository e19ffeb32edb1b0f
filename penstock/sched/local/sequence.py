"""A sequence is its tokens and one count: how many of them are computed (architecture, idea 1)."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from penstock.core.plan import BLOCK_TOKENS
from penstock.core.request import Request


def blocks_for(tokens: int) -> int:
    """How many blocks hold so many tokens."""
    return -(-tokens // BLOCK_TOKENS)


def standing_of(request: Request) -> tuple[bool, int]:
    """Who takes room from whom: the greater gives way to the less."""
    return request.offline, request.priority


class Sequence:
    """One request on its way through an engine. Times are seconds of the engine's clock.

    Attributes:
        rank: (offline, priority, order of arrival); whoever is last gives up its blocks first.
        turn: its place among those whose prompts are to be read, the least first; what it means is the pacing's own.
        arrived: when its client sent it.
        ttft, tpot: its targets in seconds; inf without.
        first: what the deadlines of its tokens are counted from: when the first was drawn here. None before that: then
            its next token is due like a first one, also when others were generated elsewhere.
        tokens: the prompt and what was generated, here and before.
        computed: the KV of tokens[:computed] is in `blocks`.
        keys: prefix keys of the leading full blocks of `tokens`, as far as they were needed.
        published: how many leading blocks can be found by their key.
        cached_tokens: prompt tokens found in the prefix cache when the sequence was first admitted; None before that.
        departs: it is meant to go on at another instance after its prompt.
        travelling: how many leading blocks are being sent there.
    """

    __slots__ = (
        "arrived",
        "blocks",
        "cached_tokens",
        "computed",
        "departs",
        "first",
        "keys",
        "published",
        "rank",
        "request",
        "tokens",
        "tpot",
        "travelling",
        "ttft",
        "turn",
    )

    def __init__(self, request: Request, number: int, now: float) -> None:
        self.request = request
        self.rank = (*standing_of(request), number)
        self.turn: tuple[float, ...] = self.rank
        self.arrived = now - request.waited
        self.ttft = inf if request.ttft_ms is None else request.ttft_ms / 1e3
        self.tpot = inf if request.tpot_ms is None else request.tpot_ms / 1e3
        self.first: float | None = None
        self.tokens = list(request.context)
        self.computed = 0
        self.blocks: list[int] = []
        self.keys: list[bytes] = []
        self.published = 0
        self.cached_tokens: int | None = None
        self.departs = False
        self.travelling = 0

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def offline(self) -> bool:
        return self.rank[0]

    @property
    def standing(self) -> tuple[bool, int]:
        return self.rank[:2]

    @property
    def targeted(self) -> bool:
        """Whether any of its tokens has a deadline."""
        return not self.offline and min(self.ttft, self.tpot) < inf

    @property
    def pending(self) -> int:
        """Tokens that are not computed yet: one while decoding, more while the prompt is read."""
        return len(self.tokens) - self.computed

    @property
    def generated(self) -> int:
        return len(self.tokens) - len(self.request.prompt)

    @property
    def due(self) -> float:
        """The deadline of its next token; inf without one."""
        if self.first is None:
            return self.arrived + self.ttft
        return self.first + self.tpot * self.generated

    def start_clock(self, now: float) -> None:
        """The tokens that it has count as if the last of them had been drawn now, right in time."""
        self.first = now if self.tpot == inf else now - self.tpot * (self.generated - 1)


@dataclass(slots=True, eq=False)
class Reservation:
    """Blocks set aside for a request whose prompt is read at another instance.

    Attributes:
        keys: prefix keys of the full blocks of all that is read there.
        blocks: for all of it, in order; those before `have` hold its KV already.
    """

    request: Request
    keys: list[bytes]
    blocks: list[int]
    have: int
