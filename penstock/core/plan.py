"""One engine step: the scheduler's plan and the runner's result."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from penstock.core.parallel import Switch
from penstock.core.request import MediaSpan, Pooling, TokenLogprobs
from penstock.core.sampling import SamplingParams

BLOCK_TOKENS = 64  # consecutive tokens in a block: the unit of sharing, prefix keys, moving and checksums, cluster-wide
HELPED_BLOCKS = 16  # of a piece of attention that another group may compute: attention sums each up by itself
POOLED_ONE = 1 << 32  # what 1.0 is in a sum of `StepResult.pooled`


@dataclass(slots=True)
class Branches:
    """The running beams of a search: one row each, all at one position after the prompt that they share.

    Beside the prompt's blocks the search has a region, whose places are numbered: the row r of the i-th step after the
    prompt writes its K and V at place i * width + r. Integers say which slots of the region a beam attends to; its
    contents are never moved or copied.

    Attributes:
        rows: for each beam, which row computed each of its tokens before this one, from the first after the prompt on:
            as many as steps were before this.
        width: rows that a step has at most.
        blocks: ids of the blocks of the region, in order, as `SequenceStep` has them; the places of this step are in
            them.
        outputs: of each beam all tokens after the prompt; nothing where these do not matter for what may follow.
    """

    rows: Sequence[Sequence[int]]
    width: int
    blocks: Sequence[int]
    outputs: Sequence[Sequence[int]] = ()


@dataclass(slots=True)  # one for every sequence of every step, and a frozen one takes four times as long to make
class SequenceStep:
    """The part of one sequence that this step computes: positions [start, start + len(tokens)). It does not change.

    Attributes:
        request_id: whose.
        start: position of the first token; everything before it is in the KV cache.
        tokens: token ids to compute. The last may be a placeholder: -1 - i is what the step before this one drew in its
            i-th row that does.
        blocks: ids of the blocks that hold positions [0, start + len(tokens)), in order: for every BLOCK_TOKENS of them
            one of each group of layers, in the order of the groups. Of a group with a window, those that left it are
            gone: in their places stands the first that did not.
        sample: after how many of them, from the last one backwards, a token is drawn: none where they do not reach the
            end of the sequence, one where they do, and one more for each draft behind that. Drafts are guesses, and
            part of the sequence only as far as they are what is drawn before them (`verified`).
        params, seed: how to draw.
        generated: with `sample`, and only where it matters for what is drawn, beyond what the model computes: all of
            the output so far but drafts; the last as in `tokens`, until the runner puts the real one in its place.
            Before the first step of `branches`, which have it themselves, nothing.
        prompt: all tokens before the output.
        ahead: blocks that were set aside for positions after these, in order: likely to be written in the next step.
        stop_ids: with `generated`, or `outputs` of branches: token ids that end the output.
        bad_words: likewise: token sequences that the output never completes.
        targets: what follows each of the first `len(targets)` of `tokens` in the prompt: their log-probabilities are
            wanted.
        candidates: where no token is sampled but so many of the likeliest that may follow are wanted: of the last row,
            or of every one of `branches`; all when there are fewer.
        branches: of a beam search after its prompt: `tokens` are all at position `start`, one for each beam, and
            `blocks` are the prompt's alone.
        pool: what to bring in `StepResult.pooled`: the hidden state of the last token, or the sum of all. None is
            nothing.
        following: the token after these in the sequence, where there is one; a model's draft head reads it.
        proposes: with `sample`, how many drafts of what follows what is drawn are wanted of the model's draft head.
        media: of the sequence; its positions follow from them, too.
    """

    request_id: str
    start: int
    tokens: Sequence[int]
    blocks: Sequence[int]
    sample: int
    params: SamplingParams
    seed: int
    generated: list[int] | None = None
    prompt: Sequence[int] = ()
    ahead: Sequence[int] = ()
    stop_ids: Collection[int] = ()
    bad_words: Sequence[tuple[int, ...]] = ()
    targets: Sequence[int] = ()
    candidates: int = 0
    branches: Branches | None = None
    pool: Pooling | None = None
    following: int = 0
    proposes: int = 0
    media: Sequence[MediaSpan] = ()

    @property
    def drafts(self) -> Sequence[int]:
        return self.tokens[len(self.tokens) - self.sample + 1 :] if self.sample > 1 else ()


class Encode(NamedTuple):
    """An image or a video that a step looks at.

    Attributes:
        request_id: the first of those that want it.
        pixels: as `Request` has them.
        made: [tokens, hidden], what another instance has made of it, in place of pixels; b"" where nobody has.
        wanted: what is made of it is told, for other instances.
        beside: the step begins it and does not wait for it; nor do those after it that do not need it.
    """

    request_id: str
    span: MediaSpan
    pixels: bytes
    made: bytes = b""
    wanted: bool = False
    beside: bool = False


class StepWork(NamedTuple):
    """What decides how long a step takes.

    Attributes:
        prefills: (new tokens, tokens before them) of each sequence that computes more than one, drafts among them.
        decodes: sequences that compute one, and beams.
        kv_tokens: that these read together, the new ones among them.
        rows: that are sampled.
    """

    prefills: list[tuple[int, int]]
    decodes: int
    kv_tokens: int
    rows: int


class TailCopy(NamedTuple):
    """Where a prefix ends inside a block: the target has the first `tokens` of the source, and zeros behind them.

    Attributes:
        source, target: blocks; they are the same where one goes on in the block that it found.
    """

    source: int
    target: int
    tokens: int


class Split(NamedTuple):
    """A step as two micro-batches, where its rows are on several ranks.

    Attributes:
        rows: of the first.
        apart: units of each rank's device (threads of a CPU, multiprocessors of a GPU) that exchanges have to
            themselves; 0 where all are shared.
    """

    rows: int
    apart: int


class Helped(NamedTuple):
    """What another data-parallel group may attend to for a sequence.

    Attributes:
        request_id: whose.
        group: that has copies.
        first: the first piece of HELPED_BLOCKS blocks, counted from the sequence's start.
        blocks: where the copies of these and of further whole pieces are, in that group's memory for them.
    """

    request_id: str
    group: int
    first: int
    blocks: tuple[int, ...]


@dataclass(frozen=True)
class StepPlan:
    """A whole step. Self-contained: the runner keeps nothing between steps but the KV cache and what it drew last.

    Attributes:
        sequences: in the order of the batch.
        fresh_blocks: blocks that were allocated for this step and must be cleared before it: an earlier owner's
            contents (infinities, say) would reach this request through masked positions.
        released: ids of sequences that have freed their blocks since the last plan: they ended, were
            preempted, or were handed over. An id may come back later with other blocks, even in this very plan.
        copies: what has to be copied inside the KV cache after that clearing, and before anything is computed. Both are
            done even in a step that ends early.
        switch: of experts, before anything is computed.
        split: into micro-batches; None where it is one batch.
        helped: what other groups may attend to.
        encodes: what it looks at, before it computes rows that need that. Their embeddings are kept for later steps.
        forgotten: digests of embeddings that are needed no more, to be let go of before that.
    """

    sequences: tuple[SequenceStep, ...]
    fresh_blocks: tuple[int, ...] = ()
    released: tuple[str, ...] = ()
    copies: tuple[TailCopy, ...] = ()
    switch: Switch | None = None
    split: Split | None = None
    helped: tuple[Helped, ...] = ()
    encodes: tuple[Encode, ...] = ()
    forgotten: tuple[bytes, ...] = ()

    @property
    def empty(self) -> bool:
        return not (self.sequences or self.encodes)

    @property
    def num_tokens(self) -> int:
        """Rows, and tokens that stand for what is encoded."""
        return sum([len(s.tokens) for s in self.sequences]) + sum([each.span.length for each in self.encodes])

    @property
    def request_ids(self) -> list[str]:
        """Whose: of those in it, and of what it looks at."""
        return [*[s.request_id for s in self.sequences], *[each.request_id for each in self.encodes]]

    @property
    def copied_tokens(self) -> int:
        """Whose KV is copied."""
        return sum([copy.tokens for copy in self.copies if copy.source != copy.target])

    @cached_property
    def work(self) -> StepWork:
        prefills, decodes, kv_tokens, rows = [], 0, 0, 0
        for s in self.sequences:
            count = len(s.tokens)
            if s.branches is not None:
                own = len(s.branches.rows[0])
                decodes += count
                kv_tokens += s.start - own + count * (own + 1)
                rows += count
                continue
            if count == 1:
                decodes += 1
                kv_tokens += s.start + 1
            else:
                prefills.append((count, s.start))
            rows += s.sample or int(s.candidates > 0)
        return StepWork(prefills, decodes, kv_tokens, rows)


@dataclass(frozen=True, slots=True)
class StepResult:
    """Sampled tokens, in the order of the plan's sequences with `sample`.

    Attributes:
        tokens: a run each: one, and one more for each draft that was right.
        logprobs: one for each of a run's tokens; None where the request did not ask for them.
        prompt_logprobs: request id -> one for each of the step's `targets`.
        candidates: request id -> for each row that was asked about, (token, log-probability) of the likeliest tokens in
            falling order; of equal ones the least first.
        broken: id of a request that cannot go on -> why; nothing of this step may be used for it, nor shared.
        pooled: request id -> [hidden], of hidden states after the model's final norm: that of the last token; or the
            sum over this step's tokens in whole numbers, POOLED_ONE for 1.0 and each state rounded by itself. Sums of
            whole numbers are the same in whatever pieces and order they are taken.
        interrupted: the step was told to end early: nothing of it may be used, and all else is empty.
        proposed: request id -> drafts of what follows its run, by the model's draft head: as many as the step
            `proposes`, or fewer.
        embeddings: digest -> [tokens, hidden] in the model's dtype, of the step's `encodes` that are `wanted` and not
            `beside`.
        encoding: digest -> seconds, of those that it looked at itself and not `beside`.
    """

    tokens: Sequence[Sequence[int]]
    logprobs: Sequence[Sequence[TokenLogprobs] | None]
    prompt_logprobs: Mapping[str, list[TokenLogprobs]] = field(default_factory=dict)
    broken: Mapping[str, str] = field(default_factory=dict)
    candidates: Mapping[str, list[list[tuple[int, float]]]] = field(default_factory=dict)
    pooled: Mapping[str, Sequence[float]] = field(default_factory=dict)
    interrupted: bool = False
    proposed: Mapping[str, Sequence[int]] = field(default_factory=dict)
    embeddings: Mapping[bytes, bytes] = field(default_factory=dict)
    encoding: Mapping[bytes, float] = field(default_factory=dict, compare=False)


def verified(steps: Iterable[SequenceStep], drawn: Sequence[int]) -> list[Sequence[int]]:
    """The runs of those with `sample`, out of what was drawn after each of their rows.

    A draft is right when it is what was drawn before it, so a run is what would have been drawn one token at a time.
    """
    runs: list[Sequence[int]] = []
    row = 0
    for step in steps:
        end = row + step.sample
        if step.sample > 1:
            for place, draft in enumerate(step.drafts, row):
                if drawn[place] != draft:
                    end = place + 1
                    break
        if step.sample:
            runs.append(drawn[row:end])
        row += step.sample
    return runs
