"""Logits to tokens. A row's draw depends on its own logits, parameters, seed and position, and on nothing else.

A draw is the argmax of the filtered logits plus Gumbel noise that is a function of (seed, position, token), which is
the same as drawing from their softmax (Gumbel-max), and can be repeated anywhere.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.core.plan import SequenceStep, StepResult
from penstock.core.request import TokenLogprobs
from penstock.nn.ops.gumbel import gumbel_noise, row_key

CANDIDATES = 1024  # up to this top_k, only the k candidates are looked at


def draw(logits: Tensor, steps: Sequence[SequenceStep]) -> StepResult:
    """One token per row.

    Args:
        logits: [rows, vocab] float32, from the model; changed in place.
        steps: whose rows they are.
    """
    reports = _Logprobs(logits, steps)
    for row, step in enumerate(steps):
        _adjust(logits[row], step)
    tokens = torch.empty(len(steps), dtype=torch.int64, device=logits.device)
    # rows are grouped by what their draw computes, so that no row's arithmetic depends on its neighbours
    groups: dict[tuple[int, bool] | None, list[int]] = {}
    for row, step in enumerate(steps):
        groups.setdefault(_kind(step), []).append(row)
    for kind, rows in groups.items():
        index = torch.tensor(rows, device=logits.device)
        chosen = logits if len(rows) == len(steps) else logits[index]
        if kind is None:
            tokens[index] = chosen.argmax(-1)
        else:
            tokens[index] = _sample(chosen, [steps[row] for row in rows], *kind)
    ids = tokens.tolist()
    return StepResult(ids, reports.of(ids))


def _kind(step: SequenceStep) -> tuple[int, bool] | None:
    """None for greedy, else (how many candidates, 0 being all; whether top_p cuts)."""
    p = step.params
    if p.greedy:
        return None
    return (p.top_k if p.top_k <= CANDIDATES else 0, p.top_p < 1.0)


def _adjust(row: Tensor, step: SequenceStep) -> None:
    """What may not be drawn, bias, then penalties, in place on one row [vocab]."""
    p = step.params
    if p.allowed_token_ids is not None:
        index = torch.tensor(p.allowed_token_ids, device=row.device)
        allowed = row[index]
        row.fill_(-torch.inf)
        row[index] = allowed
    if step.banned:
        row[torch.tensor(list(step.banned), device=row.device)] = -torch.inf
    if p.logit_bias:
        index = torch.tensor(list(p.logit_bias), device=row.device)
        row[index] += torch.tensor(list(p.logit_bias.values()), dtype=row.dtype, device=row.device)
    if p.penalised:
        assert step.history is not None
        history = torch.tensor(step.history, device=row.device)
        if p.repetition_penalty != 1.0:
            seen = history.unique()
            values = row[seen]
            row[seen] = torch.where(values > 0, values / p.repetition_penalty, values * p.repetition_penalty)
        generated, counts = history[step.prompt_tokens :].unique(return_counts=True)
        row[generated] -= p.presence_penalty + p.frequency_penalty * counts


def score(logits: Tensor, targets: Sequence[int], top: int) -> list[TokenLogprobs]:
    """Log-probabilities of one given token per row, with the `top` most likely ones beside it.

    Args:
        logits: [rows, vocab] float32, from the model.
        targets: a token id per row.
    """
    return _reports(logits.log_softmax(-1), targets, top)


def _reports(values: Tensor, targets: Sequence[int], top: int) -> list[TokenLogprobs]:
    """The same of log-probabilities [rows, vocab]; a negative `top` is all of the vocabulary."""
    chosen = values.gather(-1, torch.tensor(targets, device=values.device)[:, None])
    ranks = (values > chosen).sum(-1) + 1
    vocab = values.shape[-1]
    best = values.topk(min(top, vocab) if top >= 0 else vocab)
    rows = zip(
        chosen[:, 0].tolist(), ranks.tolist(), best.indices.tolist(), best.values.tolist(), strict=True
    )  # one transfer each, however many rows
    return [TokenLogprobs(own, rank, list(zip(ids, tops, strict=True))) for own, rank, ids, tops in rows]


def _column(values: list[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]


def _sample(logits: Tensor, steps: Sequence[SequenceStep], candidates: int, cut: bool) -> Tensor:
    """[rows, vocab] -> [rows] token ids, in the order temperature, min_p, top_k, top_p, draw."""
    params = [s.params for s in steps]
    scaled = logits / _column([p.temperature for p in params], logits)
    vocab = scaled.shape[-1]
    if 0 < candidates < vocab:
        scaled, ids = scaled.topk(candidates, sorted=True)
    elif cut:
        scaled, ids = scaled.sort(descending=True, stable=True)
    else:
        ids = torch.arange(vocab, device=logits.device)[None]
    top = scaled.amax(-1, keepdim=True)
    if any(p.min_p > 0 for p in params):
        floor = torch.log(_column([p.min_p for p in params], logits))
        scaled = scaled.masked_fill(scaled < top + floor, -torch.inf)
    if not candidates and any(0 < p.top_k < vocab for p in params):
        scaled = _keep_top_k(scaled, [p.top_k or vocab for p in params])
    if cut:
        probabilities = scaled.softmax(-1)
        before = probabilities.cumsum(-1) - probabilities  # of the more likely ones; the first is always kept
        scaled = scaled.masked_fill(before >= _column([p.top_p for p in params], logits), -torch.inf)
    # the position of the token that is drawn
    keys = [row_key(s.seed, s.start + len(s.tokens)) for s in steps]
    noise = gumbel_noise(torch.tensor(keys, device=logits.device), ids)
    best = (scaled + noise).argmax(-1, keepdim=True)
    return ids.expand_as(scaled).gather(-1, best)[:, 0]


def _keep_top_k(scaled: Tensor, top_k: list[int]) -> Tensor:
    """Drop everything below each row's k-th largest value."""
    vocab = scaled.shape[-1]
    ordered = scaled.sort(descending=True).values
    last = torch.tensor([min(k, vocab) - 1 for k in top_k], device=scaled.device)[:, None]
    return scaled.masked_fill(scaled < ordered.gather(-1, last), -torch.inf)


class _Logprobs:
    """Log-probabilities of the raw logits, taken before anything changes them."""

    def __init__(self, logits: Tensor, steps: Sequence[SequenceStep]) -> None:
        self._rows = {row: s.params.logprobs for row, s in enumerate(steps) if s.params.logprobs is not None}
        self._count = len(steps)
        index = torch.tensor(list(self._rows), dtype=torch.int64, device=logits.device)
        self._values = logits[index].log_softmax(-1) if self._rows else None

    def of(self, tokens: Sequence[int]) -> list[TokenLogprobs | None]:
        reports: list[TokenLogprobs | None] = [None] * self._count
        if self._values is None:
            return reports
        for (row, top), values in zip(self._rows.items(), self._values, strict=True):
            (reports[row],) = _reports(values[None], [tokens[row]], top)
        return reports
