"""Rows of data-parallel groups go to the ranks that have their experts, and come back: all-to-all (xLLM, section 4.4).

The ranks of a group have the same rows; of these each sends its share. A row is sent once to each rank that has any of
its experts, and what they make of it comes back pair by pair, so that its own rank sums it up in the order of experts
as one that has all of them does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from penstock.nn import ops
from penstock.nn.linear import Shard
from penstock.nn.streams import Steps

# rows [rows, hidden], pairs and bounds as of `ops.group_experts`, experts a row -> [pairs, hidden]
Compute = Callable[[Tensor, Tensor, Tensor, int], Tensor]
NUMBER = torch.int32  # of an expert, while it travels


def share_of_rows(group: Shard, x: Tensor, *more: Tensor) -> tuple[Tensor, ...]:
    """Which of a group's rows, and of what goes with them, a rank of it sends."""
    return tuple(each[group.rank :: group.size] for each in (x, *more))


def whole_again(group: Shard, own: Tensor, rows: int) -> Tensor:
    """What came of so many rows, of what came of each rank's share of them. Raises RankFailed."""
    if group.size == 1 or not rows:
        return own
    assert group.ranks is not None
    padded = own.new_zeros(-(-rows // group.size), own.shape[1])
    padded[: len(own)] = own
    return group.ranks.gather(padded).transpose(0, 1).flatten(0, 1)[:rows]


def travel(
    x: Tensor, slots: Tensor, weights: Tensor, begins: list[int], spread: Shard, compute: Compute
) -> Steps[Tensor]:
    """[rows, hidden] and [rows, top_k] slots and weights of this rank's rows -> [rows, hidden]. All ranks call it
    together, also with no rows. Raises RankFailed.

    Args:
        begins: [ranks + 1]: of the slots of each rank.
        spread: this rank among those that have slots.
        compute: what own experts make of rows of any rank.
    """
    assert spread.ranks is not None
    rows, top_k = slots.shape
    goes = [(slots >= first) & (slots < end) for first, end in pairwise(begins)]
    sent = [_packed(x, slots - first, mask) for first, mask in zip(begins, goes, strict=False)]
    wait = spread.stream.begin(partial(spread.ranks.all_to_all, sent), _bytes(sent))
    yield
    came = wait()
    counts = [len(each) for each in came]
    own = begins[spread.rank + 1] - begins[spread.rank]
    others, asked = _unpacked(torch.cat(came), x, top_k)
    asked = asked.where(asked >= 0, own)  # of experts elsewhere, behind all that are here
    pairs, bounds, places = ops.group_experts(asked, own + 1)
    made = compute(others, pairs[: int(bounds[own])], bounds[: own + 1], top_k)
    back = [made[at[want < own]] for at, want in zip(places.split(counts), asked.split(counts), strict=True)]
    wait = spread.stream.begin(partial(spread.ranks.all_to_all, back), _bytes(back))
    yield
    brought = torch.cat(wait())
    # those of the first rank's experts come first, each rank's by rows
    order = torch.cat([mask.flatten().nonzero().flatten() for mask in goes])
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    return ops.combine_experts(brought, places.view(rows, top_k), weights)


def _bytes(tensors: Sequence[Tensor]) -> int:
    return sum([x.nbytes for x in tensors])


def _packed(x: Tensor, slots: Tensor, mask: Tensor) -> Tensor:
    """[rows that go, bytes]: a row, and the slots that it has there, -1 for others."""
    rows = mask.any(1).nonzero().flatten()
    values = x[rows].contiguous().view(torch.uint8)
    numbers = slots[rows].where(mask[rows], -1).to(NUMBER).view(torch.uint8)
    return torch.cat((values, numbers), 1)


def _unpacked(packed: Tensor, x: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Rows as those of x, and their slots [rows, top_k] int64."""
    split = packed.shape[1] - top_k * NUMBER.itemsize
    return packed[:, :split].contiguous().view(x.dtype), packed[:, split:].contiguous().view(NUMBER).long()
