"""Slack-based scheduling: a step may be as long as the least slack of its decodes allows.

A decoding sequence's next token is due at `first + tpot * generated`, so unused time accumulates. The least of these
slacks, less a margin, is what a step may take: prompts get what fits into it beside the
decodes. A sequence that is late already counts as if it had one TPOT for every step: it falls no further behind.

Prompts are prefilled in the order of their deadlines, as far as these can be kept. Where they cannot all be, the
longest are put behind the others until the rest can (Moore and Hodgson: as few as possible are late), first those of
lower priority; they and those without a target follow in order of rank. One at a time, the longest waiting of these
beyond `PATIENCE` gets a share of every step, so that none starves.

Offline work gets what is left of a step, as long as neither a token nor a prompt that is still in time comes late by
it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import accumulate
from math import inf
from typing import ClassVar

from penstock.sched.local.policy.base import Allowance
from penstock.sched.local.sequence import Sequence, WaitingQueue
from penstock.sched.steptime import StepTime

MARGIN = 0.9  # of the least slack, for errors of prediction
FLOOR = 32  # prompt tokens in a step, however little slack there is
RETHINK = 0.05  # seconds between reviews of which prompts will be late, without arrivals or ends
PATIENCE = 5.0  # in TTFT targets: how long a late prompt waits before it gets its share
PATIENT_TTFT = 2.0  # seconds; assumed for prompts without a target
SHARE = 1 / 8  # of a step's tokens, for a prompt that waited too long
WORK_TOKENS = 2048  # of a prompt in a step, for predictions of how long many prompts take: a usual budget

_OVERDUE, _KEPT, _LATE = range(3)  # in this order; the second part of a turn


@dataclass(slots=True, eq=False)
class _Prompt:
    """A prompt that may meet its deadline.

    Attributes:
        cached: its tokens in the prefix cache when it began to wait.
        ms: to read the rest of it alone, with `computed` tokens done and predicted by `times`.
    """

    sequence: Sequence
    cached: int
    ms: float = 0.0
    computed: int = -1
    times: StepTime | None = None

    def predict(self, times: StepTime) -> float:
        s = self.sequence
        if self.computed != s.computed or self.times is not times:
            self.computed, self.times = s.computed, times
            done = s.computed if s.blocks else self.cached
            self.ms = times.prefill_ms(len(s.tokens) - done, done, budget=WORK_TOKENS)
        return self.ms


class _Decodes:
    """The online sequences that decode in a step.

    Attributes:
        count: their rows.
        kv_tokens: that they read together.
        slack: the least, in seconds; a late one's is one TPOT. inf without deadlines.
        tpot: the strictest.
    """

    def __init__(self, now: float, sequences: list[Sequence]) -> None:
        self.count = sum([s.rows for s in sequences])
        kv_tokens, slack, strictest = self.count, inf, inf
        for s in sequences:
            kv_tokens += s.computed
            tpot = s.tpot
            if tpot == inf and s.first is not None:
                continue
            left = s.due - now
            if left <= 0:
                left = tpot
            slack = min(slack, left)
            strictest = min(strictest, tpot)
        self.kv_tokens, self.slack, self.tpot = kv_tokens, slack, strictest


class _Speed:
    """Prefill speed beside decodes: in steps of a usual size while slack is left, and then by what each
    TPOT pays for."""

    def __init__(self, times: StepTime, decodes: _Decodes) -> None:
        alone = times.step_ms([(WORK_TOKENS, 0)])
        beside = times.step_ms([(WORK_TOKENS, 0)], decodes.count, decodes.kv_tokens) if decodes.count else alone
        self._fast = beside / alone  # ms of time for one ms of work
        self._saved, self._slow = inf, 1.0  # work that saved slack pays for, and the same as above for all after it
        limit = MARGIN * decodes.tpot * 1e3
        if beside > limit:
            self._saved = max(0.0, decodes.slack / decodes.tpot - 1) * limit / (beside - limit) * alone
            fitting = times.largest_chunk(limit, 0, decodes.count, decodes.kv_tokens, WORK_TOKENS)
            if fitting < FLOOR:
                fitting, limit = FLOOR, times.step_ms([(FLOOR, 0)], decodes.count, decodes.kv_tokens)
            self._slow = limit / (alone * fitting / WORK_TOKENS)

    def seconds(self, work: float) -> float:
        """Until so many ms of reading are done."""
        saved = min(work, self._saved)
        return (saved * self._fast + (work - saved) * self._slow) / 1e3


class _Paid(Allowance):
    """The allowance within the slack.

    Attributes:
        limit_ms: that the step may take.
        spare_ms: by which it may be longer than the decodes and the prompts that can be in time need, so that they
            still are.
    """

    bounded: ClassVar[bool] = True

    def __init__(
        self,
        now: float,
        times: StepTime,
        decoding: list[Sequence],
        decodes: _Decodes,
        *,
        limit_ms: float,
        spare_ms: float,
        held: list[Sequence],
        favoured: tuple[Sequence | None, int],
    ) -> None:
        super().__init__(decoding)
        self._now, self._times, self._limit, self._spare, self._held = now, times, limit_ms, spare_ms, held
        self._rows, self._kv = decodes.count, decodes.kv_tokens  # decodes in the step
        self._favoured, self._share = favoured
        self._prefills: list[tuple[int, int]] = []
        self._kept: list[tuple[int, int]] = []  # of those, what is read to be in time
        self._spare_at_end = inf  # ms that the step may take for those of them that end with it
        self._tokens = 0  # of all
        self._attention = 0.0  # ms that they take besides what as many decoding rows would

    def chunk(self, sequence: Sequence, cached: int, most: int) -> int:
        if sequence is self._favoured:
            most = min(most, self._share)
        if self._limit == inf:
            return most
        # to all but attention a token is a token, so those already granted count as rows that decode
        rows, limit = self._rows + self._tokens, self._limit - self._attention
        fitting = self._times.largest_chunk(limit, cached, rows, self._kv, most)
        return fitting if sequence.offline else min(most, max(fitting, FLOOR - self._tokens))

    def granted(self, sequence: Sequence, cached: int, tokens: int) -> None:
        self._prefills.append((tokens, cached))
        if sequence.turn[1] == _KEPT and not sequence.offline:
            self._kept.append((tokens, cached))
            if cached + tokens == len(sequence.tokens):
                self._spare_at_end = min(self._spare_at_end, MARGIN * (sequence.due - self._now) * 1e3)
        self._tokens += tokens
        if self._limit < inf:
            self._attend()

    def _attend(self) -> None:
        rows = self._rows + self._tokens
        self._attention = self._times.step_ms(self._prefills, self._rows, self._kv, rows) - self._times.step_ms(
            [], rows, self._kv, rows
        )

    def held_back(self) -> Iterable[Sequence]:
        """From now on the step's limit is that of offline work."""
        if self._spare < inf:
            # other prompts of this step delay them too, and are counted first
            counted = self._times.step_ms(self._kept, self._rows, self._kv) if self._rows or self._kept else 0.0
            self._limit = min(self._limit, counted + self._spare, self._spare_at_end)
            self._attend()
        if self._limit == inf:
            return self._held
        kv = [self._kv, *accumulate((s.computed + 1 for s in self._held), initial=self._kv)][1:]
        low, high = 0, len(self._held)
        while low < high:
            middle = (low + high + 1) // 2
            if self._times.step_ms(self._prefills, self._rows + middle, kv[middle]) <= self._limit:
                low = middle
            else:
                high = middle - 1
        self._rows, self._kv = self._rows + low, kv[low]
        return self._held[:low]


class Slack:
    """
    Args:
        times: predicts steps; None without a model: then first come, first served.
        most: tokens of a step at most.
    """

    def __init__(self, times: StepTime | None, most: int) -> None:
        self._times = times
        self._share = max(FLOOR, int(most * SHARE))
        self._targeted = self._offline = 0  # sequences that are here
        self.steady = True
        self._hopeful: dict[Sequence, _Prompt] = {}
        self._late: dict[Sequence, float] = {}  # -> when its patience ends
        self._favoured: Sequence | None = None
        self._review_at = self._favour_at = -inf
        self._spare = inf

    def predict_by(self, times: StepTime) -> None:
        self._times = times

    def join(self, sequence: Sequence) -> None:
        self._count(sequence, 1)

    def leave(self, sequence: Sequence) -> None:
        self._count(sequence, -1)
        self._late.pop(sequence, None)
        if self._hopeful.pop(sequence, None) is not None:
            self._review_at = -inf
        if sequence is self._favoured:
            self._favoured = None

    def _count(self, sequence: Sequence, change: int) -> None:
        self._targeted += change * sequence.targeted
        self._offline += change * sequence.offline
        self.steady = not (self._targeted and self._offline)

    def wait(self, sequence: Sequence, cached: Callable[[Sequence], int]) -> None:
        if sequence is self._favoured:
            return  # it keeps its turn
        if self._times is not None and not sequence.offline and sequence.due < inf:
            self._hopeful[sequence] = _Prompt(sequence, cached(sequence))
            self._review_at = -inf
            sequence.turn = _turn(sequence, _KEPT)
        else:
            sequence.turn = self._give_up(sequence)

    def begin(
        self,
        now: float,
        delay: Callable[[], float],
        decoding: list[Sequence],
        prefilling: list[Sequence],
        queue: WaitingQueue,
    ) -> Allowance:
        times = self._times
        if times is None or not self._targeted or not (prefilling or queue or self._offline):
            return Allowance(decoding)
        now += delay()
        held: list[Sequence] = []
        if self._offline:
            held = [s for s in decoding if s.offline]
            decoding = [s for s in decoding if not s.offline]
        decodes = _Decodes(now, decoding)
        if self._hopeful and (self._offline or now >= self._review_at):
            self._review(now, times, decodes, queue)
        self._favour(now, queue)
        return _Paid(
            now,
            times,
            decoding,
            decodes,
            limit_ms=MARGIN * decodes.slack * 1e3,
            spare_ms=MARGIN * self._spare * 1e3 if self._hopeful else inf,
            held=held,
            favoured=(self._favoured, self._share) if self._hopeful else (None, 0),
        )

    # --- which prompts meet their deadlines

    def _review(self, now: float, times: StepTime, decodes: _Decodes, queue: WaitingQueue) -> None:
        """Put late prompts behind the others."""
        self._review_at = now + RETHINK
        for sequence in [s for s in self._hopeful if _is_prefilled(s)]:
            del self._hopeful[sequence]
        speed = _Speed(times, decodes)
        work = 0.0
        kept: list[tuple[int, float, int, _Prompt]] = []
        for prompt in sorted(self._hopeful.values(), key=_urgency):
            s, ms = prompt.sequence, prompt.predict(times)
            work += ms
            heappush(kept, (-s.request.priority, -ms, s.rank[2], prompt))
            while kept and now + speed.seconds(work) > s.due:
                work += heappop(kept)[1]
        self._spare = inf
        in_time, work = {prompt for *_, prompt in kept}, 0.0
        for prompt in sorted(self._hopeful.values(), key=_urgency):
            s = prompt.sequence
            if prompt in in_time:
                work += prompt.ms
                self._spare = min(self._spare, s.due - now - speed.seconds(work))
                if s.turn[1] == _LATE:
                    self._late.pop(s, None)
                    queue.move(s, _turn(s, _KEPT))
                continue
            if s.turn[1] == _KEPT:
                queue.move(s, self._give_up(s))
            if now + prompt.ms / 1e3 > s.due:  # not even alone
                del self._hopeful[s]

    def _give_up(self, sequence: Sequence) -> tuple[float, ...]:
        """The turn of a late prompt. Offline work may wait without bound."""
        if not sequence.offline:
            ttft = PATIENT_TTFT if sequence.ttft == inf else sequence.ttft
            self._late[sequence] = sequence.arrived + PATIENCE * ttft
        return _turn(sequence, _LATE)

    def _favour(self, now: float, queue: WaitingQueue) -> None:
        """One at a time."""
        if self._favoured is not None and _is_prefilled(self._favoured):
            self._favoured = None
        if self._favoured is not None or now < self._favour_at:
            return
        self._favour_at = now + RETHINK
        for sequence in [s for s in self._late if _is_prefilled(s)]:
            del self._late[sequence]
        longest = min(self._late, key=self._late.__getitem__, default=None)
        if longest is not None and self._late[longest] <= now:
            self._favoured = longest
            self._hopeful.pop(longest, None)
            queue.move(longest, _turn(longest, _OVERDUE))


def _is_prefilled(sequence: Sequence) -> bool:
    return bool(sequence.blocks) and sequence.pending == 1


def _urgency(prompt: _Prompt) -> tuple[float, int]:
    return prompt.sequence.due, prompt.sequence.rank[2]


def _turn(sequence: Sequence, kind: int) -> tuple[float, ...]:
    offline, priority, number = sequence.rank
    return offline, kind, sequence.due if kind == _KEPT else 0.0, priority, number
