"""A beam search as a scheduler sees it: one sequence whose steps after the prompt have several rows.

Its prompt is read, found in the cache and published like any other; after it every step brings each beam one token. Its
blocks are the prompt's and then those of a region that all beams write into (`core.plan.Branches`), so it grows and
lets go like any other sequence too.
"""

from __future__ import annotations

from penstock.core.errors import InvalidRequest
from penstock.core.plan import BLOCK_TOKENS, Branches, SequenceStep, StepResult
from penstock.core.request import Request, TokenOutput
from penstock.sched.local.beams import BeamSearch
from penstock.sched.local.limits import Limits
from penstock.sched.local.sequence import Sequence, blocks_for


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

    def __init__(self, request: Request, number: int, now: float, root: bytes, limits: Limits) -> None:
        super().__init__(request, number, now, root)
        self.guided = True
        self.rows = request.params.n
        self.longest = longest_beam(request, limits)
        self.reached = 0
        self.restart()

    def restart(self) -> None:
        # nobody has been told anything but that the prompt was read, and the same results will follow
        self.reached = max(self.reached, len(self.tokens))
        super().restart()
        del self.tokens[len(self.request.prompt) :]
        self.search = BeamSearch(self.request, self.longest)

    def cost(self, count: int) -> int:
        return len(self.search.live) or count

    def blocks_until(self, end: int) -> int:
        return group_blocks(self.request, end - len(self.request.prompt))

    @property
    def demand(self) -> int:
        return self.blocks_until(max(len(self.tokens), self.reached))

    @property
    def upcoming(self) -> int:
        return 0  # its region begins with a block of its own

    @property
    def findable(self) -> int:
        return min(self.computed, len(self.request.prompt))

    def step(self, count: int) -> SequenceStep:
        search, prompt = self.search, self.request.prompt
        if not search.live:
            step = super().step(count)
            step.candidates = self._candidates if step.sample else 0
            step.sample = False
            return step
        first = blocks_for(len(prompt))
        blocks = tuple(self.blocks)
        rows = [beam.rows for beam in search.live]
        return SequenceStep(
            self.id,
            self.computed,
            [beam.token for beam in search.live],
            blocks[:first],
            False,
            self.request.params,
            self.request.seed,
            candidates=self._candidates,
            branches=Branches(rows, self.rows, blocks[first:]),
        )

    @property
    def _candidates(self) -> int:
        return max(self.search.looked_at, self.request.params.logprobs or 0)

    def advance(self, step: SequenceStep, result: StepResult) -> TokenOutput | None:
        """Record a step that brought candidates. Returns what there is to tell: that the prompt was read, and in the
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


def make_sequence(request: Request, number: int, now: float, root: bytes, limits: Limits) -> Sequence:
    """Of whichever kind the request is."""
    if request.params.use_beam_search:
        return BeamGroup(request, number, now, root, limits)
    return Sequence(request, number, now, root)


def longest_beam(request: Request, limits: Limits) -> int:
    """Tokens of a beam at most."""
    return min(request.max_tokens, limits.max_model_len - len(request.prompt))


def group_blocks(request: Request, tokens: int) -> int:
    """Blocks that a search needs when each beam has so many tokens whose KV is kept; for less than none, those of so
    much less of the prompt."""
    prompt = len(request.prompt)
    if tokens <= 0:
        return blocks_for(prompt + tokens)
    return blocks_for(prompt) + blocks_for(tokens * request.params.n)


def most_beam_tokens(prompt_tokens: int, width: int, num_blocks: int) -> int:
    """Tokens that each of so many beams can have after a prompt, in a cache where nothing else is; the KV of the last
    is never computed."""
    return max(0, num_blocks - blocks_for(prompt_tokens)) * BLOCK_TOKENS // width + 1


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
