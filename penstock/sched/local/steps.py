"""The steps of one engine: the one that is made, those in flight, and what was measured of those that have ended.

Steps in flight let the next one be scheduled while one still runs (xLLM, section 4.1):

    plan = schedule(); launch(plan)               the runner has it
    look_ahead(); then = schedule(); launch(then)    while the runner computes `plan`
    outputs = update(plan, result)                while the runner computes `then`; and again from `look_ahead`

`look_ahead` counts the step in flight as done, as far as that is known without its tokens: what is computed, which
sequences get a token, and which reach their greatest length. A token that is still to be sampled stands in its sequence
as a placeholder, a negative number that says which of the step's samples it will be; the runner puts the real one in
its place. `update` takes all that back and records what has really been. So the scheduler has a single state, and
schedules ahead by the same rules.

Where a model is computed in stages, as many steps are in flight as there are stages. Of a prompt one step after the
other is on its way through them; a sequence of which a token is to be sampled is in no other step until that is there.

A sequence that a stop token ends, or that is cancelled, is still in the step after that, whose result for it is
dropped: one token at most.

Blocks are safe without any order between threads: what a step in flight reads or writes stays held until it has landed,
also when its sequence has freed it. Only then it may get another owner, be it a later step, a
block that arrives from another instance, or another process. Preemption, which needs blocks at once, is held back until
nothing is in flight, and nothing is scheduled ahead meanwhile.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from math import inf
from operator import sub
from typing import TYPE_CHECKING

from penstock.core.device import DeviceModel, ModelShape
from penstock.core.plan import Encode, SequenceStep, StepPlan, TailCopy
from penstock.core.request import Timing, TokenOutput
from penstock.sched.local.sequence import Sequence
from penstock.sched.steptime import StepTime

if TYPE_CHECKING:
    from penstock.sched.factors import FactorLearner

WEIGHT = 0.1  # of the newest value in a mean
LEARN_EVERY = 0.05  # seconds between two steps that are compared with predictions, which costs time
PACE_EVERY = 7  # steps, of which the time of one is compared with what it would be without factors
CHECK_EVERY = 0.5  # the same once they are right


class StepBuilder:
    """Builds a step's plan.

    Attributes:
        budget: tokens that are left.
        grants: positions that each sequence goes on by.
        fresh: blocks that each was given.
        short: a running sequence had to give up its blocks.
        drafts: behind the next token of each, that may be right.
        prompt_tokens: of what it was filled with.
        encodes: see `StepPlan`.

    Args:
        offline: tokens of prompts in it, where nothing in it is online; None where nothing bounds them.
    """

    def __init__(self, budget: int, offline: int | None = None) -> None:
        self.budget = budget
        self._offline = offline
        self.grants: dict[Sequence, int] = {}
        self.fresh: dict[Sequence, list[int]] = {}
        self.short = False
        self.drafts: dict[Sequence, list[int]] = {}
        self.prompt_tokens = 0
        self.encodes: list[Encode] = []

    @property
    def empty(self) -> bool:
        return not (self.grants or self.encodes)

    def forget(self, sequence: Sequence) -> None:
        """Remove a sequence from the step; call it before preempting it."""
        if count := self.grants.pop(sequence, 0):
            self.budget += sequence.cost(count)
        self.fresh.pop(sequence, None)

    def left_for(self, sequence: Sequence) -> int:
        """Tokens that a prompt may have of those that are left, where everything online has what it gets."""
        if self._offline is None or not sequence.offline or not all_offline(self.grants):
            return self.budget
        return min(self.budget, self._offline - sum([count for count in self.grants.values() if count > 1]))

    def plan(self, released: list[str], copies: tuple[TailCopy, ...], forgotten: tuple[bytes, ...]) -> StepPlan:
        """
        Args:
            released, copies, forgotten: see `StepPlan`.
        """
        drafts = self.drafts
        return StepPlan(
            tuple([s.step(count, drafts.get(s, ())) for s, count in self.grants.items()]),
            tuple([block for blocks in self.fresh.values() for block in blocks]),
            tuple(released),
            copies,
            encodes=tuple(self.encodes),
            forgotten=forgotten,
        )


@dataclass(slots=True, eq=False)
class InFlightStep:
    """A step that a runner has.

    Attributes:
        sequences: that it computes, those without that have let go of their blocks meanwhile.
        counted: its outcome is counted ahead, as far as it is known.
        kept: blocks that were let go of and that it may touch, to be released when it has landed.
        offline: all its sequences are.
    """

    plan: StepPlan
    sequences: dict[str, Sequence]
    counted: bool = False
    kept: list[list[int]] = field(default_factory=list)
    offline: bool = False


class InFlightSteps:
    """The steps of one scheduler that were launched and not updated, in order.

    Args:
        stages: of the pipeline that computes them.

    Attributes:
        most: steps in flight: one for each stage, or one that runs and one that begins as soon as that has ended.
        ending: sequences that a step counted ahead brings to their greatest length, or to where they migrate; with
            stages, all of which it samples a token. They hold their blocks, and run no further until it has landed.
    """

    def __init__(self, stages: int = 1) -> None:
        self.stages, self.most = stages, max(2, stages)
        self.ending: dict[str, Sequence] = {}
        self._in_flight: list[InFlightStep] = []
        self._wanted = False

    def __len__(self) -> int:
        return len(self._in_flight)

    def launch(self, plan: StepPlan, sequences: Mapping[str, Sequence]) -> bool:
        """Returns whether all its sequences are offline."""
        assert len(self._in_flight) < self.most
        if not self._in_flight:
            self._wanted = False  # a preemption that waited could have run
        flight = InFlightStep(plan, {s.request_id: sequences[s.request_id] for s in plan.sequences})
        flight.offline = not plan.encodes and all_offline(flight.sequences.values())
        self._in_flight.append(flight)
        return flight.offline

    def look_ahead(self, running: list[Sequence], longest: int) -> bool:
        """Count the steps in flight as done; sequences that end by them leave `running`. False when nothing may be
        scheduled before one is.

        Args:
            longest: tokens of a sequence at most.
        """
        if not 0 < len(self._in_flight) < self.most or self.held_back:
            return False
        return all(flight.counted or self._count(flight, running, longest) for flight in self._in_flight)

    def _count(self, flight: InFlightStep, running: list[Sequence], longest: int) -> bool:
        """Whether its outcome is known well enough; then it is counted."""
        here = flight.sequences
        for step in flight.plan.sequences if self.stages == 1 else ():
            if step.sample > 1 or step.candidates:
                return False  # how far it goes on is not known, or which beams do
        flight.counted = True
        row = 0
        for step in flight.plan.sequences:
            if (sequence := here.get(step.request_id)) is not None:
                if self.stages == 1:
                    self._count_ahead(sequence, step, row, running, longest)
                elif step.sample or step.candidates or step.start + len(step.tokens) == len(sequence.tokens):
                    running.remove(sequence)
                    self.ending[sequence.id] = sequence
                else:
                    sequence.in_flight += len(step.tokens)
                    sequence.computed += len(step.tokens)
            row += step.sample
        return True

    def _count_ahead(
        self, sequence: Sequence, step: SequenceStep, row: int, running: list[Sequence], longest: int
    ) -> None:
        sequence.in_flight = len(step.tokens)
        sequence.computed += sequence.in_flight
        if step.sample:
            sequence.tokens.append(placeholder(row))
        elif sequence.pooling is None or sequence.pending:
            return
        over = sequence.generated >= sequence.request.max_tokens or len(sequence.tokens) >= longest
        if over or sequence.migrates:
            running.remove(sequence)
            self.ending[sequence.id] = sequence

    def land(self, plan: StepPlan, running: list[Sequence]) -> InFlightStep | None:
        """A step has ended: undo its look-ahead. None when it was not launched."""
        if not self._in_flight:
            return None
        for flight in self._in_flight:
            if flight.counted:
                self._undo(flight, running)
        flight = self._in_flight.pop(0)
        assert flight.plan is plan, "steps end in the order in which they were launched"
        return flight

    def _undo(self, flight: InFlightStep, running: list[Sequence]) -> None:
        flight.counted = False
        for sequence in flight.sequences.values():
            sequence.computed -= sequence.in_flight
            sequence.in_flight = 0
            if sequence.tokens[-1] < 0:
                sequence.tokens.pop()
            if self.ending.pop(sequence.id, None) is not None:
                running.append(sequence)

    def of(self, sequence: Sequence) -> InFlightStep | None:
        """The last one that computes a sequence."""
        for flight in reversed(self._in_flight):
            if flight.sequences.get(sequence.id) is sequence:
                return flight
        return None

    def keep(self, sequence: Sequence) -> bool:
        """The sequence lets go of its blocks, which are kept where a step in flight may touch them."""
        last = self.of(sequence)
        if last is None:
            return False
        last.kept.append(sequence.held)
        for flight in self._in_flight:
            if flight.sequences.get(sequence.id) is sequence:
                del flight.sequences[sequence.id]
        return True

    @property
    def held_back(self) -> bool:
        """Whether a preemption waits until nothing is in flight."""
        return self._wanted and bool(self._in_flight)

    def hold_back(self) -> bool:
        """Ask to preempt. Returns whether it must wait."""
        self._wanted = True
        return self.held_back

    @property
    def offline(self) -> bool:
        """Whether something is in flight, and nothing that is online."""
        return bool(self._in_flight) and all(flight.offline for flight in self._in_flight)

    @property
    def first(self) -> StepPlan:
        return self._in_flight[0].plan

    @property
    def kept(self) -> list[list[int]]:
        return [blocks for flight in self._in_flight for blocks in flight.kept]

    def check(self) -> None:
        """Raise AssertionError unless what is counted ahead is what is in flight."""
        counted = {s for flight in self._in_flight if flight.counted for s in flight.sequences.values()}
        assert counted >= set(self.ending.values())
        assert self.stages > 1 or sum(flight.counted for flight in self._in_flight) <= 1
        for flight in self._in_flight:
            for step in flight.plan.sequences:
                if (sequence := flight.sequences.get(step.request_id)) is not None:
                    assert sequence.blocks, "a sequence in flight has let go of its blocks"
                    if flight.counted and self.stages > 1:
                        assert sequence.id in self.ending or sequence.computed >= step.start + len(step.tokens)
                    elif flight.counted:
                        assert sequence.in_flight == len(step.tokens)
                        assert sequence.computed == step.start + len(step.tokens)
                        assert (sequence.tokens[-1] < 0) == bool(step.sample)


class Measurements:
    """What lately was, for the master's snapshots and to predict steps by.

    Means are exponentially weighted, in milliseconds, and None before there is a value. Times are seconds of the
    engine's clock.

    Attributes:
        ttft_ms: of its own online requests.
        tpot_ms: of its own requests.
        interval_ms: between the ends of two steps with decodes.
        factors: see `StepTime`.
        times: predicts its steps with them; None when nothing is known to begin with.
    """

    def __init__(self) -> None:
        self.ttft_ms: float | None = None
        self.tpot_ms: float | None = None
        self.interval_ms: float | None = None
        self.factors: dict[str, float] = {}
        self.learner: FactorLearner | None = None
        self._times: StepTime | None = None
        self._learn_at = -inf
        self._pace_in = PACE_EVERY  # steps
        self._last_step: float | None = None

    def learn(self, device: DeviceModel | None, shape: ModelShape | None) -> StepTime | None:
        """From now on measured steps are held against those of such a device. Returns what predicts them at first;
        None when nothing is known to begin with."""
        if device is not None and shape is not None:
            from penstock.sched.factors import FactorLearner  # and with it numpy, which the command line goes without

            self.learner, self._times = FactorLearner(device, shape), StepTime(device, shape)
        return self._times

    @property
    def times(self) -> StepTime | None:
        times, learner = self._times, self.learner
        if times is not None and learner is not None and times.factors is not self.factors:
            times = self._times = StepTime(times.device, times.shape, self.factors, learner.spread)
        return times

    @property
    def speed(self) -> float | None:
        """Of its steps, as a share of what they are without factors; None while that is not known."""
        return None if self.learner is None else self.learner.speed

    def stamp(self, sequence: Sequence, output: TokenOutput, now: float) -> None:
        """A sequence has its first output, or its last, which then says where its time went, if all of it was here."""
        before = len(sequence.request.generated)
        if sequence.answered is None:
            sequence.answered = now
            if not before and not sequence.request.offline:  # else its first token came elsewhere, or nobody waits
                self.ttft_ms = _mean(self.ttft_ms, (now - sequence.added) * 1e3)
        if output.finish is None:
            return
        decode = now - sequence.answered
        if not before:
            queue, prefill, wait = sequence.spent
            output.timing = Timing(queue, prefill, decode, wait, sequence.preemptions, sequence.images)
        if output.start > before:  # tokens after the first
            self.tpot_ms = _mean(self.tpot_ms, decode / (output.start - before) * 1e3)

    def ran(self, plan: StepPlan, began: float, ends: Items[float], after: int = 0) -> bool:
        """A step has run, or several that only decode, one right after the other.

        Args:
            plan: of the first.
            ends: of each.
            after: steps of that plan that were recorded before.

        Returns:
            Whether `times` has changed.
        """
        learner, start, learned = self.learner, 0, False
        prefills, decodes, kv_tokens, rows = plan.work
        self._pace_in -= len(ends)
        if learner is not None and self._pace_in <= 0:
            self._pace_in = PACE_EVERY
            learner.pace(prefills, decodes, kv_tokens + after * decodes, rows, (ends[0] - began) * 1e3)
        while start < len(ends):
            learn = len(ends) if learner is None else bisect_left(ends, self._learn_at, start)
            stop = min(learn + 1, len(ends))
            if decodes:
                self._note_intervals(began, ends[start:stop])
            last_began, began = ends[stop - 2] if stop - start > 1 else began, ends[stop - 1]
            self._last_step = began
            if learner is not None and learn < len(ends):
                self._learn_at = began + (CHECK_EVERY if learner.settled else LEARN_EVERY)
                kv_tokens_then = kv_tokens + (after + learn) * decodes
                learner.observe(prefills, decodes, kv_tokens_then, rows, (began - last_began) * 1e3)
                learned = True
            start = stop
        if learner is not None and learned:
            self.factors = learner.factors
        return learned

    def _note_intervals(self, began: float, ends: Items[float]) -> None:
        """From the end of one step to the end of the next, or twice what the step took where there was a pause."""
        last, mean = self._last_step, self.interval_ms
        if last is not None:
            mean = _mean(mean, min(ends[0] - last, 2 * (ends[0] - began)) * 1e3)
        gaps = map(sub, ends[1:], ends)
        if mean is None and len(ends) > 1:
            mean = next(gaps) * 1e3
        for gap in gaps:
            mean += WEIGHT * (gap * 1e3 - mean)
        self.interval_ms = mean


def all_offline(sequences: Iterable[Sequence]) -> bool:
    """Whether there is nothing online among them."""
    return all(s.offline for s in sequences)


def placeholder(row: int) -> int:
    """Stands for the token of that row of the step's samples before the one that computes it: -1 - row."""
    return -1 - row


def _mean(before: float | None, value: float) -> float:
    return value if before is None else before + WEIGHT * (value - before)
