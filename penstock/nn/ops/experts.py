"""What a mixture of experts does: rows get experts, are grouped by them, are computed, and are summed up again.

A row's experts and all that they make of it depend on that row alone, to the bit: products are those of linears, and
sums are in the order of experts.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import Parameter

from penstock.nn import native, triton
from penstock.nn.config import Routing
from penstock.nn.native import SUFFIX, computable, function, missing
from penstock.nn.ops.backends import Backend, Op
from penstock.nn.ops.gate_mul import ACTIVATIONS, gate_mul
from penstock.nn.packed import LANES, PackedWeight
from penstock.nn.packed_quantised import PackedQuantisedWeight, panel_outs

LEAST = 1e-20  # that weights are divided by
Grouped: TypeAlias = tuple[Tensor, Tensor, Tensor]


class Slots(ctypes.Structure):
    """`penstock::Slots` (experts.h)."""

    _fields_ = (
        ("slots", ctypes.POINTER(ctypes.c_void_p)),
        *((name, ctypes.c_int64) for name in ("outs", "ins", "panel_outs", "panel_bytes")),
        ("quantised", ctypes.c_void_p),
    )


@dataclass(frozen=True)
class Stacked:
    """The same projections of several experts, each in a slot.

    Attributes:
        weights: of each slot, [outs, ins], with more outputs than are used where they fill up its memory.
        outs: how many are.
        apply: multiplies with one, as a linear method does.
    """

    weights: Sequence[Any]
    outs: int
    apply: Callable[[Tensor, Any, Tensor | None, torch.dtype], Tensor]

    def product(self, x: Tensor, slot: int) -> Tensor:
        """[rows, ins] -> [rows, outs]"""
        return self.apply(x, self.weights[slot], None, x.dtype)[:, : self.outs]

    @cached_property
    def slots(self) -> Slots | None:
        """As kernels have them; None where there are none for such weights."""
        if not self.weights:
            return None
        first = self.weights[0]
        if isinstance(first, PackedWeight):
            panel, view = native.panel_groups() * LANES, None
        elif isinstance(first, PackedQuantisedWeight):
            panel, view = panel_outs(), first.view()
        else:
            return None
        outs, ins = first.shape
        addresses = (ctypes.c_void_p * len(self.weights))(*(weight.memory.data_ptr() for weight in self.weights))
        size = first.memory.nbytes * panel // outs
        return Slots(ctypes.cast(addresses, ctypes.POINTER(ctypes.c_void_p)), outs, ins, panel, size, view)

    @cached_property
    def offsets(self) -> Tensor | None:
        """[slots] int64: how many values behind the first weight each one is; None where they are not plain."""
        if not self.weights or not all(
            isinstance(weight, Parameter) and weight.is_contiguous() for weight in self.weights
        ):
            return None
        first = self.weights[0]
        away = [(weight.data_ptr() - first.data_ptr()) // first.itemsize for weight in self.weights]
        return torch.tensor(away, device=first.device)


def route(logits: Tensor, correction: Tensor | None, routing: Routing) -> tuple[Tensor, Tensor]:
    """[rows, experts] float32 -> of each row its experts [rows, top_k] int64, rising, and their weights in float32.

    Of equal scores the first expert's counts as the best.

    Args:
        correction: [experts] float32, where `routing` has one.
    """
    return ROUTE_OP[logits.device.type](logits, correction, routing)


def group_experts(experts: Tensor, count: int) -> Grouped:
    """[rows, top_k] int64 -> the pairs of a row and an expert by experts, then by rows.

    Returns:
        [rows * top_k] which pair each is, `row * top_k + i`; [count + 1] where each expert's begin; and [rows, top_k]
        which of them each pair is. All int64.
    """
    return GROUP_OP[experts.device.type](experts, count)


def expert_rows(
    x: Tensor, pairs: Tensor, bounds: Tensor, top_k: int, gate_up: Stacked, down: Stacked, activation: str
) -> Tensor:
    """What experts make of rows: [rows, hidden] -> [pairs, hidden], of x's dtype.

    Args:
        pairs, bounds: those of the experts that are here, as `group_experts` has them; bounds begin with 0.
        gate_up, down: a slot for each of these experts.
        activation: one of `ACTIVATIONS`.
    """
    return ROWS_OP[x.device.type](x, pairs, bounds, top_k, gate_up, down, activation)


def combine_experts(made: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    """[pairs, hidden], and [rows, top_k] which of them are a row's -> their weighted sum [rows, hidden].

    It is summed up in float32, one expert after the other, and rounded to the dtype of what was made.

    Args:
        weights: [rows, top_k] float32.
    """
    return COMBINE_OP[made.device.type](made, places, weights)


def add_shared(routed: Tensor, shared: Tensor, gates: Tensor | None) -> Tensor:
    """routed + shared * sigmoid(gates), [rows, hidden] and [rows, 1] of one dtype, each step rounded; without gates
    routed + shared."""
    return SHARED_OP[routed.device.type](routed, shared, gates)


def _route_reference(logits: Tensor, correction: Tensor | None, routing: Routing) -> tuple[Tensor, Tensor]:
    scores = logits.softmax(-1) if routing.scoring == "softmax" else logits.sigmoid()
    choice = logits if correction is None else scores + correction
    if routing.groups > 1:
        within = choice.unflatten(1, (routing.groups, -1))
        best = within.amax(2) if correction is None else within.topk(2, dim=2).values.sum(2)
        kept = best.sort(descending=True, stable=True).indices[:, : routing.kept_groups]
        left = torch.ones_like(best, dtype=torch.bool).scatter_(1, kept, value=False)
        choice = within.masked_fill(left[:, :, None], -torch.inf).flatten(1)
    experts = choice.sort(descending=True, stable=True).indices[:, : routing.top_k].sort().values
    weights = scores.gather(1, experts)
    if routing.renormalised:
        weights = weights / (weights.sum(1, keepdim=True) + LEAST)
    return experts, weights * routing.scale


def _route_native(logits: Tensor, correction: Tensor | None, routing: Routing) -> tuple[Tensor, Tensor]:
    logits = logits.contiguous()
    rows = len(logits)
    experts, weights = torch.empty(rows, routing.top_k, dtype=torch.int64), torch.empty(rows, routing.top_k)
    own = None if correction is None else correction.data_ptr()
    made = experts.data_ptr(), weights.data_ptr()
    function("penstock_route", "pnpnnnnnnfpp")(logits.data_ptr(), rows, own, *native_routing(routing), *made)
    return experts, weights


def native_routing(routing: Routing) -> tuple[int, int, bool, int, int, bool, float]:
    """As native/experts.h has it."""
    chosen = routing.count, routing.top_k, routing.scoring == "sigmoid"
    return *chosen, routing.groups, routing.kept_groups, routing.renormalised, routing.scale


def _group_reference(experts: Tensor, count: int) -> Grouped:
    flat = experts.flatten()
    of_pairs, pairs = flat.sort(stable=True)
    places = torch.empty_like(flat)
    places[pairs] = torch.arange(len(flat), device=flat.device)
    bounds = torch.searchsorted(of_pairs, torch.arange(count + 1, device=flat.device))  # the host waits for nothing
    return pairs, bounds, places.view(experts.shape)


def _group_native(experts: Tensor, count: int) -> Grouped:
    experts = experts.contiguous()
    pairs = torch.empty(experts.numel(), dtype=torch.int64)
    bounds, places = torch.empty(count + 1, dtype=torch.int64), torch.empty_like(experts)
    function("penstock_group_experts", "pnnppp")(
        experts.data_ptr(), len(pairs), count, pairs.data_ptr(), bounds.data_ptr(), places.data_ptr()
    )
    return pairs, bounds, places


def _rows_reference(
    x: Tensor, pairs: Tensor, bounds: Tensor, top_k: int, gate_up: Stacked, down: Stacked, activation: str
) -> Tensor:
    made = x.new_empty(len(pairs), down.outs)
    for slot, (begin, end) in enumerate(pairwise(bounds.tolist())):
        if begin < end:
            rows = x.index_select(0, pairs[begin:end] // top_k)
            made[begin:end] = down.product(gate_mul(gate_up.product(rows, slot), activation), slot)
    return made


def _rows_native(
    x: Tensor, pairs: Tensor, bounds: Tensor, top_k: int, gate_up: Stacked, down: Stacked, activation: str
) -> Tensor:
    if not computable(x) or gate_up.slots is None or down.slots is None:
        return _rows_reference(x, pairs, bounds, top_k, gate_up, down, activation)
    x = native.dense_rows(x)
    pairs, bounds = pairs.contiguous(), bounds.contiguous()
    made = x.new_empty(len(pairs), down.slots.outs)
    function(f"penstock_expert_rows_{SUFFIX[x.dtype]}", "pnppnnppnnp")(
        x.data_ptr(),
        x.stride(0),
        pairs.data_ptr(),
        bounds.data_ptr(),
        len(gate_up.weights),
        top_k,
        ctypes.addressof(gate_up.slots),
        ctypes.addressof(down.slots),
        ACTIVATIONS.index(activation),
        gate_up.outs // 2,
        made.data_ptr(),
    )
    return made[:, : down.outs]


def _rows_triton(
    x: Tensor, pairs: Tensor, bounds: Tensor, top_k: int, gate_up: Stacked, down: Stacked, activation: str
) -> Tensor:
    exact = x.dtype == (torch.bfloat16 if x.is_cpu else torch.float32)  # the interpreter makes no products of the one
    if exact or gate_up.offsets is None or down.offsets is None:
        return _rows_reference(x, pairs, bounds, top_k, gate_up, down, activation)
    from penstock.nn.triton.experts import product

    count = len(pairs)
    made = product(x, pairs, bounds, top_k, gate_up.weights[0], gate_up.offsets, gate_up.outs, count)
    return product(gate_mul(made, activation), None, bounds, top_k, down.weights[0], down.offsets, down.outs, count)


def _combine_reference(made: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    total = made.new_zeros(len(places), made.shape[1], dtype=torch.float32)
    for i in range(places.shape[1]):
        total = total + weights[:, i, None] * made.index_select(0, places[:, i]).float()
    return total.to(made.dtype)


def _combine_native(made: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    if not computable(made):
        return _combine_reference(made, places, weights)
    made, places, weights = native.dense_rows(made), places.contiguous(), weights.contiguous()
    out = made.new_empty(len(places), made.shape[1])
    function(f"penstock_combine_experts_{SUFFIX[made.dtype]}", "pnppnnnp")(
        made.data_ptr(),
        made.stride(0),
        places.data_ptr(),
        weights.data_ptr(),
        *places.shape,
        made.shape[1],
        out.data_ptr(),
    )
    return out


def _combine_triton(made: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    from penstock.nn.triton.experts import combine

    return combine(native.dense_rows(made), places.contiguous(), weights.contiguous())


def _shared_reference(routed: Tensor, shared: Tensor, gates: Tensor | None) -> Tensor:
    return routed + (shared if gates is None else shared * gates.sigmoid())


def _shared_native(routed: Tensor, shared: Tensor, gates: Tensor | None) -> Tensor:
    if not computable(routed, shared, *(() if gates is None else (gates,))):
        return _shared_reference(routed, shared, gates)
    routed, shared = routed.contiguous(), shared.contiguous()
    gates = None if gates is None else gates.contiguous()
    out = torch.empty_like(routed)
    function(f"penstock_add_shared_{SUFFIX[routed.dtype]}", "pppnnp")(
        routed.data_ptr(), shared.data_ptr(), None if gates is None else gates.data_ptr(), *routed.shape, out.data_ptr()
    )
    return out


CPU = frozenset({"cpu"})
ROUTE_OP = Op("route", Backend("native", _route_native, CPU, missing), Backend("reference", _route_reference))
GROUP_OP = Op("group_experts", Backend("native", _group_native, CPU, missing), Backend("reference", _group_reference))
ROWS_OP = Op(
    "expert_rows",
    Backend("native", _rows_native, CPU, missing),
    Backend("triton", _rows_triton, triton.DEVICES, triton.missing),
    Backend("reference", _rows_reference),
)
COMBINE_OP = Op(
    "combine_experts",
    Backend("native", _combine_native, CPU, missing),
    Backend("triton", _combine_triton, triton.DEVICES, triton.missing),
    Backend("reference", _combine_reference),
)
SHARED_OP = Op("add_shared", Backend("native", _shared_native, CPU, missing), Backend("reference", _shared_reference))
