"""A sequence is its tokens and one count: how many of them are computed (architecture, idea 1)."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.core.plan import BLOCK_TOKENS
from penstock.core.request import Request


def blocks_for(tokens: int) -> int:
    """How many blocks hold so many tokens."""
    return -(-tokens // BLOCK_TOKENS)


class Sequence:
    """One request on its way through an engine.

    Attributes:
        rank: (priority, order of arrival); the least runs first, whatever happened to the sequence meanwhile.
        tokens: the prompt and what was generated.
        computed: the KV of tokens[:computed] is in `blocks`.
        keys: prefix keys of the leading full blocks of `tokens`, as far as they were needed.
        published: how many leading blocks can be found by their key.
        cached_tokens: prompt tokens found in the prefix cache when the sequence was first admitted; None before that.
        departs: it is meant to go on at another instance after its prompt.
        travelling: how many leading blocks are being sent there.
    """

    __slots__ = (
        "blocks",
        "cached_tokens",
        "computed",
        "departs",
        "keys",
        "published",
        "rank",
        "request",
        "tokens",
        "travelling",
    )

    def __init__(self, request: Request, arrival: int) -> None:
        self.request = request
        self.rank = (request.priority, arrival)
        self.tokens = list(request.prompt)
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
    def pending(self) -> int:
        """Tokens that are not computed yet: one while decoding, more while the prompt is read."""
        return len(self.tokens) - self.computed

    @property
    def generated(self) -> int:
        return len(self.tokens) - len(self.request.prompt)

    @property
    def blocks_missing(self) -> int:
        """Blocks it still needs to compute every token it has."""
        return max(0, blocks_for(len(self.tokens)) - len(self.blocks))


@dataclass(slots=True, eq=False)
class Reservation:
    """Blocks set aside for a request whose prompt is read at another instance.

    Attributes:
        keys: prefix keys of the prompt's full blocks.
        blocks: for the whole prompt, in order; those before `have` hold its KV already.
    """

    request: Request
    keys: list[bytes]
    blocks: list[int]
    have: int
