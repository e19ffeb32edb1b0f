"""What a model thinks before it answers, by its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penstock.core.errors import InvalidRequest

FIELD = "thinking"
MAX_TOKENS = 64  # of a marker
MAX_BUDGET = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Thinking:
    """Where the answer begins in an output, and when it has to. A function of the output's tokens alone.

    Attributes:
        start: tokens that open it; an output that does not begin with them is an answer. Empty where the prompt has
            opened it.
        end: tokens that close it, at least one.
        budget: once it has so many tokens, `end` follows; None is any number.
    """

    start: tuple[int, ...] = ()
    end: tuple[int, ...]
    budget: int | None = None

    @classmethod
    def of(cls, value: Any) -> Thinking:
        """Of an object with these fields. Raises InvalidRequest."""
        if isinstance(value, cls):
            return value
        if not isinstance(value, dict) or not value.keys() <= {"start", "end", "budget"}:
            raise InvalidRequest(f"{FIELD}: {_short(value)}, allowed is an object with start, end and budget", FIELD)
        start: Any = () if value.get("start") is None else value["start"]
        end: Any = value.get("end")
        budget = _whole(value.get("budget"))
        for name, tokens, least in (("start", start, 0), ("end", end, 1)):
            fits = isinstance(tokens, list | tuple) and least <= len(tokens) <= MAX_TOKENS
            if not fits or not all(type(token) is int and token >= 0 for token in map(_whole, tokens)):
                field = f"{FIELD}.{name}"
                raise InvalidRequest(
                    f"{field}: {_short(tokens)}, allowed is a list of {least} to {MAX_TOKENS} token ids", field
                )
        if budget is not None and (type(budget) is not int or not 0 <= budget <= MAX_BUDGET):
            field = f"{FIELD}.budget"
            allowed = f"a whole number from 0 to {MAX_BUDGET}"
            raise InvalidRequest(f"{field}: {_short(budget)}, allowed is {allowed}", field)
        return cls(start=tuple(map(int, start)), end=tuple(map(int, end)), budget=budget)

    def answer(self, generated: Sequence[int]) -> int | None:
        """How many of these tokens come before the answer; None where there is none yet. 0 also while it is not known
        whether they open it."""
        if tuple(generated[: len(self.start)]) != self.start:
            return 0
        place, last = len(self.start) + len(self.end) - 1, self.end[-1]
        while True:
            try:
                place = generated.index(last, place) + 1
            except ValueError:
                return None
            if tuple(generated[place - len(self.end) : place]) == self.end:
                return place

    def opening(self, generated: Sequence[int]) -> int | None:
        """The token that would go on to open it, where all of these do."""
        count = len(generated)
        return self.start[count] if count < len(self.start) and tuple(generated) == self.start[:count] else None

    def forced(self, generated: Sequence[int]) -> int | None:
        """The token that has to follow these, since the budget is spent."""
        if self.budget is None:
            return None
        over = len(generated) - len(self.start) - self.budget
        return self.end[over] if 0 <= over < len(self.end) and self.answer(generated) is None else None


def _whole(value: Any) -> Any:
    """1.0 as 1: JSON knows no difference."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
