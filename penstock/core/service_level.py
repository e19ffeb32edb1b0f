"""A request's service level: targets, priority, class."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceLevel:
    """
    Attributes:
        ttft_ms, tpot_ms: time to first token, and mean time per token after it; None without a target.
        priority: lower runs first.
        offline: it has no targets, and uses the capacity that other requests leave.
        chat: the conversation that it belongs to, for policies with affinity; "" when not known.
    """

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    priority: int = 0
    offline: bool = False
    chat: str = ""


NO_LEVEL = ServiceLevel()


@dataclass(frozen=True, slots=True)
class Range:
    """Of a target, in seconds."""

    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Bounds:
    """Of the targets of one priority."""

    ttft: Range
    tpot: Range
