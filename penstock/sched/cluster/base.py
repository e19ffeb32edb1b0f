"""What a dispatch policy sees, and what it answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeVar

from penstock.core.wire.engine import Pool

Stage = Literal["prefill", "decode"]
T = TypeVar("T")


class Random(Protocol):
    """A seeded generator, such as `random.Random`."""

    def choice(self, candidates: Sequence[T], /) -> T: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceLoad:
    """One instance that may be given work, with everything that was sent to it already counted. A view: `peers` and
    `unlinked` change with the cluster.

    Attributes:
        pool: which work it is meant for.
        requests: sequences that wait or run there, or are on their way.
        pending_tokens: prompt tokens that are still to be computed there.
        held_tokens: tokens whose KV is there or will be.
        num_blocks: KV blocks that it may hold.
        max_model_len: prompt and output tokens of one sequence together.
        peers: instances that it can hand a request over to.
        unlinked: why it cannot to others that should be: name -> reason.
    """

    name: str
    pool: Pool = "any"
    requests: int = 0
    pending_tokens: int = 0
    held_tokens: int = 0
    num_blocks: int = 0
    max_model_len: int = 0
    peers: Set[str] = frozenset()
    unlinked: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """A sequence that needs a place."""

    prompt_tokens: int
    max_tokens: int
    priority: int = 0
    waited: float = 0.0  # seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Where a sequence runs, and why.

    Attributes:
        prefill: the instance that reads the prompt.
        decode: the one that takes over after it; None when nobody does.
        reason: a class of reasons, and after a colon the details, if any: "no-decode: d0 is not linked".
        costs: what the policy held against each candidate, the chosen one included, by stage and name.
    """

    prefill: str
    decode: str | None
    policy: str
    reason: str
    costs: Mapping[Stage, Mapping[str, float]]


class DispatchPolicy(Protocol):
    """Compares instances. Who is a candidate at all is decided before it is asked; see `dispatch`.

    Attributes:
        wants_keys: whether it looks at the prompt's prefix keys; nobody computes them where it does not.
    """

    name: str
    wants_keys: bool

    def choose(
        self, stage: Stage, demand: Demand, candidates: Sequence[InstanceLoad], rng: Random
    ) -> tuple[str, Mapping[str, float]]:
        """The chosen candidate's name, and every candidate's cost; there is at least one candidate."""
