from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.nn.ops.gumbel import gumbel_noise
from penstock.nn.ops.sample.draw import Draw

CANDIDATES = 1024  # up to this top_k, only the k candidates are looked at


def sample(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    tokens = torch.empty(len(draws), dtype=torch.int64, device=logits.device)
    # rows are grouped by what their draw computes, so that no row's arithmetic depends on its neighbours
    groups: dict[tuple[int, bool] | None, list[int]] = {}
    for row, draw in enumerate(draws):
        groups.setdefault(_kind(draw), []).append(row)
    for kind, rows in groups.items():
        index = torch.tensor(rows, device=logits.device)
        chosen = logits if len(rows) == len(draws) else logits[index]
        if kind is None:
            tokens[index] = chosen.argmax(-1)
        else:
            tokens[index] = _sample(chosen, [draws[row] for row in rows], *kind)
    return tokens


def _kind(draw: Draw) -> tuple[int, bool] | None:
    """None for greedy, else (how many candidates, 0 being all; whether top_p cuts)."""
    if draw.temperature == 0:
        return None
    return (draw.top_k if draw.top_k <= CANDIDATES else 0, draw.top_p < 1.0)


def _column(values: list[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]


def _sample(logits: Tensor, draws: Sequence[Draw], candidates: int, cut: bool) -> Tensor:
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
    noise = gumbel_noise(torch.tensor([d.key for d in draws], device=logits.device), ids)
    best = (scaled + noise).argmax(-1, keepdim=True)
    return ids.expand_as(scaled).gather(-1, best)[:, 0]


def _keep_top_k(scaled: Tensor, top_k: list[int]) -> Tensor:
    """Drop everything below each row's k-th largest value."""
    vocab = scaled.shape[-1]
    ordered = scaled.sort(descending=True).values
    last = torch.tensor([min(k, vocab) - 1 for k in top_k], device=scaled.device)[:, None]
    return scaled.masked_fill(scaled < ordered.gather(-1, last), -torch.inf)
