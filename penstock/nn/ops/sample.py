"""Logits to tokens: temperature, min_p, top_k, top_p, then the largest sum of logit and Gumbel noise.

The noise is a pure function of (seed, position, token), so that a draw can be repeated anywhere: a counter-based
generator, SplitMix64's finaliser (Steele, Lea, Flood 2014).
"""

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.nn import triton
from penstock.nn.batch import to_device
from penstock.nn.native import dense_rows, function, missing
from penstock.nn.ops.backends import Backend, Op

CANDIDATES = 1024  # up to this top_k, only the k candidates are looked at
MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
SHIFTS = (30, 27, 31)


class Draw(NamedTuple):
    """How one row is sampled, as `SamplingParams` explains it.

    Attributes:
        temperature: 0 is greedy.
        top_k: 0 keeps all.
        key: of the noise, `row_key(seed, position)`.
    """

    temperature: float
    top_p: float
    min_p: float
    top_k: int
    key: int


def sample(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """One token per row, [rows] int64, of [rows, vocab] float32. A row's token depends on nothing but that row."""
    return OP[logits.device.type](logits, draws)


def argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """([rows] int64, [rows] bool) of [rows, vocab] float32: the first largest entry, and whether all are finite.

    Of a row that holds a NaN, the entry may be any.
    """
    return ARGMAX_OP[logits.device.type](logits)


def gumbel_noise(keys: Tensor, tokens: Tensor) -> Tensor:
    """Standard Gumbel noise: argmax(logits + noise) is a draw from softmax(logits).

    Args:
        keys: [rows] int64, `row_key(seed, position)` of each.
        tokens: [rows or 1, candidates] int64 token ids.

    Returns:
        [rows, candidates] float32.
    """
    return NOISE_OP[keys.device.type](keys, tokens)


def row_key(seed: int, position: int) -> int:
    """The key of every token's noise at one position of one sequence, as a signed 64-bit integer."""
    return signed(mix(mix(seed + GOLDEN) + position * GOLDEN))


def mix(x: int) -> int:
    """A bijection of 64-bit integers in which every input bit reaches every output bit."""
    x &= MASK
    for shift, multiplier in zip(SHIFTS, MULTIPLIERS, strict=False):
        x = ((x ^ x >> shift) * multiplier) & MASK
    return x ^ x >> SHIFTS[2]


def signed(x: int) -> int:
    """The same 64 bits as a signed integer."""
    return x - (1 << 64) if x >> 63 else x


# --- the reference


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _noise(keys: Tensor, tokens: Tensor) -> Tensor:
    x = keys[:, None] + (tokens + 1) * signed(GOLDEN)
    for shift, multiplier in zip(SHIFTS, MULTIPLIERS, strict=False):
        x = (x ^ _shifted(x, shift)) * signed(multiplier)
    x = x ^ _shifted(x, SHIFTS[2])
    # the winner of an argmax has a uniform near 0 here, where floats are dense
    uniform = ((_shifted(x, 32).float() + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)  # rounding could make it 1
    return -torch.log(-torch.log1p(-uniform))


def _argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    return logits.argmax(-1), logits.sum(-1).isfinite()


def _reference(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    tokens = torch.empty(len(draws), dtype=torch.int64, device=logits.device)
    # rows are grouped by what their draw computes, so that no row's arithmetic depends on its neighbours
    groups: dict[tuple[int, bool] | None, list[int]] = {}
    for row, draw in enumerate(draws):
        groups.setdefault(_kind(draw), []).append(row)
    for kind, rows in groups.items():
        index = to_device(rows, logits.device)
        chosen = logits if len(rows) == len(draws) else logits[index]
        if kind is None:
            tokens[index] = chosen.argmax(-1)
        else:
            tokens[index] = _sample_alike(chosen, [draws[row] for row in rows], *kind)
    return tokens


def _kind(draw: Draw) -> tuple[int, bool] | None:
    """None for greedy, else (how many candidates, 0 being all; whether top_p cuts)."""
    if draw.temperature == 0:
        return None
    return (draw.top_k if draw.top_k <= CANDIDATES else 0, draw.top_p < 1.0)


def _column(values: list[float], like: Tensor) -> Tensor:
    return to_device(values, like.device, like.dtype)[:, None]


def _sample_alike(logits: Tensor, draws: Sequence[Draw], candidates: int, cut: bool) -> Tensor:
    """[rows, vocab] -> [rows] token ids."""
    scaled = logits / _column([d.temperature for d in draws], logits)
    vocab = scaled.shape[-1]
    if 0 < candidates < vocab:
        scaled, ids = scaled.topk(candidates, sorted=True)
    elif cut:
        scaled, ids = scaled.sort(descending=True, stable=True)
    else:
        ids = torch.arange(vocab, device=logits.device)[None]
    top = scaled.amax(-1, keepdim=True)
    if any(d.min_p > 0 for d in draws):
        floor = torch.log(_column([d.min_p for d in draws], logits))
        scaled = scaled.masked_fill(scaled < top + floor, -torch.inf)
    if not candidates and any(0 < d.top_k < vocab for d in draws):
        scaled = _keep_top_k(scaled, [d.top_k or vocab for d in draws])
    if cut:
        probabilities = scaled.softmax(-1)
        before = probabilities.cumsum(-1) - probabilities  # of the more likely ones; the first is always kept
        scaled = scaled.masked_fill(before >= _column([d.top_p for d in draws], logits), -torch.inf)
    noise = gumbel_noise(to_device([d.key for d in draws], logits.device), ids)
    best = (scaled + noise).argmax(-1, keepdim=True)
    return ids.expand_as(scaled).gather(-1, best)[:, 0]


def _keep_top_k(scaled: Tensor, top_k: list[int]) -> Tensor:
    """Drop everything below each row's k-th largest value."""
    vocab = scaled.shape[-1]
    ordered = scaled.sort(descending=True).values
    last = to_device([min(k, vocab) - 1 for k in top_k], scaled.device)[:, None]
    return scaled.masked_fill(scaled < ordered.gather(-1, last), -torch.inf)


# --- native/sample.cpp: no order of the whole vocabulary, but candidates above a threshold and weights in buckets


class _Draw(ctypes.Structure):
    """`penstock::Draw` (sample.h)."""

    _fields_ = (
        *((name, ctypes.c_double) for name in ("temperature", "top_p", "min_p")),
        *((name, ctypes.c_int64) for name in ("top_k", "key")),
    )


def rows_of(draws: Sequence[Draw]) -> ctypes.Array[_Draw]:
    return (_Draw * len(draws))(*[_Draw(*draw) for draw in draws])


def _native(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    assert logits.dtype == torch.float32
    logits = logits.contiguous()
    tokens = torch.empty(len(logits), dtype=torch.int64)
    rows = rows_of(draws)
    function("penstock_sample", "pnnpp")(logits.data_ptr(), *logits.shape, ctypes.addressof(rows), tokens.data_ptr())
    return tokens


def _native_argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    assert logits.dtype == torch.float32
    logits = logits.contiguous()
    rows = logits.shape[0]
    tokens, finite = torch.empty(rows, dtype=torch.int64), torch.empty(rows, dtype=torch.bool)
    function("penstock_argmax", "pnnpp")(logits.data_ptr(), *logits.shape, tokens.data_ptr(), finite.data_ptr())
    return tokens, finite


def _triton_argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    from penstock.nn.triton import rows

    return rows.argmax(dense_rows(logits))


CPU = frozenset({"cpu"})
OP = Op("sample", Backend("native", _native, CPU, missing), Backend("reference", _reference))
ARGMAX_OP = Op(
    "argmax",
    Backend("native", _native_argmax, CPU, missing),
    Backend("triton", _triton_argmax, triton.DEVICES, triton.missing),
    Backend("reference", _argmax),
)
NOISE_OP = Op("gumbel_noise", Backend("reference", _noise))
