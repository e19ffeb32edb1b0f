"""Beam search: which continuations go on, which are finished, and when the search ends. Pure, and deterministic also
for ties.

In each step every running beam brings its likeliest continuations. Those that end with a stop token are finished; of
all others the `width` best continue. A beam is one node of a tree, so to branch copies nothing. Where the KV of its
tokens lies is a list of integers (`Beam.rows`): the row that computed each of them. Nothing is ever moved for it.

To the scheduler a search is one sequence whose steps after the prompt have several rows (`BeamGroup`). Its prompt is
prefilled, found in the cache and published like any other; after it every step brings each beam one token. Its blocks
are the prompt's and then those of a region that all beams write into (`core.plan.Branches`), so it grows and is freed
like any other sequence.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Items
from heapq import merge
from itertools import islice

from penstock.core.errors import InvalidRequest
from penstock.core.plan import BLOCK_TOKENS, Branches, SequenceStep, StepResult
from penstock.core.request import FinishReason, Hypothesis, Request, TokenLogprobs, TokenOutput
from penstock.kv.groups import Windows
from penstock.kv.pool import Hit
from penstock.sched.local.limits import Limits
from penstock.sched.local.sequence import Sequence, blocks_for

Candidates = Items[tuple[int, float]]  # (token, log-probability), the likeliest first


class Beam:
    """A continuation of the prompt.

    Attributes:
        token: its last; what came before is its parent's.
        logprobs: of that token, where they are wanted.
        cumulative: log-probability of all its tokens.
        rows: for each of its tokens but the last, which row of the step that computed it did.
    """

    __slots__ = ("cumulative", "logprobs", "parent", "rows", "token")

    def __init__(
        self, parent: Beam | None, token: int, cumulative: float, rows: list[int], logprobs: TokenLogprobs | None
    ) -> None:
        self.parent, self.token, self.cumulative = parent, token, cumulative
        self.rows, self.logprobs = rows, logprobs

    def path(self) -> list[Beam]:
        """From its first token to its last."""
        path: list[Beam] = [self]
        while (parent := path[-1].parent) is not None:
            path.append(parent)
        return path[::-1]


class BeamSearch:
    """One request's search.

    Args:
        request: its `params` say how wide and how long; its stop tokens end a beam.
        max_tokens: of a beam.

    Attributes:
        live: those that go on, the best first; before the first step none, and the prompt stands for all.
        length: tokens that each of them has.
        over: nothing goes on; `results` are final.
    """

    def __init__(self, request: Request, max_tokens: int) -> None:
        params = request.params
        self.width = params.n
        self.live: list[Beam] = []
        self.length = 0
        self.over = False
        self._top = params.logprobs
        self._stop_ids = request.stop_ids
        self._prompt = len(request.prompt)
        self._longest = max_tokens
        self._penalty, self._early = params.length_penalty, params.early_stopping
        self._finished: list[tuple[float, Hypothesis]] = []  # (score, ...), the best first, at most `width`

    @property
    def looked_at(self) -> int:
        """Continuations of each live beam that are looked at: when every other one ends there are still enough."""
        return 2 * self.width

    def advance(self, candidates: Items[Candidates]) -> None:
        """
        Args:
            candidates: of each live beam, at first of the prompt alone: at least the `looked_at` likeliest that may
                follow, or all.
        """
        assert not self.over
        assert len(candidates) == max(1, len(self.live))
        self.length += 1
        parents: list[Beam | None] = [*self.live] or [None]
        rows = list(zip(parents, candidates, strict=True))
        for row, (parent, found) in enumerate(rows):
            for place, (token, logprob) in enumerate(found[: self.looked_at]):
                if token in self._stop_ids and (rank := self._rank(_sum(parent, logprob), self.length - 1)) is not None:
                    self._finish(rank, self._branch(parent, row, place, found), FinishReason.STOP)
        going_on = [self._going_on(parent, row, found) for row, (parent, found) in enumerate(rows)]
        best = islice(merge(*going_on), self.width)
        self.live = [self._branch(rows[row][0], row, place, rows[row][1]) for _, row, place in best]
        if not (self.live and self.length < self._longest and self._improvable()):
            self._end()

    def results(self) -> list[Hypothesis]:
        """The best first, `width` of them if as many may follow."""
        assert self.over
        return [hypothesis for _, hypothesis in self._finished]

    def _going_on(self, parent: Beam | None, row: int, found: Candidates) -> Iterator[tuple[float, int, int]]:
        """(its cumulative log-probability, negated; row; place) of each that does not end, in this order."""
        for place, (token, logprob) in enumerate(found[: self.looked_at]):
            if token not in self._stop_ids:
                yield -_sum(parent, logprob), row, place

    def _branch(self, parent: Beam | None, row: int, place: int, found: Candidates) -> Beam:
        token, logprob = found[place]
        report = None
        if self._top is not None:
            rank = 1 + next(i for i, (_, other) in enumerate(found) if other == logprob)
            report = TokenLogprobs(logprob, rank, list(found[: self._top]))
        rows = [] if parent is None else [*parent.rows, row]
        return Beam(parent, token, _sum(parent, logprob), rows, report)

    def _rank(self, cumulative: float, length: int) -> int | None:
        """Its place among the finished ones, after its equals; None when it is not one of the best."""
        score = self._score(cumulative, length)
        place = sum(other >= score for other, _ in self._finished)
        return place if place < self.width else None

    def _finish(self, place: int, beam: Beam, reason: FinishReason) -> None:
        stop_token = beam.token if reason is FinishReason.STOP else None
        path = beam.path()
        logprobs = None if self._top is None else [b.logprobs for b in path if b.logprobs is not None]
        score = self._score(beam.cumulative, self.length - (stop_token is not None))
        hypothesis = Hypothesis([b.token for b in path], logprobs, reason, stop_token, beam.cumulative)
        self._finished.insert(place, (score, hypothesis))
        del self._finished[self.width :]

    def _score(self, cumulative: float, length: int) -> float:
        """As vLLM counts: the length is that of prompt and output together, without a stop token."""
        score: float = cumulative / (self._prompt + length) ** self._penalty
        return score

    def _end(self) -> None:
        if self.length >= self._longest:
            for beam in self.live:
                if (rank := self._rank(beam.cumulative, self.length)) is not None:
                    self._finish(rank, beam, FinishReason.LENGTH)
        self.live, self.over = [], True

    def _improvable(self) -> bool:
        """Whether a live beam may still come to be among the results (as transformers' `early_stopping` means it)."""
        if len(self._finished) < self.width:
            return True
        if self._early is True:
            return False
        # a log-probability only falls; by a positive penalty it may still be divided by more
        length = self._longest if self._early == "never" and self._penalty > 0 else self.length
        return self._score(self.live[0].cumulative, length) > self._finished[-1][0]


def _sum(parent: Beam | None, logprob: float) -> float:
    return logprob if parent is None else parent.cumulative + logprob


class BeamGroup(Sequence):
    """
    `tokens` are the prompt and one token for each position after it, the best beam's at that time: what counts is how
    many.

    Attributes:
        search: what it has come to.
        longest: tokens of a beam at most.
        reached: positions that it had when it was preempted last: it is not begun again before there is room for as
            many.
    """

    __slots__ = ("longest", "reached", "rows", "search")

    branching = True

    def __init__(
        self, request: Request, number: int, now: float, root: bytes, windows: Windows, limits: Limits
    ) -> None:
        super().__init__(request, number, now, root, windows)
        self.rows = request.params.n
        self.longest = longest_beam(request, limits)
        self.reached = 0
        self.restart()

    def restart(self) -> None:
        # no result was reported yet, and the same results will follow
        self.reached = max(self.reached, len(self.tokens))
        super().restart()
        del self.tokens[len(self.request.prompt) :]
        self.search = BeamSearch(self.request, self.longest)

    def cost(self, count: int) -> int:
        return len(self.search.live) or count

    def blocks_until(self, end: int) -> int:
        return self.groups * group_blocks(self.request, end - len(self.request.prompt))

    def missing(self, chunk: int, hit: Hit | None = None) -> int:
        have = len(self.blocks) if hit is None else hit.length * self.groups
        return max(0, self.blocks_until(max(len(self.tokens), self.reached)) - have)

    @property
    def upcoming(self) -> int:
        return 0  # its region begins with a block of its own

    @property
    def findable(self) -> int:
        return min(self.computed, len(self.request.prompt))

    def step(self, count: int, drafts: Items[int] = ()) -> SequenceStep:
        assert not drafts, "beams are not drafted for"
        search, request = self.search, self.request
        if not search.live:
            step = super().step(count)
            step.candidates = self._candidates if step.sample else 0
            step.sample = 0
            return step
        first = blocks_for(len(request.prompt)) * self.groups
        blocks = tuple(self.blocks)
        rows = [beam.rows for beam in search.live]
        guided = self.steered or search.length < request.params.min_tokens
        outputs = [[each.token for each in beam.path()] for beam in search.live] if guided else ()
        return SequenceStep(
            self.id,
            self.computed,
            [beam.token for beam in search.live],
            blocks[:first],
            0,
            request.params,
            request.seed,
            stop_ids=request.stop_ids if guided else (),
            bad_words=request.bad_words if guided else (),
            candidates=self._candidates,
            branches=Branches(rows, self.rows, blocks[first:], outputs),
            media=request.media,
        )

    @property
    def _candidates(self) -> int:
        return max(self.search.looked_at, self.request.params.logprobs or 0)

    def advance(self, step: SequenceStep, result: StepResult) -> TokenOutput | None:
        """Record a step that brought candidates. Returns what there is to tell: that prefill is over, and in the
        end the results."""
        self.computed = step.start + 1 if step.branches else step.start + len(step.tokens)
        search = self.search
        search.advance(result.candidates[self.id])
        output = TokenOutput(self.id, [], cached_tokens=self.cached_tokens or 0)
        if search.over:
            output.hypotheses = search.results()
            output.finish = output.hypotheses[0].finish
            return output
        self.tokens.append(search.live[0].token)
        return None if step.branches else output


def longest_beam(request: Request, limits: Limits) -> int:
    """Tokens of a beam at most."""
    return min(request.max_tokens, limits.max_model_len - len(request.prompt))


def group_blocks(request: Request, tokens: int) -> int:
    """Blocks of each group of layers that a search needs when each beam has so many tokens whose KV is kept; for less
    than none, those of so much less of the prompt. It gives none back, whatever has left a window."""
    prompt = len(request.prompt)
    if tokens <= 0:
        return blocks_for(prompt + tokens)
    return blocks_for(prompt) + blocks_for(tokens * request.params.n)


def most_beam_tokens(prompt_tokens: int, width: int, num_blocks: int) -> int:
    """Tokens that each of so many beams can have after a prompt, in a cache where nothing else is; the KV of the last
    is never computed. 0 where the prompt's own does not fit: it gives nothing back that has left a window."""
    left = num_blocks - blocks_for(prompt_tokens)
    return left * BLOCK_TOKENS // width + 1 if left >= 0 else 0


def check_group(request: Request, limits: Limits, num_blocks: int) -> None:
    """Raises InvalidRequest when it could never run, even alone."""
    if not limits.searches:
        raise InvalidRequest("use_beam_search: true, engines of modelled devices do not search", "use_beam_search")
    check_width(request.params.n, limits.max_sequences)
    check_length(len(request.prompt), request.params.n, longest_beam(request, limits), num_blocks)


def check_width(width: int, max_sequences: int) -> None:
    """Raises InvalidRequest when so many beams never run at once."""
    if width > max_sequences:
        raise InvalidRequest(f"n: {width} beams, allowed are at most max-num-seqs, which is {max_sequences}", "n")


def check_length(prompt_tokens: int, width: int, max_tokens: int, num_blocks: int) -> None:
    """Raises InvalidRequest when the KV of such a search fits no cache of so many blocks."""
    most = most_beam_tokens(prompt_tokens, width, num_blocks)
    if max_tokens > most:
        raise InvalidRequest(
            f"max_tokens: {max_tokens}, allowed are at most {most}: the KV of {width} beams after {prompt_tokens} "
            f"input tokens must fit {num_blocks} blocks",
            "max_tokens",
        )
