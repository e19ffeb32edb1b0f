"""The default policy: steps no longer than streams allow, and prompts in the order in which most of them are in time.

A step may be as long as the tightest TPOT among its decodes, or the least slack: a token is due at
`first + tpot * generated`. A sequence that is late already counts as if it had one TPOT for every step: it falls no
further behind (`base.Decodes`).

Prompts with a TTFT target are prefilled in the order of their deadlines, as far as these can be kept. Where they cannot
all be, the longest are put behind the others until the rest can (Moore and Hodgson: as few as possible are late), first
those of lower priority. They and prompts without a target follow, in order of priority, and then the one with the least
work left first: the least mean time to first token. Streams that were preempted come before prompts.

So that nothing starves, one prompt at a time is favoured: the longest waiting of those beyond their `PATIENCE`. It gets
at least `SHARE` of the time that steps have for prompts, of each, or all but such a share of every third. So whatever
comes after it, a prompt waits for at most its PATIENCE and then 1 / SHARE times its own prefill, after those that
waited longer. The rest of every step is for others; what these leave is for the favoured one again, unless one of them
ends with the step, and so has its first token.

Offline work gets what is left of a step, as long as neither a token nor a prompt that is still in time comes late by
it; and none in a step in which a prompt is prefilled that is late or has no deadline. Where that is too little for all
offline sequences that decode, those go on that cost the least of it, and the oldest.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import accumulate
from math import inf
from operator import attrgetter

from penstock.sched.local.policy.base import Allowance, Decodes, StepLimit
from penstock.sched.local.sequence import Sequence, WaitingQueue
from penstock.sched.steptime import StepTime

RETHINK = 0.05  # seconds between reviews of which prompts will be late, without arrivals or ends
PATIENCE = 5.0  # in TTFT targets: how long a late prompt waits before it is favoured
PATIENT_TTFT = 2.0  # seconds; assumed for prompts without a target
SHARE = 1 / 4  # of a step's time for prompts, for the favoured one
LEAST_TOKENS = 64  # in a share: a chunk reads all KV before it, however few it has
WORK_TOKENS = 2048  # of a prompt in a step, for predictions of how long many prompts take: a usual budget

_context, _rank = attrgetter("computed"), attrgetter("rank")
_FAVOURED, _KEPT, _LATE = range(3)  # in this order; the second part of a turn


@dataclass(slots=True, eq=False)
class _Prompt:
    """A prompt that is not prefilled.

    Attributes:
        cached: its tokens in the prefix cache when it began to wait.
        ms: to prefill the rest of it alone, with `computed` tokens done and predicted by `times`.
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


def _prefill_speed(times: StepTime, decodes: Decodes, limit_ms: float) -> float:
    """Seconds of time for one ms of prefill work, beside decodes in steps of limited time."""
    work = times.step_ms([(WORK_TOKENS, 0)])
    taken = times.step_ms([(WORK_TOKENS, 0)], decodes.count, decodes.kv_tokens)
    if taken > limit_ms:
        fitting = max(1, times.largest_chunk(limit_ms, 0, decodes.count, decodes.kv_tokens, WORK_TOKENS))
        taken = times.step_ms([(fitting, 0)], decodes.count, decodes.kv_tokens) * WORK_TOKENS / fitting
    return taken / work / 1e3


class _Paid(Allowance):
    """The allowance within the limit.

    Attributes:
        spare_ms: by which the step may be longer than the decodes and the prompts that can be in time need, so that
            they still are.
        held: offline decodes; None where offline work is like any other, as nothing has a target.
        turn: whether the favoured prompt has all but a share of the step, where a share of each would hold next to
                nothing.
    """

    def __init__(
        self,
        now: float,
        decoding: list[Sequence],
        times: StepTime,
        decodes: Decodes,
        *,
        limit_ms: float,
        spare_ms: float,
        held: list[Sequence] | None,
        favoured: Sequence | None,
        turn: bool,
    ) -> None:
        super().__init__(decoding, times, decodes, limit_ms)
        self._now, self._spare, self._held = now, spare_ms, held
        self.favoured, self._turn = favoured, turn
        begin = times.step_ms((), decodes.count, decodes.kv_tokens) if decodes.count else 0.0
        most = self.prompts_ms - begin
        self._favoured_ms, self._turn_ms = begin + SHARE * most, begin + (1 - SHARE) * most
        self._kept: list[tuple[int, int]] = []  # of `prefills`, what is prefilled to be in time
        self._spare_at_end = inf  # ms that the step may take for those of them that end with it

    def chunk(self, sequence: Sequence, cached: int, most: int) -> int:
        if sequence is self.favoured:
            share = self.fitting(cached, most, self._favoured_ms)
            if share >= min(most, LEAST_TOKENS):
                return share
            return max(1, self.fitting(cached, most, self._turn_ms)) if self._turn else int(not sequence.blocks)
        if sequence.offline and self._held is not None and not self.pressing:
            return self.fitting(cached, most, self.limit_ms)
        return super().chunk(sequence, cached, most)

    def granted(self, sequence: Sequence, cached: int, tokens: int) -> None:
        super().granted(sequence, cached, tokens)
        if sequence.turn[1] == _KEPT and not sequence.offline:
            self._kept.append((tokens, cached))
            if cached + tokens == len(sequence.tokens):
                self._spare_at_end = min(self._spare_at_end, self.times.margin * (sequence.due - self._now) * 1e3)
                self.prompts_ms = min(self.prompts_ms, self._spare_at_end)  # what comes behind it does not make it late

    def presses(self, sequence: Sequence) -> bool:
        return super().presses(sequence) and sequence.turn[1] != _KEPT  # of which `_spare` tells how long it may take

    def held_back(self) -> Iterable[Sequence]:
        """From now on the step's limit is that of offline work."""
        if self._held is None:
            return ()
        if self._spare < inf:
            # other prompts of this step delay them too, and are counted first
            counted = self.times.step_ms(self._kept, self.rows, self.kv_tokens) if self.rows or self._kept else 0.0
            self.limit_ms = min(self.limit_ms, counted + self._spare, self._spare_at_end)
        order = self._order(self._held)
        rows = list(accumulate(s.rows for s in order))
        kv = list(accumulate(s.computed + s.rows for s in order))
        count = bisect_right(range(len(order)), self.limit_ms, key=lambda last: self._step_ms(rows[last], kv[last]))
        if count:
            self.rows, self.kv_tokens = self.rows + rows[count - 1], self.kv_tokens + kv[count - 1]
        return order[:count]

    def _order(self, held: list[Sequence]) -> list[Sequence]:
        """In which offline decodes join a step, as far as it has time: the oldest if it has any for that one, so that
        it comes to an end whatever its length, and then those with the shortest contexts.

        As long as memory is the bound of a step's rows, one more costs what reading its KV does (xLLM, 3.1). Once
        arithmetic is, every row costs the same beside that, as the parts of a step run one after the other: so the
        shortest contexts make most of what is left of it in either case.
        """
        if (
            not held
            or self._step_ms(sum(s.rows for s in held), sum(s.computed + s.rows for s in held)) <= self.limit_ms
        ):
            return held
        order, oldest = sorted(held, key=_context), min(held, key=_rank)
        if self._step_ms(oldest.rows, oldest.computed + oldest.rows) <= self.limit_ms:
            order.remove(oldest)
            order.insert(0, oldest)
        return order

    def _step_ms(self, rows: int, kv_tokens: int) -> float:
        """Of the step, with so much more that decodes."""
        return self.times.step_ms(self.prefills, self.rows + rows, self.kv_tokens + kv_tokens)


class Slack:
    """
    Args:
        times: predicts steps; None without a model: then first come, first served.
        limit: of a step's time.
    """

    def __init__(self, times: StepTime | None = None, limit: StepLimit | None = None) -> None:
        self._times, self._limit = times, limit or StepLimit.asked(None)
        self._steps = 0
        self._targeted = self._offline = 0  # sequences that are here
        self.steady = True
        self._prompts: dict[Sequence, _Prompt] = {}  # all online ones that wait or are prefilled
        self._hopeful: dict[Sequence, _Prompt] = {}  # those that may meet their deadline
        self._patience: dict[Sequence, float] = {}  # of late ones and those without a deadline -> when it ends
        self._favoured: Sequence | None = None
        self._review_at = self._favour_at = -inf
        self._spare = inf

    def predict_by(self, times: StepTime) -> None:
        self._times = times

    def join(self, sequence: Sequence) -> None:
        self._count(sequence, 1)

    def leave(self, sequence: Sequence) -> None:
        self._count(sequence, -1)
        self._prompts.pop(sequence, None)
        self._patience.pop(sequence, None)
        if self._hopeful.pop(sequence, None) is not None:
            self._review_at = -inf
        if sequence is self._favoured:
            self._favoured = None

    def _count(self, sequence: Sequence, change: int) -> None:
        self._targeted += change * sequence.targeted
        self._offline += change * sequence.offline
        self.steady = not (self._targeted and self._offline)

    def wait(self, sequence: Sequence, cached: Callable[[Sequence], int]) -> None:
        if self._times is None or sequence.offline:
            sequence.turn = _turn(sequence, _LATE)
            return
        prompt = self._prompts[sequence] = _Prompt(sequence, cached(sequence))
        if sequence is self._favoured:
            return  # it keeps its turn
        if sequence.due < inf:
            self._hopeful[sequence] = prompt
            self._review_at = -inf
            sequence.turn = _turn(sequence, _KEPT)
        else:
            sequence.turn = self._give_up(prompt, self._times)

    def order(self, sequence: Sequence) -> str:
        kind = sequence.turn[1]
        if self._times is None or sequence.offline:
            return "in order of arrival"
        if kind == _KEPT:
            return "by its deadline"
        if kind == _FAVOURED:
            return "favoured, as it had waited longest"
        missed = "" if sequence.ttft == inf else "its deadline could not be kept: "
        return f"{missed}after those that could be in time, the least work first"

    def begin(
        self,
        now: float,
        delay: Callable[[], float],
        decoding: list[Sequence],
        prefilling: list[Sequence],
        queue: WaitingQueue,
    ) -> Allowance:
        times = self._times
        if times is None:
            return Allowance(decoding)
        now += delay()
        self._steps += 1
        held = None
        if self._offline and self._targeted:
            held = [s for s in decoding if s.offline]
            decoding = [s for s in decoding if not s.offline]
        decodes = Decodes(now, decoding)
        limit_ms = min(decodes.limit_ms(times, self._limit), decodes.target_ms(times))
        for s in prefilling:
            if s.turn[1] == _LATE and not s.offline:
                s.turn = _turn(s, _LATE, self._ms(s, times))
        self._favour(now, queue)
        if self._hopeful and (held is not None or now >= self._review_at):
            self._review(now, times, _prefill_speed(times, decodes, limit_ms), queue)
        return _Paid(
            now,
            decoding,
            times,
            decodes,
            limit_ms=limit_ms,
            spare_ms=times.margin * self._spare * 1e3 if self._hopeful else inf,
            held=held,
            favoured=self._favoured,
            turn=self._steps % round((1 - SHARE) / SHARE) == 0,
        )

    # --- which prompts meet their deadlines

    def _review(self, now: float, times: StepTime, speed: float, queue: WaitingQueue) -> None:
        """Put late prompts behind the others."""
        self._review_at = now + RETHINK
        for sequence in [s for s in self._hopeful if _is_prefilled(s)]:
            del self._hopeful[sequence]
        if self._favoured is not None:
            speed /= 1 - SHARE
        work = 0.0
        kept: list[tuple[int, float, int, _Prompt]] = []
        for prompt in sorted(self._hopeful.values(), key=_urgency):
            s, ms = prompt.sequence, prompt.predict(times)
            work += ms
            heappush(kept, (-s.request.priority, -ms, s.rank[2], prompt))
            while kept and now + speed * work > s.due:
                work += heappop(kept)[1]
        self._spare = inf
        in_time, work = {prompt for *_, prompt in kept}, 0.0
        for prompt in sorted(self._hopeful.values(), key=_urgency):
            s = prompt.sequence
            if prompt in in_time:
                work += prompt.ms
                self._spare = min(self._spare, s.due - now - speed * work)
                if s.turn[1] == _LATE:
                    self._patience.pop(s, None)
                    queue.move(s, _turn(s, _KEPT))
                continue
            if s.turn[1] == _KEPT:
                queue.move(s, self._give_up(prompt, times))
            if now + prompt.ms / 1e3 > s.due:  # not even alone
                del self._hopeful[s]

    def _give_up(self, prompt: _Prompt, times: StepTime) -> tuple[float, ...]:
        """The turn of a prompt that is late, or has no deadline."""
        s = prompt.sequence
        self._patience[s] = s.arrived + PATIENCE * (PATIENT_TTFT if s.ttft == inf else s.ttft)
        return _turn(s, _LATE, prompt.predict(times))

    # --- nothing starves

    def _favour(self, now: float, queue: WaitingQueue) -> None:
        """One at a time."""
        if self._favoured is not None and _is_prefilled(self._favoured):
            self._favoured = None
        if self._favoured is not None or now < self._favour_at:
            return
        self._favour_at = now + RETHINK
        for sequence in [s for s in self._prompts if _is_prefilled(s)]:
            del self._prompts[sequence]
            self._patience.pop(sequence, None)
        longest = min(self._patience, key=self._patience.__getitem__, default=None)
        if longest is not None and self._patience[longest] <= now:
            self._favoured = longest
            self._hopeful.pop(longest, None)
            queue.move(longest, _turn(longest, _FAVOURED))

    def _ms(self, sequence: Sequence, times: StepTime) -> float:
        """Of work that is left of a prompt."""
        if sequence not in self._prompts:  # it came before there was a step-time model
            self._prompts[sequence] = _Prompt(sequence, 0)
        return self._prompts[sequence].predict(times)


def _is_prefilled(sequence: Sequence) -> bool:
    return bool(sequence.blocks) and sequence.pending == 1


def _urgency(prompt: _Prompt) -> tuple[float, int]:
    return prompt.sequence.due, prompt.sequence.rank[2]


def _turn(sequence: Sequence, kind: int, ms: float = 0.0) -> tuple[float, ...]:
    """
    Args:
        ms: of work that is left, for late ones.
    """
    offline, priority, number = sequence.rank
    if kind == _LATE:
        return offline, kind, priority, 0.0 if sequence.generated else ms, number
    return offline, kind, sequence.due if kind == _KEPT else 0.0, priority, number
