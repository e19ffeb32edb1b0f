"""Tokens from the last projection's input, for rows of which few tokens matter (nn/bounded_logits.py)."""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.nn import native
from penstock.nn.bounded_logits import BoundedLogits
from penstock.nn.native import SUFFIX, function, missing
from penstock.nn.ops.backends import Backend, Op
from penstock.nn.ops.linear import packed_linear
from penstock.nn.ops.mask_logits import mask_logits
from penstock.nn.ops.sample import Draw, argmax, rows_of, sample
from penstock.nn.packed import PackedWeight
from penstock.nn.ranks import Ranks

Masked = tuple[Tensor, Tensor]  # rows and masks, as `mask_logits` has them; in each of these a token is left

MOST_TOP_K = 64
MOST_ROWS = 32  # with more of them, multiplying takes as long as it does for all logits
MOST_ROWS_BESIDE_TILES = 6  # the same where tiles multiply, for which weights come from memory in any case
ROWS_OF_TOP_K = 5  # that one with a top_k counts for: many more of its logits are computed


def choose_pays(draws: Sequence[Draw]) -> bool:
    """Whether choosing is faster than all logits: few tokens matter for each row, and there are not many rows."""
    if not all(draw.temperature == 0 or 0 < draw.top_k <= MOST_TOP_K for draw in draws):
        return False
    chosen = native.isa()
    most = MOST_ROWS_BESIDE_TILES if chosen is not None and "amx_tile" in chosen.needs else MOST_ROWS
    return sum(1 if draw.temperature == 0 else ROWS_OF_TOP_K for draw in draws) <= most


def choose(
    x: Tensor, weight: PackedWeight, bounded: BoundedLogits, draws: Sequence[Draw], masked: Masked | None = None
) -> Tensor:
    """[rows, in] -> [rows] int64, what `argmax` or `sample` take from the logits x @ weight.T in float32.

    Args:
        x: of the weight's dtype.
        bounded: bounds for the weight's outputs.
        draws: greedy, or with a top_k.
        masked: of the logits; None where no row is.

    Returns: the tokens; -1 where a row or its logits are not finite, and where its numbers are too large to bound.
    """
    return OP[x.device.type](x, weight, bounded, draws, masked)


def _reference(
    x: Tensor, weight: PackedWeight, bounded: BoundedLogits, draws: Sequence[Draw], masked: Masked | None
) -> Tensor:
    logits = packed_linear(x, weight, dtype=torch.float32)
    finite = argmax(logits)[1]
    if masked is not None:
        mask_logits(logits, *masked)
    return torch.where(finite, sample(logits, draws), -1)


def _arguments(x: Tensor, weight: PackedWeight, bounded: BoundedLogits) -> tuple[int, ...]:
    """The first ones of both kernels."""
    of_weight = (weight.memory.data_ptr(), *weight.shape, bounded.codes.memory.data_ptr(), bounded.bounds.data_ptr())
    return (*of_weight, x.data_ptr(), x.stride(0), len(x))


def _native(
    x: Tensor, weight: PackedWeight, bounded: BoundedLogits, draws: Sequence[Draw], masked: Masked | None
) -> Tensor:
    assert x.dtype == weight.memory.dtype
    assert all(draw.temperature == 0 or draw.top_k > 0 for draw in draws)
    if x.stride(-1) != 1:
        x = x.contiguous()
    tokens = torch.empty(len(x), dtype=torch.int64)
    rows = rows_of(draws)
    which, masks = masked or (torch.empty(0, dtype=torch.int64), torch.empty(0, 0, dtype=torch.int32))
    which, masks = which.contiguous(), masks.contiguous()
    function(f"penstock_choose_{SUFFIX[x.dtype]}", "pnnpppnnppnpnp")(
        *_arguments(x, weight, bounded),
        ctypes.addressof(rows),
        which.data_ptr(),
        len(which),
        masks.data_ptr(),
        masks.shape[1],
        tokens.data_ptr(),
    )
    return tokens


def choose_candidates(
    x: Tensor, weight: PackedWeight, bounded: BoundedLogits, draws: Sequence[Draw]
) -> tuple[Tensor, Tensor]:
    """What of a row's logits its draw can take, from a weight that is some of the outputs of a larger one.

    Returns: logits [rows, most] float32, and [rows, most] int64 which of the weight's outputs they are: -1 behind the
        last one, -2 first in a row of which none can be told. `most` is the largest top_k; a greedy draw's counts as 1.
    """
    most = max(1 if draw.temperature == 0 else draw.top_k for draw in draws)
    return CANDIDATES_OP[x.device.type](x, weight, bounded, draws, most)


def choose_among(logits: Tensor, ids: Tensor, first: int, draws: Sequence[Draw], ranks: Ranks) -> Tensor:
    """Tokens [rows] from the candidates of all ranks; -1 where none can be told. Raises RankFailed.

    Args:
        logits, ids: as `choose_candidates` returns them, of this rank's outputs.
        first: the token that the first of these is.
    """
    logits, ids = ranks.gather(logits), ranks.gather(torch.where(ids >= 0, ids + first, ids))
    logits, ids = (x.transpose(0, 1).flatten(1).contiguous() for x in (logits, ids))
    return AMONG_OP[logits.device.type](logits, ids, draws)


def _candidates_reference(
    x: Tensor, weight: PackedWeight, bounded: BoundedLogits, draws: Sequence[Draw], most: int
) -> tuple[Tensor, Tensor]:
    logits = packed_linear(x, weight, dtype=torch.float32)
    whole = argmax(logits)[1]
    values = torch.zeros(len(x), most)
    ids = torch.full((len(x), most), -1)
    for row, draw in enumerate(draws):
        count = min(most, 1 if draw.temperature == 0 else draw.top_k, logits.shape[1])
        scaled = logits[row] if draw.temperature == 0 else logits[row] * (1.0 / torch.tensor(draw.temperature))
        best = scaled.sort(descending=True, stable=True).indices[:count]
        values[row, :count], ids[row, :count] = logits[row][best], best
        if not whole[row]:
            values[row], ids[row] = 0, -1
            ids[row, 0] = -2
    return values, ids


def _candidates_native(
    x: Tensor, weight: PackedWeight, bounded: BoundedLogits, draws: Sequence[Draw], most: int
) -> tuple[Tensor, Tensor]:
    if x.stride(-1) != 1:
        x = x.contiguous()
    values, ids = torch.empty(len(x), most), torch.empty(len(x), most, dtype=torch.int64)
    rows = rows_of(draws)
    function(f"penstock_candidates_{SUFFIX[x.dtype]}", "pnnpppnnpnpp")(
        *_arguments(x, weight, bounded),
        ctypes.addressof(rows),
        most,
        values.data_ptr(),
        ids.data_ptr(),
    )
    return values, ids


def _among_reference(logits: Tensor, ids: Tensor, draws: Sequence[Draw]) -> Tensor:
    known = ~(ids == -2).any(-1) & (ids >= 0).any(-1)
    whole = logits.new_full((len(ids), int(ids.max().clamp(min=0)) + 2), -torch.inf)
    whole.scatter_(1, torch.where(ids < 0, whole.shape[1] - 1, ids), torch.where(ids < 0, -torch.inf, logits))
    return torch.where(known, sample(whole, draws), -1)


def _among_native(logits: Tensor, ids: Tensor, draws: Sequence[Draw]) -> Tensor:
    tokens = torch.empty(len(ids), dtype=torch.int64)
    rows = rows_of(draws)
    function("penstock_choose_among", "ppnnpp")(
        logits.data_ptr(), ids.data_ptr(), *ids.shape, ctypes.addressof(rows), tokens.data_ptr()
    )
    return tokens


CPU = frozenset({"cpu"})
OP = Op("choose", Backend("native", _native, CPU, missing), Backend("reference", _reference))
CANDIDATES_OP = Op(
    "choose_candidates",
    Backend("native", _candidates_native, CPU, missing),
    Backend("reference", _candidates_reference),
)
AMONG_OP = Op("choose_among", Backend("native", _among_native, CPU, missing), Backend("reference", _among_reference))
