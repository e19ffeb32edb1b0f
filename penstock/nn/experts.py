"""Mixtures of experts: of many gated MLPs each row has a few, which its router chooses."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from functools import partial
from itertools import accumulate, chain
from typing import Any

import torch
from torch import Tensor, nn

from penstock.core.parallel import Placement
from penstock.nn import ops
from penstock.nn.config import DecoderConfig, ExpertsConfig, Routing
from penstock.nn.dispatch import share_of_rows, travel, whole_again
from penstock.nn.formats.base import Expected, Format
from penstock.nn.formats.dense import DENSE
from penstock.nn.helpers import Helpers
from penstock.nn.layers import FeedForward, GatedMLP
from penstock.nn.linear import WHOLE, Linear, Shard
from penstock.nn.methods.base import LinearMethod, Weight
from penstock.nn.streams import Steps, run

CORRECTION = "e_score_correction_bias"


def feed_forward(config: DecoderConfig, layer: int, shard: Shard = WHOLE) -> FeedForward:
    """What a layer has, by its config."""
    experts = config.experts
    if experts is None or layer not in experts.layers:
        return GatedMLP(config, shard)
    return MixtureOfExperts(config, experts, shard)


class Router(Linear):
    """Scores of all experts, whole on every rank.

    Attributes:
        correction: [experts] float32, where there is one (DeepSeek-V3, 2.1.2).
    """

    exact = True

    def __init__(self, hidden: int, routing: Routing) -> None:
        super().__init__(hidden, (routing.count,))
        self.routing = routing
        self.correction = None
        if routing.corrected:
            self.correction = nn.Parameter(torch.empty(routing.count, dtype=torch.float32), requires_grad=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> Router:
        correction, self.correction = self.correction, None
        super()._apply(fn, *args, **kwargs)
        if correction is not None:  # which stays in float32, whatever the model is made of
            made = fn(correction.detach())
            if made.dtype != correction.dtype:
                made = correction.detach().to(made.device)
            self.correction = nn.Parameter(made, requires_grad=False)
        return self

    def tensors(self, part: int | None = None) -> dict[str, Expected]:
        of_choice = {} if self.correction is None else {CORRECTION: Expected((len(self.correction),))}
        return super().tensors(part) | of_choice

    def load(self, name: str, tensor: Tensor, part: int | None = None, first: int = 0) -> None:
        if name == CORRECTION and self.correction is not None:
            self.correction[first : first + len(tensor)] = tensor
        else:
            super().load(name, tensor, part, first)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[rows, hidden] -> experts [rows, top_k] and their weights, as `ops.route` has them."""
        logits = self.method.apply(x, self.weight, self.bias, torch.float32)
        return ops.route(logits, self.correction, self.routing)


class ExpertLinear(Linear):
    """The same projections of several experts, one expert after the other in one weight. Each begins where the method
    can cut it, and is a `part` of it.

    Attributes:
        count: of all experts.
        slots: of those that are held here.
        width: outputs of each, all its projections together.

    Args:
        outs: of the projections of one expert, as a checkpoint has them.
        experts: those that are held here.
        shard: of each expert's outputs, or None for all of them.
        own_ins: of each expert's inputs.
    """

    def __init__(
        self,
        ins: int,
        outs: Sequence[int],
        count: int,
        experts: range,
        *,
        shard: Shard = WHOLE,
        own_ins: range | None = None,
    ) -> None:
        own = tuple(shard.of(width) for width in outs)
        self._shape = ins, tuple(outs), shard, own_ins
        self.count, self.slots, self.width = count, len(experts), sum(map(len, own))
        self._experts, self._each, self._stride = experts, len(outs), self.width
        every = [outs_of for i in range(count) for outs_of in (own if i in experts else (range(0),) * len(own))]
        self._stacked: ops.Stacked | None = None
        super().__init__(ins, tuple(outs) * count, own_ins=own_ins, own_outs=every)

    def hold(self, method: LinearMethod[Any, Any], form: Format[Any] = DENSE) -> None:
        cut = method.cut()
        self._stride = -(-self.width // cut) * cut
        dtype, device = self.weight.dtype, self.weight.device
        weight: Weight = method.create(self.slots * self._stride, len(self.own_ins), dtype, device)
        del self.weight
        self.method, self.format, self.weight = method, form, weight
        self._stacked = None

    def prepare(self) -> None:
        super().prepare()
        if self._stride != self.width:  # what fills up is zero
            held = self.weight.parameters() if isinstance(self.weight, nn.Module) else (self.weight,)
            for part in held:
                if part.dtype != torch.int32:  # no order of inputs
                    part.zero_()

    def _place(self, part: int) -> int:
        expert, projection = divmod(part, self._each)
        within = sum(map(len, self.own_outs[part - projection : part]))
        return (expert - self._experts.start) * self._stride + within

    def _apply(self, *args: Any, **kwargs: Any) -> ExpertLinear:
        super()._apply(*args, **kwargs)
        self._stacked = None
        return self

    def own(self, slot: int) -> Weight:
        """That of the expert in a slot, in the same memory."""
        return self._part(self.weight, slot)

    def _part(self, weight: Weight, slot: int) -> Weight:
        part: Weight = self.method.part(weight, slot * self._stride, self._stride)
        return part

    def alone(self, expert: int) -> ExpertLinear:
        """The same for one expert, whose weight has no values yet; on the CPU."""
        ins, outs, shard, own_ins = self._shape
        one = ExpertLinear(ins, outs, self.count, range(expert, expert + 1), shard=shard, own_ins=own_ins)
        one.to(self.weight.dtype).hold(self.method, self.format)
        one.prepare()
        return one

    def spare(self, slots: int) -> list[Weight]:
        """Weights for so many experts besides."""
        size, like = slots * self._stride, self.weight
        weight: Weight = self.method.create(size, len(self.own_ins), like.dtype, like.device)
        self.method.prepare(weight)
        return [self._part(weight, slot) for slot in range(slots)]

    @property
    def stacked(self) -> ops.Stacked:
        """As ops have it. The weight must not move afterwards."""
        if self._stacked is None:
            self.stack([self.own(slot) for slot in range(self.slots)])
        assert self._stacked is not None
        return self._stacked

    def stack(self, weights: list[Weight]) -> None:
        """Have ops compute these experts, in these slots."""
        self._stacked = ops.Stacked(weights, self.width, self.method.apply)

    def forward(self, x: Tensor) -> Tensor:
        raise AssertionError("experts are computed by ops.expert_rows")


class _Places:
    """A placement as tensors. A slot is a number of all ranks': those of a rank follow one another.

    Attributes:
        slots: how many there are.
        bounds: [ranks + 1], a list: where those of each rank begin.
        table: [experts, most replicas] int64: slots.
        replicas: [experts] int64; None where all have one.
        rank_of: [slots] int64.
    """

    def __init__(self, placement: Placement, count: int) -> None:
        self.bounds = [0, *accumulate(map(len, placement.ranks))]
        self.slots = self.bounds[-1]
        where: list[list[int]] = [[] for _ in range(count)]
        for slot, expert in enumerate(chain.from_iterable(placement.ranks)):
            where[expert].append(slot)
        most = max(map(len, where))
        self.table = torch.tensor([slots + slots[:1] * (most - len(slots)) for slots in where], device="cpu")
        self.replicas = torch.tensor([len(slots) for slots in where], device="cpu") if most > 1 else None
        ranks = [rank for rank, own in enumerate(placement.ranks) for _ in own]
        self.rank_of = torch.tensor(ranks, dtype=torch.int64, device="cpu")

    def slots_of(self, experts: Tensor, turn: int) -> Tensor:
        """[rows, top_k] -> the same shape; of replicas, rows take turns, which begin at `turn`."""
        table = self.table.to(experts.device)
        if self.replicas is None:
            return table[:, 0][experts]
        turns = torch.arange(turn, turn + len(experts), device=experts.device)[:, None]
        return table[experts, turns % self.replicas.to(experts.device)[experts]]


Weights = tuple[Weight, Weight]  # of an expert: gates and ups, downs


class Spare:
    """Memory for experts away from home, of layers that are alike; on a CPU it is taken when it is needed.

    Args:
        count: of experts that it has room for.
    """

    def __init__(self, like: Experts, count: int) -> None:
        self.count = count
        self._like, self._free = like, list[Weights]()
        self._left = count  # that no memory was made for
        if like.down_proj.weight.device.type != "cpu":
            self._free, self._left = self._made(count), 0

    def take(self) -> Weights | None:
        """None when there is none left."""
        with suppress(IndexError):
            return self._free.pop()
        if not self._left:
            return None
        self._left -= 1
        return self._made(1)[0]

    def give(self, weights: Weights) -> None:
        self._free.append(weights)

    def _made(self, count: int) -> list[Weights]:
        like = self._like
        return list(zip(like.gate_up_proj.spare(count), like.down_proj.spare(count), strict=True))


class Experts(nn.Module):
    """Gated MLPs, all of the same shape: a part of each, or some of them whole.

    Attributes:
        counts: [experts] int64: rows that each has had since this was made; those too that pad a CUDA graph's.
        loads: [ranks] int64 on the CPU: those that each rank has computed, of all its experts together.
        placement: which rank computes which; None where each has a part of all.
        spare: memory for what is computed away from home.
        helpers: with whom these ranks attend for each other, before they meet; None where they do not.

    Args:
        shard: of each expert's gates; or of the experts, where its `experts` says so.
    """

    def __init__(self, config: DecoderConfig, experts: ExpertsConfig, shard: Shard = WHOLE) -> None:
        super().__init__()
        hidden, width, count = config.hidden_size, experts.width, experts.routing.count
        self.activation, self.count, self.spread = config.activation, count, shard.experts
        self.home = range(count) if self.spread is None else self.spread.share(count)
        self.shard = shard if self.spread is None else WHOLE
        self.group = shard
        self.gate_up_proj = ExpertLinear(hidden, (width, width), count, self.home, shard=self.shard)
        self.down_proj = ExpertLinear(width, (hidden,), count, self.home, own_ins=self.shard.of(width))
        self.counts = torch.zeros(count, dtype=torch.int64, device="cpu")
        self.loads = torch.zeros(1 if self.spread is None else self.spread.size, dtype=torch.int64, device="cpu")
        self.spare: Spare | None = None
        self.helpers: Helpers | None = None
        self._turn = 0
        self._go_home()

    def _go_home(self) -> None:
        self.placement = None if self.spread is None else Placement.even(self.count, self.spread.size)
        self._places = None if self.placement is None else _Places(self.placement, self.count)
        self._away: dict[int, Weights] = {}  # of experts that are not at home here
        self.spare = None

    def _apply(self, *args: Any, **kwargs: Any) -> Experts:
        """Afterwards all are computed at home, with nothing to spare."""
        super()._apply(*args, **kwargs)
        self._go_home()
        return self

    @property
    def kind(self) -> Hashable:
        """The same where memory is alike."""
        return tuple(
            (linear.method, linear.weight.dtype, linear.width, len(linear.own_ins))
            for linear in (self.gate_up_proj, self.down_proj)
        )

    def needs(self, expert: int) -> bool:
        """Whether it has to be brought, to be placed here."""
        return expert not in self.home and expert not in self._away

    def bring(self, expert: int, gate_up: Weight, down: Weight) -> None:
        """Have the weights of an expert of another rank, for a placement that comes; beside steps, from any thread.

        Raises ValueError where there is no room: what is placed now is spare after another placement.
        """
        if not self.needs(expert):
            return
        if self.spare is None or (place := self.spare.take()) is None:
            count = 0 if self.spare is None else self.spare.count
            raise ValueError(f"there is no room for expert {expert}: there is memory for {count} away from home")
        _copy(place, (gate_up, down))
        self._away[expert] = place

    def forget(self) -> None:
        """What was brought and is not placed."""
        self._keep(self._here())

    def _keep(self, experts: Sequence[int]) -> None:
        for expert in self._away.keys() - set(experts):
            weights = self._away.pop(expert)
            if self.spare is not None:
                self.spare.give(weights)

    def place(self, placement: Placement) -> None:
        """Compute by another placement from now on, on all ranks between the same two steps.

        Raises ValueError, with nothing changed, where an expert is nowhere, or this rank has no weights of it.
        """
        assert self.spread is not None
        if len(placement.ranks) != self.spread.size:
            raise ValueError(f"a placement for {len(placement.ranks)} ranks, there are {self.spread.size}")
        if missing := set(range(self.count)) - set(chain.from_iterable(placement.ranks)):
            raise ValueError(f"expert {min(missing)} is placed nowhere")
        own = placement.ranks[self.spread.rank]
        if missing := set(own) - set(self.home) - self._away.keys():
            raise ValueError(f"expert {min(missing)} is neither at home here nor was it brought")
        weights = [self._weights_of(expert) for expert in own]
        self.gate_up_proj.stack([gate_up for gate_up, _ in weights])
        self.down_proj.stack([down for _, down in weights])
        self.placement, self._places = placement, _Places(placement, self.count)
        self._keep(own)

    def weights_of(self, expert: int) -> Weights:
        """Of an expert at home, as others take it."""
        slot = expert - self.home.start
        return self.gate_up_proj.own(slot), self.down_proj.own(slot)

    def _weights_of(self, expert: int) -> Weights:
        return self.weights_of(expert) if expert in self.home else self._away[expert]

    def _here(self) -> tuple[int, ...]:
        """Experts that this rank computes."""
        assert self.placement is not None
        assert self.spread is not None
        return self.placement.ranks[self.spread.rank]

    def forward(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """As `steps`."""
        return run(self.steps(x, experts, weights))

    def steps(self, x: Tensor, experts: Tensor, weights: Tensor) -> Steps[Tensor]:
        """[rows, hidden] and [rows, top_k] experts and weights, by `ops.route` -> [rows, hidden].

        What a row's experts make of it is rounded to x's dtype, and summed up in float32 in the order of experts. So a
        row's bits depend on nothing else, and not on which rank an expert is at; where ranks have parts of each, what
        these make is summed up in their order.

        Raises RankFailed.
        """
        if self._places is not None and self.spread is not None:
            if self.spread.apart:
                return (yield from self._travelling(x, experts, weights, self._places, self.spread))
            return (yield from self._spread(x, experts, weights, self._places, self.spread))
        pairs, bounds, places = ops.group_experts(experts, self.count)
        if self.counts.device != bounds.device:  # no step waits for how many there were
            self.counts = self.counts.to(bounds.device)
        self.counts += bounds.diff()
        made = self._made(x, pairs, bounds, experts.shape[1])
        return self.shard.sum(ops.combine_experts(made, places, weights))

    def _made(self, x: Tensor, pairs: Tensor, bounds: Tensor, top_k: int) -> Tensor:
        gate_up, down = self.gate_up_proj.stacked, self.down_proj.stacked
        return ops.expert_rows(x, pairs, bounds, top_k, gate_up, down, self.activation)

    def _spread(self, x: Tensor, experts: Tensor, weights: Tensor, at: _Places, shard: Shard) -> Steps[Tensor]:
        """All ranks have all rows. Each computes its experts' pairs, and has those of all others from these: a value of
        `x` for each pair, as often as the busiest rank has more than the mean."""
        self.counts += experts.flatten().bincount(minlength=self.count).cpu()
        slots, self._turn = at.slots_of(experts, self._turn), self._turn + 1
        pairs, bounds, places = ops.group_experts(slots, at.slots)
        begins = bounds[at.bounds].cpu()  # of each rank's pairs
        self.loads += begins.diff()
        first, last = begins[shard.rank : shard.rank + 2].tolist()
        own = bounds[at.bounds[shard.rank] : at.bounds[shard.rank + 1] + 1] - first
        made = self._made(x, pairs[first:last], own, experts.shape[1])
        if shard.size == 1:
            return ops.combine_experts(made, places, weights)
        assert shard.ranks is not None
        most = int(begins.diff().max())
        padded = made.new_empty(most, made.shape[1])
        padded[: len(made)] = made
        wait = shard.stream.begin(partial(shard.ranks.gather, padded), padded.nbytes * (shard.size - 1))
        yield
        every = wait().flatten(0, 1)
        shift = torch.arange(shard.size) * most - begins[:-1]  # from a place among all pairs to one in these
        return ops.combine_experts(every, places + shift[at.rank_of].to(slots.device)[slots], weights)

    def _travelling(self, x: Tensor, experts: Tensor, weights: Tensor, at: _Places, spread: Shard) -> Steps[Tensor]:
        """Each group has rows of its own."""
        if self.helpers is not None:
            self.helpers.meet(wait=not spread.stream.is_beside)
        rows = len(x)
        x, experts, weights = share_of_rows(self.group, x, experts, weights)
        self.counts += experts.flatten().bincount(minlength=self.count).cpu()
        slots, self._turn = at.slots_of(experts, self._turn), self._turn + 1
        self.loads += at.rank_of.to(slots.device)[slots].flatten().bincount(minlength=spread.size).cpu()
        own = yield from travel(x, slots, weights.contiguous(), at.bounds, spread, self._made)
        return whole_again(self.group, own, rows)


def _copy(to: Weights, weights: Weights) -> None:
    """Beside what a device computes, but after what may still read what was there."""
    pairs = [pair for each in zip(to, weights, strict=True) for pair in zip(*map(_values, each), strict=True)]
    device = pairs[0][0].device
    if device.type == "cpu":
        for place, value in pairs:
            place.copy_(value)
        return
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.default_stream(device))
    with torch.cuda.stream(stream):
        for place, value in pairs:
            place.copy_(value)
    stream.synchronize()


def _values(weight: Weight) -> list[Tensor]:
    """All that it is made of."""
    parts = weight.parameters() if isinstance(weight, nn.Module) else (weight,)
    return [part.detach() for part in parts]


class MixtureOfExperts(nn.Module):
    """A feed-forward of routed experts, and perhaps of one that all rows have."""

    def __init__(self, config: DecoderConfig, experts: ExpertsConfig, shard: Shard = WHOLE) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.router = Router(hidden, experts.routing)
        self.experts = Experts(config, experts, shard)
        self.shared_experts = GatedMLP(config, shard, experts.shared) if experts.shared else None
        self.shared_expert_gate = Linear(hidden, (1,)) if experts.shared_gate else None
        if self.shared_expert_gate is not None:
            self.shared_expert_gate.exact = True

    def accompany(self, dtype: torch.dtype) -> Steps[Tensor]:
        """Compute what rows of other groups want, with none of its own."""
        device, routing = self.router.weight.device, self.router.routing
        none = torch.empty(0, routing.top_k, dtype=torch.int64, device=device)
        x = torch.empty(0, self.router.ins, dtype=dtype, device=device)
        return self.experts.steps(x, none, none.float())

    def forward(self, x: Tensor) -> Tensor:
        return run(self.steps(x))

    def steps(self, x: Tensor) -> Steps[Tensor]:
        routed = yield from self.experts.steps(x, *self.router.route(x))
        if self.shared_experts is None:
            return routed
        shared: Tensor = self.shared_experts(x)
        gates = None if self.shared_expert_gate is None else self.shared_expert_gate(x)
        return ops.add_shared(routed, shared, gates)
