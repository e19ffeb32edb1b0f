"""Beam search: which continuations live on, which have ended, and when it is over. Pure, and deterministic to the last
tie.

Each step every live beam brings its likeliest continuations. Those that end with a stop token are finished; of all
others the `width` best live on. A beam is one node of a tree, so to branch copies nothing. Where the KV of its tokens
lies is a list of integers (`Beam.rows`): the row that computed each of them. Nothing is ever moved for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import merge
from itertools import islice

from penstock.core.request import FinishReason, Hypothesis, Request, TokenLogprobs

Candidates = Sequence[tuple[int, float]]  # (token, log-probability), the likeliest first


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

    def advance(self, candidates: Sequence[Candidates]) -> None:
        """
        Args:
            candidates: of each live beam, at first of the prompt alone: at least the `looked_at` likeliest, or all.
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
        """The best first, `width` of them if the vocabulary has as many tokens."""
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
