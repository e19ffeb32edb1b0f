"""How the ranks of one model share it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from penstock.core.errors import ConfigError

MOST_RANKS = 64
TENSOR, PIPELINE, DATA = "tensor-parallel-size", "pipeline-parallel-size", "data-parallel-size"
EXPERTS = "enable-expert-parallel"


class Place(NamedTuple):
    """What a rank has: of its data-parallel group's model the layers of one stage, and of these one shard."""

    group: int
    stage: int
    shard: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Ranks of one model, numbered as vLLM does: the shards of a stage are neighbours, and so are a group's stages.

    Attributes:
        tensor: ranks that every layer is spread over: each has some heads, and some inner values of a feed-forward.
        pipeline: stages, each of which has some consecutive layers; the first has the embedding, the last the head.
        data: groups of so many ranks, each with its own sequences and KV cache.
        experts: whether experts are spread over the shards of all groups of a stage, whole ones; otherwise a group has
            all, each of them spread over its shards.
    """

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    experts: bool = False

    def __post_init__(self) -> None:
        for name, size in ((TENSOR, self.tensor), (PIPELINE, self.pipeline), (DATA, self.data)):
            if not 1 <= size <= MOST_RANKS:
                raise ConfigError(f"{name}: {size}, allowed is 1 to {MOST_RANKS}", name)
        if self.size > MOST_RANKS:
            name = PIPELINE if self.group_size > MOST_RANKS else DATA
            raise ConfigError(f"{name}: {self} are {self.size} ranks, allowed are {MOST_RANKS} together", name)

    def __str__(self) -> str:
        """As "4TP", "1TP8DP" or "2TP2PP", with EP at the end."""
        return f"{self.tensor}TP{_times(self.pipeline, 'PP')}{_times(self.data, 'DP')}{'EP' if self.experts else ''}"

    @property
    def group_size(self) -> int:
        """Ranks of a group."""
        return self.tensor * self.pipeline

    @property
    def size(self) -> int:
        """All ranks."""
        return self.group_size * self.data

    @property
    def answering(self) -> int:
        """Rank of a group that knows what comes of its steps: the first one of its last stage."""
        return self.group_size - self.tensor

    @property
    def expert_ranks(self) -> int:
        """That the experts of a layer are spread over, whole ones; 1 where each rank has a part of all."""
        return self.tensor * self.data if self.experts else 1

    @property
    def meets(self) -> bool:
        """Whether groups compute their steps together."""
        return self.experts and self.data > 1

    @property
    def rounding(self) -> str:
        """Names what the last bits of sums depend on: in how many parts they are summed up, and of what. Stages and
        groups change none."""
        return f"{self.tensor}{' experts' if self.experts and self.tensor > 1 else ''}"

    def place(self, rank: int) -> Place:
        assert 0 <= rank < self.size
        group, inner = divmod(rank, self.group_size)
        return Place(group, *divmod(inner, self.tensor))

    def rank(self, place: Place) -> int:
        return (place.group * self.pipeline + place.stage) * self.tensor + place.shard

    def layers(self, stage: int, count: int) -> range:
        """Of so many, those of a stage: none has two more than another, and the last, which has the head, no more than
        any."""
        assert 0 <= stage < self.pipeline <= count
        each, more = divmod(count, self.pipeline)
        first = stage * each + min(stage, more)
        return range(first, first + each + (stage < more))

    def check(self, model: Divisible) -> None:
        """Raise ConfigError, which names the flag, where a model cannot be shared so."""
        tensor = f"{TENSOR}: {self.tensor}, allowed is"
        split = {
            "num_attention_heads": model.heads,
            "intermediate_size": model.intermediate,
            "experts' intermediate size": 0 if self.experts else model.expert_width,
            "shared experts' intermediate size": model.shared_width,
            "vision heads": model.vision_heads,
            "vision intermediate size": model.vision_width,
        }
        for name, count in split.items():
            if count % self.tensor:
                raise ConfigError(f"{tensor} what divides the model's {name}, {count}", TENSOR)
        if model.kv_heads % self.tensor and self.tensor % model.kv_heads:
            why = f"a divisor or a multiple of the model's num_key_value_heads, {model.kv_heads}"
            raise ConfigError(f"{tensor} {why}", TENSOR)
        if self.pipeline > model.layers:
            why = f"at most the model's num_hidden_layers, {model.layers}"
            raise ConfigError(f"{PIPELINE}: {self.pipeline}, allowed is {why}", PIPELINE)
        if self.experts and not model.experts:
            raise ConfigError(f"{EXPERTS}: the model has no experts, allowed is false", EXPERTS)
        if self.experts and model.experts < self.expert_ranks:
            why = f"at most as many ranks as the model has experts, {model.experts}"
            raise ConfigError(f"{EXPERTS}: {self} spreads them over {self.expert_ranks}, allowed is {why}", EXPERTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Divisible:
    """What of a model is shared.

    Attributes:
        intermediate: of dense feed-forwards; 0 where there are none, as are the next three.
        experts: routed ones of a layer.
        expert_width: intermediate size of each.
        shared_width: of those that all rows have, together.
        vision_heads, vision_width: of a vision tower's attention and feed-forwards.
    """

    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    experts: int = 0
    expert_width: int = 0
    shared_width: int = 0
    vision_heads: int = 0
    vision_width: int = 0


ALONE = Layout()


@dataclass(frozen=True, slots=True)
class Placement:
    """Which experts of a layer each rank has; what chose one that several have is spread evenly over these.

    Attributes:
        ranks: of each rank, experts by their numbers.
    """

    ranks: tuple[tuple[int, ...], ...]

    @classmethod
    def even(cls, experts: int, ranks: int) -> Placement:
        """Each at one, its home: consecutive ones, as evenly as it can be."""
        bounds = [rank * experts // ranks for rank in range(ranks + 1)]
        return cls(tuple(tuple(range(*pair)) for pair in pairwise(bounds)))

    @property
    def experts(self) -> int:
        return 1 + max(max(rank, default=-1) for rank in self.ranks)

    def ranks_of(self) -> list[list[int]]:
        """Of each expert, the ranks that have it."""
        found: list[list[int]] = [[] for _ in range(self.experts)]
        for rank, experts in enumerate(self.ranks):
            for expert in experts:
                found[expert].append(rank)
        return found

    def loads(self, counts: Sequence[float]) -> list[float]:
        """Of each rank, by the load of each expert."""
        each = [count / len(ranks) for count, ranks in zip(counts, self.ranks_of(), strict=True)]
        return [sum([each[expert] for expert in experts]) for experts in self.ranks]

    def imbalance(self, counts: Sequence[float]) -> float:
        """The busiest rank's load over the mean; 1 without any load."""
        loads = self.loads(counts)
        total = sum(loads)
        return max(loads) * len(loads) / total if total > 0 else 1.0

    def changes(self, new: Placement) -> list[tuple[int, int]]:
        """(rank, expert) of what a rank has in `new` only."""
        return [
            (rank, expert)
            for rank, (mine, theirs) in enumerate(zip(self.ranks, new.ranks, strict=True))
            for expert in theirs
            if expert not in mine
        ]

    def check(self) -> None:
        """Raise AssertionError unless every expert is somewhere, at most once on a rank."""
        assert all(len(set(rank)) == len(rank) for rank in self.ranks)
        assert {expert for rank in self.ranks for expert in rank} == set(range(self.experts))


@dataclass(frozen=True, slots=True)
class Switch:
    """From the next step on a layer's experts are where this version has them, on every rank.

    Attributes:
        version: one more for each that is prepared.
    """

    version: int
    layer: int
    placement: Placement


def _times(count: int, name: str) -> str:
    return f"{count}{name}" if count > 1 else ""
