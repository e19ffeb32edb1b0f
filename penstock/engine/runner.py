"""The runner: a plan to tensors, through the model, to sampled tokens. Its only state between steps is the KV cache and
the last step's samples; what grammars have come to is kept, too, and follows from the tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from penstock.core.parallel import Switch
from penstock.core.plan import POOLED_ONE, Helped, SequenceStep, StepPlan, StepResult
from penstock.core.request import TokenLogprobs
from penstock.core.stop import Interrupted, Stop
from penstock.engine.cache import KVCache
from penstock.engine.drafting import draft
from penstock.engine.executor.base import MaskCosts
from penstock.engine.masks import Masks, RowMasks
from penstock.engine.media import MediaEmbeddings
from penstock.engine.sampling import (
    NOT_FINITE,
    Drawn,
    beam_rows,
    each_row,
    filled,
    likeliest,
    plain_sampling,
    sample,
    score,
)
from penstock.nn.batch import Batch, Scratch, to_device
from penstock.nn.graph import Forward
from penstock.nn.helpers import Helpers
from penstock.nn.models.decoder import Decoder
from penstock.nn.ranks import Pipe
from penstock.text.grammar import Grammars

SCORED_ROWS = 256  # of a prompt at once: a row of logits is as wide as the vocabulary
POOLED_ROWS = 2048  # of a prompt at once, on a device that computes large tensors as well
MOST_POOLED, MOST_SUMMED = 2.0**15, 1 << 16  # hidden states below that, and so many: their sum is below 2**63
NOTHING = torch.empty(0)
ALONE = 16384  # elements that torch handles on one thread: other threads would still spin when the next kernels begin


class Runner:
    """A model and its KV cache.

    Attributes:
        forward: the model's pass.
        switch: has experts computed elsewhere.
        helpers: with whom it attends; None where it does so alone.
        media: what it has made of images.

    Args:
        graph_mode: how steps are computed, as `Forward` has it.
        grammars: for structured outputs; without them requests for these end with an error.
        before, after: where its rows come from and go to, where the model is one of several stages. Only the last
            stage's steps have results.
        drafts: that a model's head makes in a row, at most. Where groups meet for experts, each step has as many.
    """

    def __init__(
        self,
        model: Decoder,
        cache: KVCache,
        graph_mode: str = "auto",
        grammars: Grammars | None = None,
        before: Pipe | None = None,
        after: Pipe | None = None,
        drafts: int = 0,
    ) -> None:
        self._graph_mode, self._drafts = graph_mode, drafts
        self._before, self._after = before, after
        self.media = MediaEmbeddings()
        self.take(model)
        self.device = model.device
        self.cache = cache
        self._scratch = Scratch()
        self._prepared: deque[tuple[StepPlan, Batch]] = deque()
        self.switch: Callable[[Switch], None] = _cannot
        self.helpers: Helpers | None = None
        self.computing: Callable[[], None] = lambda: None  # called when a step is about to be long in kernels
        self._masks = Masks(model.config.vocab_size, grammars)
        self._sampled = torch.zeros(0, dtype=torch.int64, device=self.device)  # [rows] in the last step
        self._ids: list[int] = []  # the same

    @property
    def vocab_size(self) -> int:
        return self.model.config.vocab_size

    @property
    def embedding_size(self) -> int:
        return self.model.config.hidden_size

    @property
    def generates(self) -> bool:
        return not self.model.headless

    @property
    def _meeting(self) -> int:
        """How often the draft head computes in each step of all groups."""
        experts = self.model.shard.experts
        return self._drafts if experts is not None and experts.apart else 0

    @property
    def mask_costs(self) -> MaskCosts:
        return self._masks.costs

    def take(self, model: Decoder) -> None:
        """Compute with these weights from now on, of the same model."""
        self.model = model
        self.media.forget()
        self.forward = Forward(model, self._graph_mode)

    def capture(self, rows: int, reach: int) -> None:
        """Do now what the first steps would do: of up to so many rows, at positions before `reach`."""
        with torch.inference_mode():
            self.forward.capture(self.cache.layers, rows, reach)

    def counts(self) -> dict[str, int]:
        """Of the cache: ranges by state and mapped slots, where it has them; and requests with a grammar."""
        return {**self.cache.counts(), "grammars": len(self._masks.states)}

    def check(self) -> None:
        """Raise AssertionError unless all of the cache is accounted for."""
        self.cache.check()

    def prepare(self, plan: StepPlan) -> None:
        if self.cache.direct and plan.sequences:  # elsewhere the end of the step before decides where blocks are
            batch = self._batch(plan, None)
            if batch.tokens.is_cpu:  # what the kernels are given
                for table in batch.tables:
                    table.places  # noqa: B018  kept
            self._prepared.append((plan, batch))

    @torch.inference_mode()
    def run(self, plan: StepPlan, stop: Stop | None = None) -> StepResult:
        cache = self.cache
        if self.device.type == "cuda":  # of whatever thread this is; kernels in Triton are launched on it
            torch.cuda.set_device(self.device)
        if plan.switch is not None:
            self.switch(plan.switch)
        if (plan.encodes or plan.forgotten) and self.model.visual is not None:
            self.media.follow(self.model, plan)
        if not plan.sequences:
            with self._step():
                self.model.accompany()
            for _ in range(self._drafts):
                self.model.accompany_draft()
            return self._with_seen(StepResult([], []), plan)
        placed = None
        if not cache.direct or plan.fresh_blocks or plan.copies:
            placed = cache.prepare(plan)
            if cache.meets and (ranks := self.model.shard.ranks) is not None:
                ranks.on_host.gather(NOTHING)
        batch = self._take_prepared(plan) or self._batch(plan, placed)
        if self.helpers is not None:
            batch.together = partial(self.helpers.attend, _helped(plan))
        if (spread := self.model.shard.experts) is not None:
            spread.stream.apart = 0 if plan.split is None else plan.split.apart
        try:
            if stop:  # so was the step before it, perhaps, and nobody has drawn the tokens that it goes on with
                self._masks.forget(plan.released)
                return StepResult([], [], interrupted=True)
            if any(s.tokens[-1] < 0 for s in plan.sequences):
                self._fill(plan, batch)
            if batch.media and self.model.visual is not None:
                batch.seen = self.media.seen(self.model, batch)
            if self._after is not None:
                self._after.send(self._forward(batch, stop))
                return StepResult([], [])
            result = self._compute(plan, batch, stop)
            return self._with_seen(result, plan)
        except Interrupted:
            return StepResult([], [], interrupted=True)
        finally:
            if not cache.direct or cache.computed is not None:
                cache.settle()  # from here on the blocks may get other owners

    def _fill(self, plan: StepPlan, batch: Batch) -> None:
        """Put what the step before has sampled in the place of placeholders."""
        if not batch.tokens.is_cpu:
            batch.tokens = filled(batch.tokens, self._sampled)
            return
        tokens = batch.tokens.numpy()  # a few of torch's calls would take longer
        for step, rows in zip(plan.sequences, batch.rows, strict=True):
            if step.tokens[-1] < 0:
                tokens[rows.start : rows.stop] = [self._ids[-1 - t] if t < 0 else t for t in step.tokens]

    def _with_seen(self, result: StepResult, plan: StepPlan) -> StepResult:
        """With what others want of what it has made of images, and the time that this took."""
        if not plan.encodes or self.model.visual is None:
            return result
        return replace(result, embeddings=self.media.wanted(plan), encoding=self.media.encoding)

    def _batch(self, plan: StepPlan, placed: Sequence[Sequence[int]] | None) -> Batch:
        groups = len(self.cache.layout.groups)
        if plan.split is not None:
            return Batch.in_halves(plan.sequences, plan.split.rows, self.device, placed, self._scratch, groups)
        return Batch(plan.sequences, self.device, placed, self._scratch, groups)

    def _take_prepared(self, plan: StepPlan) -> Batch | None:
        while self._prepared:
            prepared, batch = self._prepared.popleft()
            if prepared is plan:  # else one of a step that failed
                return batch
        return None

    def _forward(self, batch: Batch, stop: Stop | None) -> Tensor:
        """What comes of a step's rows in the model's layers."""
        came = None
        if self._before is not None:
            came = self._before.receive((2, len(batch.tokens), self.model.config.hidden_size), self.model.dtype)
        with self._step():
            return self.forward(batch, self.cache.layers, stop, came)

    def _step(self) -> AbstractContextManager[None]:
        """Times what is exchanged meanwhile, if anything."""
        spread = self.model.shard.experts
        return nullcontext() if spread is None else spread.stream.step()

    def _compute(self, plan: StepPlan, batch: Batch, stop: Stop | None) -> StepResult:
        waits = self.device.type == "cuda"  # for the device, at last; until then the interpreter launches kernels
        if not waits:
            self.computing()
        kept = [_wanted(s, rows) for s, rows in zip(plan.sequences, batch.rows, strict=True)]
        if self.model.draft_head is None:  # which reads them all
            kept = batch.keep(kept)
        masks = None  # begun as late as can be: another thread works them out, and this one needs the interpreter
        if any(map(_steered, plan.sequences)) or (plan.released and self._masks.states):
            masks = self._masks.begin(plan, [*self._each_row(plan.sequences), *_beam_rows(plan.sequences)])
        hidden = self._forward(batch, stop)
        allowed = None if masks is None else self._masks.end(masks, self.device)
        wrong: set[int] = set()  # rows that are no numbers: then their logits are none
        steps = list(zip(plan.sequences, kept, strict=True))
        sampled = [s for s, _ in steps if s.sample]
        result, ids = StepResult([], []), None
        if sampled:
            last = [row for s, own in steps if s.sample for row in own[-s.sample :]]
            rows = self._each_row(sampled) if masks is None else masks.rows[: len(last)]
            whole = masks is None or len(masks.rows) == len(last)
            own = allowed if allowed is None or whole else allowed.part(0, len(last))
            drawn = self._draw(_rows(hidden, last), rows, own, self.computing if waits else _nothing)
            self._sampled, self._ids, result = drawn.tokens, drawn.ids, drawn.result(sampled)
            ids = drawn.tokens
        if self.model.draft_head is not None:
            found = draft(self.model, self.cache, self._scratch, plan, batch, hidden, ids, result.tokens, self._meeting)
            result = replace(result, proposed=found)
        if scored := {s.request_id: self._score(hidden, s, rows, wrong) for s, rows in steps if s.targets}:
            result = replace(result, prompt_logprobs=scored)
        if any(s.candidates for s in plan.sequences):
            result = self._with_candidates(result, hidden, steps, allowed, wrong)
        if pooled := {s.request_id: _pooled(hidden, s, rows, wrong) for s, rows in steps if s.pool}:
            result = replace(result, pooled=pooled)
        if not wrong:
            return result
        broken = {s.request_id: NOT_FINITE for s, rows in steps if not wrong.isdisjoint(rows)}
        return replace(result, broken={**result.broken, **broken})

    def _each_row(self, steps: Iterable[SequenceStep]) -> list[SequenceStep]:
        return [row for step in steps if step.sample for row in each_row(step, self._ids)]

    def _draw(
        self,
        hidden: Tensor,
        rows: Sequence[SequenceStep],
        allowed: RowMasks | None,
        launched: Callable[[], None],
    ) -> Drawn:
        """One token per row; from logits only where these are needed."""
        how = plain_sampling(rows)
        masked = None if allowed is None else (allowed.rows, allowed.masks)
        tokens = None if how is None else self.model.choose(hidden, how, masked)
        if tokens is None:
            return sample(self.model.logits(hidden), rows, allowed, launched)
        return Drawn(tokens, tokens.tolist(), stuck={} if allowed is None else allowed.stuck)

    def _with_candidates(
        self,
        result: StepResult,
        hidden: Tensor,
        steps: Sequence[tuple[SequenceStep, range]],
        allowed: RowMasks | None,
        wrong: set[int],
    ) -> StepResult:
        """With the likeliest tokens after each beam, or after a prompt; rows that are no numbers go to `wrong`. A beam
        after which no token may come brings none, and a search all of whose beams are such is broken.

        Args:
            allowed: of the rows that are drawn, and then of these.
        """
        masked = sum(step.sample for step, _ in steps)  # rows of `allowed` before those of a search
        candidates, broken = {}, dict(result.broken)
        for step, rows in steps:
            if not step.candidates:
                continue
            first = rows.start if step.branches is not None else rows[-1]
            logits, count = self.model.logits(hidden[first : rows.stop]), rows.stop - first
            wrong |= {first + i for i in _not_finite(logits)}
            own = None if allowed is None else allowed.part(masked, masked + count)
            masked += count
            found = likeliest(logits, step.candidates, own)
            if own is not None and own.stuck:
                for row in own.stuck:
                    found[row] = []
                if not any(found):
                    broken[step.request_id] = next(iter(own.stuck.values()))
            candidates[step.request_id] = found
        return replace(result, candidates=candidates, broken=broken)

    def _score(self, hidden: Tensor, step: SequenceStep, rows: range, wrong: set[int]) -> list[TokenLogprobs]:
        """Log-probabilities of the prompt's own tokens, one for each target; rows that are no numbers go to `wrong`."""
        top = step.params.prompt_logprobs
        assert top is not None
        found: list[TokenLogprobs] = []
        for start in range(0, len(step.targets), SCORED_ROWS):
            targets = step.targets[start : start + SCORED_ROWS]
            first = rows.start + start
            logits = self.model.logits(hidden[first : first + len(targets)])
            wrong |= {first + i for i in _not_finite(logits)}
            found += score(logits, targets, top)
        return found


def _cannot(switch: Switch) -> None:
    raise AssertionError(f"{switch}: experts are not spread over ranks")


def _helped(plan: StepPlan) -> list[tuple[int, Helped]]:
    """Numbers of sequences among those without branches, and what of them others may attend to."""
    spans = [step.request_id for step in plan.sequences if step.branches is None]
    return [(spans.index(part.request_id), part) for part in plan.helped]


def _nothing() -> None:
    pass


def _beam_rows(steps: Iterable[SequenceStep]) -> list[SequenceStep]:
    return [row for step in steps if step.candidates for row in beam_rows(step)]


def _steered(step: SequenceStep) -> bool:
    """Whether not every token may be drawn, now or later."""
    p = step.params
    known = step.generated is not None or (step.branches is not None and bool(step.branches.outputs))
    return known or p.structured_outputs is not None or p.allowed_token_ids is not None


def _wanted(step: SequenceStep, rows: range) -> range:
    """Those of a sequence's rows of which more than K and V is needed."""
    if step.targets or step.branches is not None or step.pool == "mean":
        return rows
    return rows[-1:] if step.candidates or step.pool else rows[len(rows) - step.sample :]


def _rows(hidden: Tensor, rows: list[int]) -> Tensor:
    if rows == list(range(hidden.shape[0])):
        return hidden
    return hidden.index_select(0, to_device(rows, hidden.device))


def _pooled(hidden: Tensor, step: SequenceStep, rows: range, wrong: set[int]) -> list[float]:
    """See `StepResult.pooled`; rows that are no numbers, or too large to be summed, go to `wrong`."""
    if step.pool == "last":
        last = hidden[rows[-1]].float()
        if not bool(last.isfinite().all()):
            wrong.add(rows[-1])
        return last.tolist()
    if len(rows) > MOST_SUMMED:
        halves = rows[:MOST_SUMMED], rows[MOST_SUMMED:]
        return [a + b for a, b in zip(*(_pooled(hidden, step, half, wrong) for half in halves), strict=True)]
    width = hidden.shape[1]
    together = max(1, ALONE // width) if hidden.is_cpu else POOLED_ROWS
    total = torch.zeros(width, dtype=torch.int64, device=hidden.device)
    for first in range(rows.start, rows.stop, together):
        part = hidden[first : min(first + together, rows.stop)].double()
        fit = (part.abs() < MOST_POOLED).all(-1)  # not a NaN, either
        if not bool(fit.all()):
            wrong |= {first + i for i in torch.nonzero(~fit)[:, 0].tolist()}
            break
        total += (part * POOLED_ONE).round_().long().sum(0)
    return total.tolist()


def _not_finite(rows: Tensor) -> list[int]:
    """Which rows of [rows, width] hold an infinity or a NaN: then their sum is one."""
    together = ALONE // rows.shape[1]
    parts = rows.split(together) if rows.is_cpu and together > 0 and len(rows) < 64 * together else (rows,)
    sums = torch.cat([part.sum(-1, dtype=torch.float32) for part in parts])
    return torch.nonzero(~sums.isfinite())[:, 0].tolist()
