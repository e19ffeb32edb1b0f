"""How the ranks of one model share it."""

from __future__ import annotations

from dataclasses import dataclass
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


def _times(count: int, name: str) -> str:
    return f"{count}{name}" if count > 1 else ""
