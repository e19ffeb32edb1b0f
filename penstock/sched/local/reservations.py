"""Room that is set aside for sequences that come from other instances."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass

from penstock.core.errors import PromptTooLong
from penstock.core.plan import BLOCK_TOKENS
from penstock.core.request import Request
from penstock.kv.groups import first_seen, held_of
from penstock.kv.keys import extend_keys, salted
from penstock.sched.local.kv_manager import KVManager
from penstock.sched.local.sequence import Sequence, blocks_for


@dataclass(slots=True, eq=False)
class Reservation:
    """Blocks set aside for a request that comes from another instance.

    Attributes:
        tokens: its prompt and what was generated, as far as that is known.
        keys: prefix keys of the full blocks of these.
        blocks: for all of them, as a sequence has them, and for what was computed since; those before `have` hold its
            KV already, or are not needed.
        dropped: for each group, how many leading blocks are not needed.
    """

    request: Request
    tokens: list[int]
    keys: list[bytes]
    blocks: list[int]
    have: int
    dropped: list[int]

    @property
    def held(self) -> list[int]:
        return held_of(self.blocks, self.dropped)

    def needs(self, place: int) -> bool:
        """Whether the block at a place is one that is to be sent."""
        block, group = divmod(place, len(self.dropped))
        return place >= self.have and block >= self.dropped[group]

    @property
    def coming(self) -> list[int]:
        """Places in `blocks` of those that are to be sent."""
        return [place for place in range(self.have, len(self.blocks)) if self.needs(place)]

    @property
    def num_coming(self) -> int:
        had = self.have // len(self.dropped)
        return len(self.blocks) - self.have - sum([gone - had for gone in self.dropped if gone > had])


class Reservations:
    """
    Args:
        running: sequences whose needs come before those of a reservation that grows; kept up to date by their owner.

    Attributes:
        open: for those that are still to come.
        quarantine: blocks that something may still write to.
    """

    def __init__(self, kv: KVManager, root: bytes, running: Iterable[Sequence]) -> None:
        self.open: list[Reservation] = []
        self.quarantine: list[int] = []
        self._kv, self._pool, self._root, self._running = kv, kv.pool, root, running

    @property
    def num_blocks(self) -> int:
        return sum(len(r.held) for r in self.open) + len(self.quarantine)

    def sized(self, request: Request, sampled: Items[int]) -> tuple[Reservation, list[int]]:
        """One for a request of which so much was sampled elsewhere, and the cached blocks that it would hold. None of
        its other blocks is allocated. Raises PromptTooLong."""
        context = [*request.context, *sampled]
        length, longest = len(context), self._kv.limits.max_model_len
        if not 0 < length < longest:
            raise PromptTooLong.of(length, longest)
        computed = length - bool(sampled)  # the last token's KV perhaps will not be
        keys: list[bytes] = []
        extend_keys(keys, salted(self._root, request.cache_salt), context, computed // BLOCK_TOKENS, request.media)
        hit, windows = self._kv.match(keys), self._kv.windows
        dropped = [first_seen(window, computed) for window in windows]
        blocks = [*hit.blocks, *[-1] * (blocks_for(computed) * len(windows) - len(hit.blocks))]
        found = [block for i, block in enumerate(hit.blocks) if i // len(windows) >= dropped[i % len(windows)]]
        return Reservation(request, context, keys, blocks, len(hit.blocks), dropped), found

    def add(self, reservation: Reservation, hit: list[int]) -> None:
        """There is room for it."""
        self._pool.hold(hit)
        coming = reservation.coming
        for place, block in zip(coming, self._pool.allocate(len(coming)), strict=True):
            reservation.blocks[place] = block
        self.open.append(reservation)

    def extend(self, reservation: Reservation, blocks: int) -> bool:
        """Have it hold so many blocks at least, as many of each group of layers; False when there is no room for more
        beside what others need."""
        groups = len(reservation.dropped)
        missing = -(-blocks // groups) * groups - len(reservation.blocks)
        if missing > 0:
            if missing > self._pool.available - self._kv.promised(self._running):
                return False
            reservation.blocks += self._pool.allocate(missing)
        return True

    def complete(self, reservation: Reservation, sampled: Items[int]) -> bool:
        """All that was sampled elsewhere is known; the KV of the last token is not computed there. False when that does
        not go on from what was known, or there is no room for it."""
        tokens, known = [*reservation.request.context, *sampled], reservation.tokens
        if not sampled or tokens[: len(known)] != known or len(tokens) > self._kv.limits.max_model_len:
            return False
        computed = len(tokens) - 1
        blocks = blocks_for(computed) * len(reservation.dropped)
        if len(reservation.blocks) > blocks or not self.extend(reservation, blocks):
            return False
        reservation.tokens, request = tokens, reservation.request
        root = salted(self._root, request.cache_salt)
        extend_keys(reservation.keys, root, tokens, computed // BLOCK_TOKENS, request.media)
        return True

    def cancel(self, reservation: Reservation, quarantined: Items[int] = ()) -> None:
        """
        Args:
            quarantined: blocks of it that something may still write to; they are held until `end_quarantine`.
        """
        self.open.remove(reservation)
        self._pool.hold(quarantined)
        self.quarantine += quarantined
        self._pool.release(reservation.held)

    def end_quarantine(self, block: int, now: int | None = None) -> None:
        """Nothing writes to a block any longer.

        Args:
            now: the block that it was exchanged for, if it was.
        """
        self.quarantine.remove(block)
        self._pool.release([block if now is None else now])
