"""How many drafts a step computes, for which sequences: as many as bring more tokens for its time, down to none.

Every token that a sequence draws is held against what its proposer would have proposed, drafted or not. So how often
proposals are right is known before the first draft, and bad ones cost nothing but being made. The chance is learned for
each sequence and level of confidence, beginning with what other sequences have taught: with c(l) that of level l, the
draft at depth i behind a proposal of level l is right with p = c(l) c(l + 1) ... c(l + i). A step with B sequences and
the likeliest n drafts then brings

    (B + sum of the n greatest p) / T(n)

tokens per ms, and n is the one that maximises it; none where that is not GAIN times what a step without brings. T is
by the step-time model, times what steps with drafts and steps without were seen to take of that, each for themselves:
their ratio decides, and a model that is right for the one kind need not be for the other.

A sequence whose last token is still being drawn cannot be drafted for. Where the next draft is expected to pay by
itself the sequence is `hot`, and no step is scheduled before its token is known.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sized
from collections.abc import Sequence as Items
from dataclasses import dataclass
from itertools import takewhile
from math import inf
from typing import Protocol

from penstock.core.plan import StepWork
from penstock.sched.local.sequence import Sequence
from penstock.sched.steptime import StepTime

LEARNED, TAUGHT = 0.1, 0.01  # of a sequence's chance, and of what it teaches others, by one proposal
LEAST_CHANCE, MOST_CHANCE = 0.2, 0.8  # before anything is learned, of the lowest level and of the highest
MISSED, FORGOTTEN = 0.1, 0.01  # of how far steps miss the model, by one step like them, and by one of the other kind
FURTHEST = 4.0  # times what was predicted, or that part of it: a step that misses by more misses by so much
BUBBLE = 1.03  # how much longer a step is when the device waits for its plan, because none was scheduled ahead
GAIN = 1.1  # predictions are not that good
SURE = 0.5  # the chance from which on drafts are made where nothing predicts steps
EACH = 2  # sequences of a step for each token that one of them without a proposal is not looked at
COUNTS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)  # of drafts in a step that are compared
LEAST, UNLIKELY = 0.05, 4  # chances below that, or so many times below what pays by itself, are not looked at


class Proposer(Protocol):
    """Guesses what one sequence will draw.

    Attributes:
        levels: of confidence; the last is the highest.
        agreed: the level of what it proposes now.
    """

    levels: int
    agreed: int

    def land(self, tokens: Items[int], drafts: Items[int] = ()) -> None:
        """These were drawn, and behind them a head of the model has drafted those."""
        ...

    def propose(self, most: int) -> list[int]:
        """Up to so many tokens, possibly none; the next calls say the same until something lands."""
        ...


class Draft:
    """What is proposed for one sequence, and how often that was right.

    Args:
        taught: chances by level, of all sequences; it begins with them, and changes them.

    Attributes:
        proposal: tokens that would follow; possibly none.
        level: of the first of them.
        behind: tokens that were drawn and that its proposer has not seen.
    """

    __slots__ = ("_chances", "_most", "_proposer", "_taught", "behind", "level", "proposal")

    def __init__(self, proposer: Proposer, most: int, taught: list[float]) -> None:
        self._proposer, self._most, self.behind = proposer, most, 0
        self._chances, self._taught = taught[:], taught
        self._propose()

    def land(self, tokens: Items[int], drafts: Items[int]) -> None:
        """These were drawn: those that the proposer has not seen. A head of the model has drafted those behind them."""
        chances, taught = self._chances, self._taught
        for depth, (token, guess) in enumerate(zip(tokens, self.proposal, strict=False)):
            level = min(self.level + depth, len(chances) - 1)
            chances[level] += LEARNED * ((token == guess) - chances[level])
            taught[level] += TAUGHT * ((token == guess) - taught[level])
            if token != guess:
                break
        self._proposer.land(tokens, drafts)
        self.behind = 0
        self._propose()

    def _propose(self) -> None:
        self.proposal, self.level = self._proposer.propose(self._most), self._proposer.agreed

    @property
    def chance(self) -> float:
        """That the first of the proposal is right."""
        return self._chances[self.level]

    def chances(self, count: int, least: float) -> list[float]:
        """Of the first `count`, that each is right with all before it; as long as that is at least `least`."""
        found, chance, last, level = [], 1.0, len(self._chances) - 1, self.level
        for _ in range(count):
            chance *= self._chances[level]
            if chance < least:
                break
            found.append(chance)
            if level < last:
                level += 1
        return found


@dataclass(slots=True)
class SpeculationCounters:
    """Totals since the start."""

    drafts: int = 0  # sequences' parts of steps that had any
    draft_tokens: int = 0
    accepted_tokens: int = 0


class Speculation:
    """Of one scheduler.

    Args:
        make: a proposer for a sequence.
        most: drafts of a sequence in a step.
        adaptive: whether there are as many as pay; else as many as are proposed.
        head: which of the model makes the drafts, by the name of its method; None is none.

    Attributes:
        ready: sequences for which something is proposed, by id.
        hot: those of them that are not to be scheduled ahead.
    """

    def __init__(
        self, make: Callable[[Sequence], Proposer], most: int, *, adaptive: bool = True, head: str | None = None
    ) -> None:
        self.most, self.head = most, head
        self.counters = SpeculationCounters()
        self.ready: dict[str, Sequence] = {}
        self.hot: dict[str, Sequence] = {}
        self._make, self._adaptive = make, adaptive
        self._drafts: dict[Sequence, Draft] = {}
        self._price = SURE if adaptive else 0.0  # the chance above which one more draft pays
        self._taught: list[float] = []  # chances by level, of all sequences
        self._misses, self._drafted_misses = 1.0, 1.0  # steps without drafts, and with: measured / predicted
        self._patience = 1  # tokens after which a sequence without a proposal is looked at again

    def count(self, drafts: int, accepted: int) -> None:
        """A sequence had drafts in a step, so many of which were right."""
        self.counters.drafts += 1
        self.counters.draft_tokens += drafts
        self.counters.accepted_tokens += accepted

    def land(self, sequence: Sequence, run: Items[int], drafts: Items[int] = ()) -> None:
        """A run was drawn, and is part of the sequence; a head of the model has drafted those behind it."""
        draft = self._drafts.get(sequence)
        if draft is None:
            draft = self._drafts[sequence] = self._begin(sequence, drafts)
        elif draft.proposal:
            draft.land(run, drafts)
        else:
            draft.behind += len(run)
            if draft.behind < self._patience and not drafts:
                return
            draft.land(sequence.tokens[-draft.behind :], drafts)
        if not draft.proposal:
            self.ready.pop(sequence.id, None)
            self.hot.pop(sequence.id, None)
            return
        self.ready[sequence.id] = sequence
        if draft.chance > self._price:
            self.hot[sequence.id] = sequence
        else:
            self.hot.pop(sequence.id, None)

    def _begin(self, sequence: Sequence, drafts: Items[int]) -> Draft:
        proposer = self._make(sequence)
        if drafts:
            proposer.land((), drafts)
        if not self._taught:
            steps = max(1, proposer.levels - 1)
            self._taught = [LEAST_CHANCE + (MOST_CHANCE - LEAST_CHANCE) * i / steps for i in range(proposer.levels)]
        return Draft(proposer, self.most, self._taught)

    def ran(self, work: StepWork, drafted: int, ms: float, times: StepTime) -> None:
        """A step took so long; `drafted` of its sequences had drafts. One with prompts says nothing."""
        if not self.ready or len(work.prefills) > drafted:
            return
        ratio = min(max(ms / times.step_ms(*work), 1 / FURTHEST), FURTHEST)
        if drafted:
            self._drafted_misses += MISSED * (ratio - self._drafted_misses)
        else:
            self._misses += MISSED * (ratio - self._misses)
            self._drafted_misses += FORGOTTEN * (self._misses - self._drafted_misses)

    def wanted(self, sequence: Sequence) -> int:
        """Drafts that a head of the model is to make behind a sequence's next token: at least one, by which it is known
        how often they are right, and as many as may be looked at."""
        draft = self._drafts.get(sequence)
        if draft is None or not self._adaptive:
            return self.most
        return max(1, len(draft.chances(self.most, max(LEAST, self._price / UNLIKELY))))

    def forget(self, sequence: Sequence) -> None:
        """It runs no further, for now or for good."""
        self._drafts.pop(sequence, None)
        self.ready.pop(sequence.id, None)
        self.hot.pop(sequence.id, None)

    def considers(self, grants: Sized) -> bool:
        """Whether anything is proposed, for a step of these."""
        self._patience = 1 + len(grants) // EACH
        return bool(self.ready)

    def choose(
        self, grants: Mapping[Sequence, int], room: Callable[[Sequence], int], budget: int, times: StepTime | None
    ) -> dict[Sequence, list[int]]:
        """Drafts for a step; none beside prompts, which make better use of the arithmetic that is left.

        Args:
            grants: the sequences of the step, and positions that each goes on by.
            room: how many drafts there is room for behind the next token of one.
            budget: of all drafts.
            times: predicts steps; None where nothing does.
        """
        if any(count > 1 for count in grants.values()):
            self._price = inf if self._adaptive else 0.0
            return {}
        step = (
            None if times is None or not self._adaptive else _Step(times, grants, self._drafted_misses / self._misses)
        )
        ready = [s for s in self.ready.values() if s in grants]
        if step is not None:
            self._price = step.price(ready)
        least = max(LEAST, self._price / UNLIKELY) if self._adaptive else 0.0
        offers: list[tuple[float, Sequence]] = []
        for s in ready:
            if s.tokens[-1] >= 0:  # else its last token is not known yet
                draft = self._drafts[s]
                offers += [(chance, s) for chance in draft.chances(min(len(draft.proposal), room(s)), least)]
        offers.sort(key=_chance, reverse=True)  # it keeps the order of equal ones, and so that of a sequence's own
        del offers[budget:]
        if step is not None:
            del offers[step.best(offers) :]
        elif self._adaptive:
            offers = [offer for offer in offers if offer[0] > SURE]
        drafts = Counter(s for _, s in offers)
        return {s: self._drafts[s].proposal[:count] for s, count in drafts.items()}

    def check(self, holding: Iterable[Sequence]) -> None:
        """Raise AssertionError unless drafts are of sequences that hold blocks, and only of these."""
        assert self.hot.keys() <= self.ready.keys()
        assert self._drafts.keys() >= set(self.ready.values())
        assert self._drafts.keys() <= set(holding), "a sequence has gone, and what was proposed for it has not"
        assert all(len(draft.proposal) <= self.most for draft in self._drafts.values())


class _Step:
    """What a step takes and brings, by its drafts.

    Args:
        grants: its sequences; all decode.
        dearer: how much longer steps with drafts take than by comparison with those without.
    """

    def __init__(self, times: StepTime, grants: Iterable[Sequence], dearer: float) -> None:
        rows, kv_tokens, tpot = 0, 0, inf
        for s in grants:
            rows += s.rows
            kv_tokens += s.computed + s.rows
            tpot = min(tpot, s.tpot)
        self._times, self._rows, self._kv_tokens, self._dearer = times, rows, kv_tokens, dearer * BUBBLE
        self._alone = times.step_ms((), rows, kv_tokens)
        self._limit = max(self._alone, times.margin * 1e3 * tpot)

    def price(self, ready: Items[Sequence]) -> float:
        """The chance above which one draft for each of these pays."""
        if not ready:
            return inf
        ms = self._ms(Counter(ready))
        return self._rows * (GAIN * ms / self._alone - 1) / len(ready) if ms <= self._limit else inf

    def best(self, offers: Items[tuple[float, Sequence]]) -> int:
        """How many of these, the likeliest of which come first, bring the most tokens for the step's time."""
        best, most, last = 0, GAIN * self._rows / self._alone, 0.0
        drafts: Counter[Sequence] = Counter()
        before, expected, left = 0, float(self._rows), sum([chance for chance, _ in offers])
        for count in (*takewhile(len(offers).__gt__, COUNTS), len(offers)):
            for chance, sequence in offers[before:count]:
                drafts[sequence] += 1
                expected += chance
                left -= chance
            before, ms = count, self._ms(drafts)
            rate = expected / ms
            if ms > self._limit or (rate < last and best) or (expected + left) / ms <= most:
                break  # the rest is less likely, and no step with more of them is shorter
            last = rate
            if rate > most:
                best, most = count, rate
        return best

    def _ms(self, drafts: Mapping[Sequence, int]) -> float:
        kv_tokens = self._kv_tokens - sum([s.computed + 1 for s in drafts])
        prefills = [(count + 1, s.computed) for s, count in drafts.items()]
        rows = self._rows + sum(drafts.values())
        return self._dearer * self._times.step_ms(prefills, self._rows - len(drafts), kv_tokens, rows)


def _chance(offer: tuple[float, Sequence]) -> float:
    return offer[0]
