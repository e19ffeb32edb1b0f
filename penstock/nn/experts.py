"""Mixtures of experts: of many gated MLPs each row has a few, which its router chooses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from penstock.nn import ops
from penstock.nn.config import DecoderConfig, ExpertsConfig, Routing
from penstock.nn.formats.base import Expected, Format
from penstock.nn.formats.dense import DENSE
from penstock.nn.layers import FeedForward, GatedMLP
from penstock.nn.linear import WHOLE, Linear, Shard
from penstock.nn.methods.base import LinearMethod, Weight

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
        self.count, self.slots, self.width = count, len(experts), sum(map(len, own))
        self._experts, self._each, self._stride = experts, len(outs), self.width
        every = [outs_of for i in range(count) for outs_of in (own if i in experts else (range(0),) * len(own))]
        super().__init__(ins, tuple(outs) * count, own_ins=own_ins, own_outs=every)
        self._stacked: ops.Stacked | None = None

    def hold(self, method: LinearMethod[Any, Any], form: Format[Any] = DENSE) -> None:
        cut = method.cut()
        self._stride = -(-self.width // cut) * cut
        dtype, device = self.weight.dtype, self.weight.device
        weight: Weight = method.create(self.slots * self._stride, len(self.own_ins), dtype, device)
        del self.weight
        self.method, self.format, self.weight = method, form, weight

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

    @property
    def stacked(self) -> ops.Stacked:
        """As ops have it. The weight must not move afterwards."""
        if self._stacked is None or self._stacked.apply != self.method.apply:
            stride = self._stride
            parts = [self.method.part(self.weight, slot * stride, stride) for slot in range(self.slots)]
            self._stacked = ops.Stacked(parts, self.width, self.method.apply)
        return self._stacked

    def forward(self, x: Tensor) -> Tensor:
        raise AssertionError("experts are computed by ops.expert_rows")


class Experts(nn.Module):
    """Gated MLPs, all of the same shape.

    Args:
        shard: of each expert's gates.
    """

    def __init__(self, config: DecoderConfig, experts: ExpertsConfig, shard: Shard = WHOLE) -> None:
        super().__init__()
        hidden, width, count = config.hidden_size, experts.width, experts.routing.count
        self.shard, self.activation, self.count = shard, config.activation, count
        self.gate_up_proj = ExpertLinear(hidden, (width, width), count, range(count), shard=shard)
        self.down_proj = ExpertLinear(width, (hidden,), count, range(count), own_ins=shard.of(width))
        self.counts = torch.zeros(count, dtype=torch.int64, device="cpu")

    def forward(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """[rows, hidden] and [rows, top_k] experts and weights, by `ops.route` -> [rows, hidden].

        What a row's experts make of it is rounded to x's dtype, and summed up in float32 in the order of experts: on
        one rank a row's bits depend on nothing else.
        """
        pairs, bounds, places = ops.group_experts(experts, self.count)
        made = ops.expert_rows(
            x, pairs, bounds, experts.shape[1], self.gate_up_proj.stacked, self.down_proj.stacked, self.activation
        )
        return self.shard.sum(ops.combine_experts(made, places, weights))


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

    def forward(self, x: Tensor) -> Tensor:
        routed = self.experts(x, *self.router.route(x))
        if self.shared_experts is None:
            return routed
        shared: Tensor = self.shared_experts(x)
        if self.shared_expert_gate is not None:
            shared = shared * self.shared_expert_gate(x).sigmoid()
        return routed + shared
