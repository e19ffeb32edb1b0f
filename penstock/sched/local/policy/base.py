"""The interface of local policies: the order of prompts, and the share of a step for prompts and for offline work.

Every step the scheduler asks once for an `Allowance` and fills the step by it: the allowance's decoding sequences get
their one token; then online prompts, running and waiting alike, get chunks in the order of their `turn`; then what the
allowance has held back; then offline prompts. What a local policy decides changes when a token is sampled, never which.

A step with prompts has a time limit, whatever the policy (`StepLimit`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import inf
from typing import Protocol

from penstock.sched.local.sequence import Sequence, WaitingQueue
from penstock.sched.steptime import StepTime

LEAST = 1.25  # times what the decodes of a step take alone: with prompts it may take that, however tight targets are


LIMIT_MS = 100.0  # that a step may take, for streams that go on beside prompts
CPU_LIMIT_MS = 500.0  # on a CPU, which in 100 ms computes so few prompt tokens that prefill is a tenth slower
STRETCH, LEAST_STRETCH = 3.0, 1.5  # times what decodes take alone, that a step may take for prompts beside them


@dataclass(frozen=True, slots=True)
class StepLimit:
    """How long a step with prompts may take, in ms, where no stream's target says less.

    Attributes:
        least, most: between these it is STRETCH times what the step's decodes take alone, so that streams which can be
            fast are slowed down by no more than that; `most` where nothing decodes. LEAST_STRETCH on a device for which
            even `most` is too little.
    """

    least: float
    most: float

    @staticmethod
    def asked(ms: float | None, *, cpu: bool = False) -> StepLimit:
        """As the user asked for it; None is the default."""
        if ms is not None:
            return StepLimit(ms, ms)
        return StepLimit(LIMIT_MS, CPU_LIMIT_MS if cpu else LIMIT_MS)

    def slowed(self, factor: float) -> StepLimit:
        """On a device whose times are so many times as long."""
        return StepLimit(self.least * factor, self.most * factor)

    def beside(self, alone: float) -> float:
        """With decodes that take so long alone."""
        return max(min(max(self.least, STRETCH * alone), self.most), LEAST_STRETCH * alone)

    def without(self, alone: float) -> float:
        """With no decodes; a single row takes so long alone."""
        return max(self.most, STRETCH * alone)


class Decodes:
    """The sequences that decode in a step. Offline ones have no targets.

    Attributes:
        count: their rows.
        kv_tokens: that they read together.
        tpot: the tightest target, in seconds; inf without.
        slack: the least time until a token is due, in seconds; inf without deadlines. A token that is late already
            counts as if it had one TPOT.
    """

    def __init__(self, now: float, sequences: Iterable[Sequence]) -> None:
        count, kv_tokens, slack, tightest = 0, 0, inf, inf
        for s in sequences:
            count += s.rows
            kv_tokens += s.computed + s.rows
            tpot = s.tpot
            if s.offline or (tpot == inf and s.first is not None):
                continue
            left = s.due - now
            if left <= 0:
                left = tpot
            slack = min(slack, left)
            tightest = min(tightest, tpot)
        self.count, self.kv_tokens, self.slack, self.tpot = count, kv_tokens, slack, tightest

    def limit_ms(self, times: StepTime, limit: StepLimit) -> float:
        """What a step with these and prompts may take, whatever their targets."""
        alone = times.step_ms((), max(1, self.count), self.kv_tokens)
        return times.margin * (limit.beside(alone) if self.count else limit.without(alone))

    def target_ms(self, times: StepTime) -> float:
        """What it may take for their targets: the tightest TPOT or the least slack; inf without any."""
        return times.margin * 1e3 * min(self.tpot, self.slack)


class Allowance:
    """What one step may hold: a time, beyond what the token budget allows.

    Args:
        times: None without a step-time model; then all that the token budget holds.
        limit_ms: that the step may take.

    Attributes:
        prompts_ms: that it may take for prompts.
        pressing: an online prompt is in it that is to take no longer for offline ones.
        decoding: sequences that get their next token in any case, in this order.
        favoured: a prompt that gets a share of the step before all others, and what these leave of it.
        bounded: whether it may be less than the token budget, and everything offline comes after everything online;
            else `chunk`, `granted` and `held_back` need not be called.
    """

    def __init__(
        self,
        decoding: list[Sequence],
        times: StepTime | None = None,
        decodes: Decodes | None = None,
        limit_ms: float = inf,
    ) -> None:
        self.decoding = decoding
        self.favoured: Sequence | None = None
        self.bounded = times is not None
        if times is None:
            return
        assert decodes is not None
        self.times, self.limit_ms = times, limit_ms
        self.rows, self.kv_tokens = decodes.count, decodes.kv_tokens  # decodes in the step
        self.prompts_ms = max(limit_ms, LEAST * times.step_ms((), max(1, self.rows), self.kv_tokens))
        self.prefills: list[tuple[int, int]] = []
        self.pressing = False
        self._tokens = 0  # of all
        self._others = self._ends = False  # whether another than the favoured one has a token, and its last
        self._more_ms = 0.0  # that they take beyond what as many decoding rows would: attention, less the logits

    def chunk(self, sequence: Sequence, cached: int, most: int) -> int:
        """How many of the next `most` tokens of a prompt to compute, after `cached` ones; possibly 0."""
        if sequence.offline and self.pressing:
            return 0
        return self.fitting(cached, most, self.prompts_ms) or int(not self._others)

    def fitting(self, cached: int, most: int, limit_ms: float) -> int:
        """How many keep the step within a limit."""
        # those already granted count as rows that decode, corrected by the difference
        rows = self.rows + self._tokens
        return self.times.largest_chunk(limit_ms - self._more_ms, cached, rows, self.kv_tokens, most)

    def granted(self, sequence: Sequence, cached: int, tokens: int) -> None:
        """These tokens are granted."""
        self._count((tokens, cached), 1)
        if sequence is not self.favoured:
            self._others = True
            self._ends |= cached + tokens == len(sequence.tokens)
        self.pressing |= self.presses(sequence)

    def presses(self, sequence: Sequence) -> bool:
        """Whether its prompt is to take no longer for offline ones."""
        return not sequence.offline and sequence.first is None

    def lengthened(self, cached: int, tokens: int, most: int) -> int:
        """How many of its next tokens the favoured one may get instead of `tokens`, now that others have theirs; one
        at least where none has any. No more where one of these ends with the step: its first token waits for all of
        it."""
        if self._ends:
            return tokens
        if tokens:
            self._count((tokens, cached), -1)
        least = min(most, int(not self._others))
        longer = max(tokens, least, self.fitting(cached, most, self.prompts_ms))
        if longer:
            self._count((longer, cached), 1)
        return longer

    def _count(self, prefill: tuple[int, int], sign: int) -> None:
        """One more of `prefills`, or one less."""
        if sign > 0:
            self.prefills.append(prefill)
        else:
            self.prefills.remove(prefill)
        self._tokens += sign * prefill[0]
        together = self.times.step_ms(self.prefills, self.rows, self.kv_tokens)
        self._more_ms = together - self.times.step_ms((), self.rows + self._tokens, self.kv_tokens)

    def held_back(self) -> Iterable[Sequence]:
        """Offline decodes that may have their token now, as all that is online has what it can have in this step."""
        return ()


class LocalPolicy(Protocol):
    """One per scheduler. It may remember, and sees time only as `now`, in seconds of the engine's clock."""

    steady: bool  # a step in which all decode, and nothing waits, may hold all of them: then `begin` is not called

    def predict_by(self, times: StepTime) -> None:
        """Use this step-time model from now on."""
        ...

    def join(self, sequence: Sequence) -> None:
        """A sequence was added."""
        ...

    def leave(self, sequence: Sequence) -> None:
        """A sequence was removed."""
        ...

    def wait(self, sequence: Sequence, cached: Callable[[Sequence], int]) -> None:
        """It will wait, for the first time or once more: give it its turn.

        Args:
            cached: tells how many of its tokens are in the prefix cache now.
        """
        ...

    def order(self, sequence: Sequence) -> str:
        """Why its turn was when it was, in words for a person."""
        ...

    def begin(
        self,
        now: float,
        delay: Callable[[], float],
        decoding: list[Sequence],
        prefilling: list[Sequence],
        queue: WaitingQueue,
    ) -> Allowance:
        """A step is filled. Turns may be changed now, through the queue.

        Args:
            delay: tells how many seconds it will be until the step begins.
            decoding: running sequences that lack one token.
            prefilling: those that lack more.
            queue: those that wait.
        """
        ...
