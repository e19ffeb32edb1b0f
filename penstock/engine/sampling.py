"""Logits to tokens. A row's draw depends on its own logits, parameters, seed and position, and on nothing else.

A draw is the argmax of the filtered logits plus Gumbel noise that is a function of (seed, position, token), which is
the same as drawing from their softmax (Gumbel-max), and can be repeated anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from penstock.core.plan import SequenceStep, StepResult, verified
from penstock.core.request import TokenLogprobs
from penstock.core.sampling import GREEDY_BELOW
from penstock.engine.masks import RowMasks
from penstock.nn import ops
from penstock.nn.batch import to_device

GREEDY = ops.Draw(0.0, 1.0, 0.0, 0, 0)
NOT_FINITE = "the model computed something that is no number"


def filled(tokens: Tensor, sampled: Tensor) -> Tensor:
    """Token ids [n] with what was sampled in the place of each placeholder: -1 - i stands for sampled[i]."""
    return torch.where(tokens < 0, sampled[(-1 - tokens).clamp_(min=0)], tokens)


def each_row(step: SequenceStep, before: Sequence[int]) -> list[SequenceStep]:
    """One for each row after which it draws, with all of `generated` known, and the drafts before it as if they were
    known to be right.

    Args:
        before: what the step before this one drew, for a placeholder.
    """
    generated = step.generated
    if generated and generated[-1] < 0:
        generated[-1] = before[-1 - generated[-1]]
    if step.sample == 1:
        return [step]
    known = len(step.tokens) - step.sample + 1
    return [
        replace(
            step,
            tokens=step.tokens[:end],
            sample=1,
            generated=None if generated is None else [*generated, *step.tokens[known:end]],
        )
        for end in range(known, len(step.tokens) + 1)
    ]


def beam_rows(step: SequenceStep) -> list[SequenceStep]:
    """The same of one that brings `candidates`: for each beam, or for the prompt, with all that it has come to."""
    if step.branches is None:
        return [step]
    outputs: Sequence[Sequence[int] | None] = step.branches.outputs or [None] * len(step.tokens)
    return [replace(step, branches=None, generated=None if output is None else list(output)) for output in outputs]


@dataclass(frozen=True, slots=True)
class Drawn:
    """What was drawn after each row.

    Attributes:
        tokens: [rows] on the device, and `ids`, the same as a list.
        logprobs: one each, None where they were not asked for; None where nobody did.
        whole: whether a row's logits are all finite; None where all are.
        stuck: row -> why nothing may be drawn after it.
    """

    tokens: Tensor
    ids: list[int]
    logprobs: list[TokenLogprobs | None] | None = None
    whole: list[bool] | None = None
    stuck: Mapping[int, str] = field(default_factory=dict)

    def result(self, steps: Sequence[SequenceStep]) -> StepResult:
        """Of the steps whose rows they are, in order; what comes after a wrong draft is left out."""
        runs = verified(steps, self.ids)
        if self.logprobs is None and (self.whole is None or all(self.whole)) and not self.stuck:
            return StepResult(runs, [None] * len(runs))
        reports, broken, row = [], {}, 0
        for step, run in zip(steps, runs, strict=True):
            end = row + len(run)
            own = [report for report in self.logprobs[row:end] if report is not None] if self.logprobs else []
            reports.append(own or None)
            for place in range(row, end):
                if why := self.stuck.get(place):
                    broken[step.request_id] = why
            if self.whole is not None and not all(self.whole[row:end]):
                broken[step.request_id] = NOT_FINITE
            row += step.sample
        return StepResult(runs, reports, broken=broken)


def sample(
    logits: Tensor,
    steps: Sequence[SequenceStep],
    allowed: RowMasks | None = None,
    launched: Callable[[], None] = lambda: None,
) -> Drawn:
    """One token per row.

    Args:
        logits: [rows, vocab] float32, from the model; changed in place.
        steps: whose rows they are, one each, as of `each_row`.
        allowed: which tokens may be drawn.
        launched: called when all is launched that a device computes of this, before it is waited for.
    """
    reports = _Logprobs(logits, steps)
    tokens, finite = ops.argmax(logits)
    if allowed is not None:
        ops.mask_logits(logits, allowed.rows, allowed.masks)
    adjusted = [row for row, step in enumerate(steps) if _adjusted(step)]
    for row in adjusted:
        _adjust(logits[row], steps[row])
    rows = [row for row, s in enumerate(steps) if s.params.temperature >= GREEDY_BELOW]
    if (adjusted or allowed is not None) and len(rows) < len(steps):
        tokens, _ = ops.argmax(logits)  # of those that are greedy
    if rows:
        index = to_device(rows, logits.device)
        chosen = logits if len(rows) == len(steps) else logits[index]
        tokens[index] = ops.sample(chosen, [draw_of(steps[row]) for row in rows])
    launched()
    if logits.is_cpu:
        ids, whole = tokens.tolist(), finite.tolist()
    else:
        ids, whole = torch.stack((tokens, finite)).tolist()  # one transfer
    return Drawn(tokens, ids, reports.of(ids), list(map(bool, whole)), {} if allowed is None else allowed.stuck)


def plain_sampling(steps: Sequence[SequenceStep]) -> list[ops.Draw] | None:
    """How rows are sampled, where nothing else is done with their logits; else None."""
    if any(step.params.logprobs is not None or _adjusted(step) for step in steps):
        return None
    return [draw_of(step) for step in steps]


def draw_of(step: SequenceStep) -> ops.Draw:
    """How what follows a row is sampled."""
    p = step.params
    if p.temperature < GREEDY_BELOW:
        return GREEDY
    key = ops.row_key(step.seed, step.start + len(step.tokens))  # the position of the token that is sampled
    return ops.Draw(p.temperature, p.top_p, p.min_p, p.top_k, key)


def _adjusted(step: SequenceStep) -> bool:
    return bool(step.params.logit_bias) or _penalised(step)


def _penalised(step: SequenceStep) -> bool:
    p = step.params
    return bool(p.presence_penalty or p.frequency_penalty or p.repetition_penalty != 1.0)


def _adjust(row: Tensor, step: SequenceStep) -> None:
    """Bias, then penalties, in place on one row [vocab]."""
    p = step.params
    if p.logit_bias:
        index = torch.tensor(list(p.logit_bias), device=row.device)
        row[index] += torch.tensor(list(p.logit_bias.values()), dtype=row.dtype, device=row.device)
    if _penalised(step):
        history = torch.tensor([*step.prompt, *(step.generated or ())], device=row.device)
        if p.repetition_penalty != 1.0:
            seen = history.unique()
            values = row[seen]
            row[seen] = torch.where(values > 0, values / p.repetition_penalty, values * p.repetition_penalty)
        generated, counts = history[len(step.prompt) :].unique(return_counts=True)
        row[generated] -= p.presence_penalty + p.frequency_penalty * counts


def score(logits: Tensor, targets: Sequence[int], top: int) -> list[TokenLogprobs]:
    """Log-probabilities of one given token per row, with the `top` most likely ones beside it.

    Args:
        logits: [rows, vocab] float32, from the model.
        targets: a token id per row.
    """
    return _reports(logits.log_softmax(-1), targets, top)


def likeliest(logits: Tensor, count: int, allowed: RowMasks | None = None) -> list[list[tuple[int, float]]]:
    """For each row (token, log-probability) of its `count` likeliest tokens, in falling order; all if there are fewer.

    Equal ones come by their ids, whatever order a device finds them in; so do those of which only some are wanted.

    Args:
        logits: [rows, vocab] float32, from the model; changed in place where not all are allowed.
        allowed: which tokens count; their log-probabilities are among all.
    """
    count = min(count, logits.shape[-1])
    total = logits.logsumexp(-1, keepdim=True)
    if allowed is not None:
        ops.mask_logits(logits, allowed.rows, allowed.masks)
    best = logits.topk(count)
    least = best.values[:, -1:]
    more = ((logits >= least).sum(-1) > count) & (least[:, 0] > -torch.inf)
    crowded = torch.nonzero(more)[:, 0].tolist()  # more than `count` are as likely
    logprobs = best.values - total
    columns = zip(best.values.tolist(), best.indices.tolist(), logprobs.tolist(), strict=True)
    ranked = [sorted(zip(*column, strict=True), key=lambda entry: (-entry[0], entry[1])) for column in columns]
    found = [[(token, logprob) for value, token, logprob in row if value > -torch.inf] for row in ranked]
    for row in crowded:
        surely = int((logits[row] > least[row]).sum())
        equal = torch.nonzero(logits[row] == least[row])[:, 0].tolist()
        found[row][surely:] = [(token, found[row][-1][1]) for token in equal[: count - surely]]
    return found


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


class _Logprobs:
    """Log-probabilities of the raw logits, taken before anything changes them."""

    def __init__(self, logits: Tensor, steps: Sequence[SequenceStep]) -> None:
        self._rows = {row: s.params for row, s in enumerate(steps) if s.params.logprobs is not None}
        self._count = len(steps)
        self._values: Tensor | None = None
        if self._rows:
            index = torch.tensor(list(self._rows), dtype=torch.int64, device=logits.device)
            self._values = logits[index].log_softmax(-1)

    def of(self, tokens: Sequence[int]) -> list[TokenLogprobs | None] | None:
        if self._values is None:
            return None
        reports: list[TokenLogprobs | None] = [None] * self._count
        for (row, params), values in zip(self._rows.items(), self._values, strict=True):
            named = params.logprob_token_ids
            (report,) = _reports(values[None], [tokens[row]], 0 if named else params.logprobs or 0)
            if named:
                ids = [*dict.fromkeys((tokens[row], *named))]
                found = values[torch.tensor(ids, device=values.device)].tolist()
                report.top = sorted(zip(ids, found, strict=True), key=lambda entry: -entry[1])
            reports[row] = report
        return reports
