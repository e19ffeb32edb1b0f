"""Conversations go back to whoever holds their KV (RTP-LLM, section 5)."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

KEPT = 65536  # conversations


@dataclass(frozen=True, slots=True)
class Homes:
    """Where the last turn of a conversation was prefilled, and where it decoded."""

    prefill: str
    decode: str


class ChatAffinity:
    """Which instances the latest conversations were given to; the longest silent ones are forgotten.

    Args:
        kept: conversations that are remembered.
    """

    def __init__(self, kept: int = KEPT) -> None:
        self._kept = kept
        self._homes: OrderedDict[str, Homes] = OrderedDict()

    def homes(self, chat: str) -> Homes | None:
        """None when it is new, or "" because nobody knows."""
        return self._homes.get(chat) if chat else None

    def remember(self, chat: str, prefill: str, decode: str) -> None:
        if not chat:
            return
        self._homes[chat] = Homes(prefill, decode)
        self._homes.move_to_end(chat)
        if len(self._homes) > self._kept:
            self._homes.popitem(last=False)


def returns(wait: float, best: float, reload: float) -> bool:
    """Whether a conversation goes back although it has to wait: unless that wait is more than going elsewhere costs, by
    more than what has to be computed again there; twice, for in the next turn the same may have to be. All in one unit.

    Args:
        wait: until the holder can begin.
        best: the least cost of the others, what is computed again included.
        reload: to compute what the holder has.
    """
    return wait <= best + 2 * reload
