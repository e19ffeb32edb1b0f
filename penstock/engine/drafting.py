"""A model's draft head beside its steps: it keeps its part of the KV cache for every token, and drafts as asked.

At each position it needs the token behind that, which for the last one of a step is what was drawn. So it computes a
step's rows after these were sampled. What it keeps of the last token of a prefix in the cache was made with the token
that first followed there; where another one follows, drafts are a little worse, and tokens are the same.

Further drafts are computed one after the other, from the head's own hidden states, in places behind the sequence's last
token. The next step writes over them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from penstock.core.plan import BLOCK_TOKENS, SequenceStep, StepPlan
from penstock.engine.cache import KVCache
from penstock.engine.sampling import draw_of
from penstock.nn import ops
from penstock.nn.batch import Batch, Scratch, to_device
from penstock.nn.models.decoder import Decoder


@dataclass(slots=True)
class _Asked:
    """A sequence of which drafts are wanted.

    Attributes:
        row: of the step, the last whose token is right; `position`: of that.
        blocks: of all groups, which hold positions after that too; a `range` where they are consecutive.
        drafts: so far.
    """

    step: SequenceStep
    row: int
    position: int
    blocks: Sequence[int]
    drafts: list[int] = field(default_factory=list)

    def next_row(self, groups: int) -> SequenceStep:
        """What comes after `position` and its drafts is drawn as what comes after this row."""
        start = self.position + 1 + len(self.drafts)
        blocks = self.blocks[: (start // BLOCK_TOKENS + 1) * groups]
        return SequenceStep(self.step.request_id, start, [0], blocks, 1, self.step.params, self.step.seed)

    def wants_more(self, groups: int) -> bool:
        """And there is room for the row that it takes."""
        count = len(self.drafts)
        return count < self.step.proposes and self.position + count < len(self.blocks) // groups * BLOCK_TOKENS


def draft(
    model: Decoder,
    cache: KVCache,
    scratch: Scratch,
    plan: StepPlan,
    batch: Batch,
    hidden: Tensor,
    sampled: Tensor | None,
    runs: Sequence[Sequence[int]],
    least: int = 0,
) -> dict[str, list[int]]:
    """Have the draft head compute what the model has computed.

    Args:
        batch: the plan's.
        hidden: [rows, hidden], of all its rows, normed.
        sampled: what was drawn after each row that was sampled; None where none was.
        runs: the same of each sequence with `sample`, as far as it is right.
        least: how often the head computes, if only to take part in what it computes elsewhere.

    Returns:
        As `StepResult.proposed`.
    """
    asked = _asked(cache, plan, batch, runs)
    kept = to_device([each.row for each in asked] or [len(hidden) - 1], hidden.device)
    hidden = model.draft(hidden, _following(plan, batch, sampled), batch, cache.layers, kept)
    groups, going, computed = len(batch.tables), asked, 1
    while going:
        rows = [each.next_row(groups) for each in going]
        tokens = _drawn(model, hidden, rows)
        for each, token in zip(going, tokens.tolist(), strict=True):
            each.drafts.append(token)
        more = [i for i, each in enumerate(going) if each.wants_more(groups)]
        if len(more) < len(going):
            places = to_device(more, hidden.device)
            hidden, tokens = hidden[places], tokens[places]
        going, rows = [going[i] for i in more], [rows[i] for i in more]
        if going:
            ahead = Batch(rows, hidden.device, None, scratch, groups=groups)
            hidden = model.draft(hidden, tokens, ahead, cache.layers)
            computed += 1
    for _ in range(computed, least):
        model.accompany_draft()
    return {each.step.request_id: each.drafts for each in asked}


def _asked(cache: KVCache, plan: StepPlan, batch: Batch, runs: Sequence[Sequence[int]]) -> list[_Asked]:
    left, found = iter(runs), list[_Asked]()
    placed = {span.row: span.ids for span in batch.spans}
    for step, rows in zip(plan.sequences, batch.rows, strict=True):
        if not step.sample:
            continue
        last = len(rows) - step.sample + len(next(left)) - 1
        if step.proposes:
            blocks = [*step.blocks, *step.ahead] if cache.direct else placed[rows.start]
            found.append(_Asked(step, rows[last], step.start + last, blocks))
    return found


def _following(plan: StepPlan, batch: Batch, sampled: Tensor | None) -> Tensor:
    """[rows]: the token behind each."""
    following, device = batch.tokens.roll(-1), batch.tokens.device
    ends = [(rows[-1], step.following) for step, rows in zip(plan.sequences, batch.rows, strict=True)]
    following[to_device([row for row, _ in ends], device)] = to_device([token for _, token in ends], device)
    if sampled is not None:
        steps = zip(plan.sequences, batch.rows, strict=True)
        following[to_device([row for step, rows in steps for row in rows[len(rows) - step.sample :]], device)] = sampled
    return following


def _drawn(model: Decoder, hidden: Tensor, rows: Sequence[SequenceStep]) -> Tensor:
    """[rows]: with the model's own noise, so that a draft that is as likely is drawn alike."""
    draws = [draw_of(row) for row in rows]
    tokens = model.choose(hidden, draws)
    return ops.sample(model.logits(hidden), draws) if tokens is None else tokens
