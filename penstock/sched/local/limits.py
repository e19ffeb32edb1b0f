"""What bounds a scheduler, and what it counts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one step and one sequence may be.

    Attributes:
        token_budget: tokens computed in one step, at most; at least `max_sequences`, so that no decode is left out.
        max_sequences: sequences that run at once, at most.
        max_model_len: prompt and output tokens of one sequence, at most; the pool can hold one such sequence.
        searches: whether what computes the steps can search with beams.
    """

    token_budget: int
    max_sequences: int
    max_model_len: int
    searches: bool = True

    def __post_init__(self) -> None:
        assert self.max_sequences >= 1
        assert self.max_model_len >= 2
        assert self.token_budget >= self.max_sequences


@dataclass(slots=True)
class Counters:
    """Totals since the start."""

    preemptions: int = 0
    prefix_queries: int = 0  # prompt tokens looked up in the prefix cache
    prefix_hits: int = 0  # prompt tokens found there
    prefix_loads: int = 0  # those of them that were loaded from a tier below the device
