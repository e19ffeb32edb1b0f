"""Continuous batching: who waits, who is admitted, who gives way, and what each step computes.

A step is filled in this order: every decoding sequence gets its one token; then whatever has more tokens to compute,
running or waiting, gets as many as the token budget still allows. In which order, and whether less than the budget is
used, is decided by the local policy (`sched.local.policy`). A sequence that meets a shortage of blocks waits; a running
one takes blocks from the last in rank, which goes back to waiting with its tokens, and later computes again what is no
longer in the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Items
from operator import attrgetter

from penstock.core.plan import BLOCK_TOKENS
from penstock.sched.local.encodes import Encodes, served
from penstock.sched.local.kv_manager import KVManager
from penstock.sched.local.limits import OfflineChunk, SchedulerCounters
from penstock.sched.local.offload import Offload
from penstock.sched.local.policy.base import Allowance, LocalPolicy
from penstock.sched.local.reservations import Reservations
from penstock.sched.local.sequence import Sequence, WaitingQueue
from penstock.sched.local.speculation import Speculation
from penstock.sched.local.steps import InFlightSteps, StepBuilder, all_offline

_turn, _rank = attrgetter("turn"), attrgetter("rank")
_ONLINE = (1,)  # every turn of an online sequence is less


class Queues:
    """All sequences of an engine, each in one of its queues. The policy knows of those that run and that wait.

    Args:
        ending: those that a step in flight brings to their end (`InFlightSteps`).
        loading: those that wait for blocks from a tier below the device (`Offload`).
        encoding: those that wait for what is made of their media (`Encodes`).

    Attributes:
        sequences: all, by id.
        alone: those that are to run alone.
        running: they hold blocks, and are computed.
        waiting: for their turn.
        awaiting: blocks from other instances.
        migrating: they only hold blocks, until another instance has them.
    """

    def __init__(
        self, ending: Mapping[str, Sequence], loading: Mapping[str, Sequence], encoding: Mapping[str, Sequence]
    ) -> None:
        self.sequences: dict[str, Sequence] = {}
        self.alone: dict[str, Sequence] = {}
        self.running: list[Sequence] = []
        self.waiting = WaitingQueue()
        self.awaiting: dict[str, Sequence] = {}
        self.migrating: dict[str, Sequence] = {}
        self.ending, self.loading, self.encoding = ending, loading, encoding

    def add(self, sequence: Sequence) -> None:
        """A new one, which is in no queue yet."""
        self.sequences[sequence.id] = sequence
        if sequence.request.alone:
            self.alone[sequence.id] = sequence

    def pop(self, request_id: str) -> Sequence | None:
        """It is over; it is still in its queue. None when it is not here."""
        self.alone.pop(request_id, None)
        return self.sequences.pop(request_id, None)

    @property
    def num_running(self) -> int:
        return len(self.running) + len(self.ending)

    @property
    def num_waiting(self) -> int:
        """For whatever it is."""
        return len(self.waiting) + len(self.loading) + len(self.awaiting) + len(self.encoding)

    @property
    def elsewhere(self) -> tuple[Sequence, ...]:
        """Those that wait for something else than their turn."""
        return (*self.loading.values(), *self.awaiting.values(), *self.encoding.values())

    @property
    def holding(self) -> list[Sequence]:
        """Those that hold blocks."""
        return [*self.running, *self.ending.values(), *self.migrating.values()]

    @property
    def rows(self) -> int:
        """Places of those that run here, or may yet stay; of a beam search as many as it is wide."""
        return sum([s.rows for s in (*self.running, *self.ending.values())]) + len(self.migrating)

    def tokens_due(self) -> tuple[int, int, int]:
        """Tokens still to be computed for what waits; for what runs; and tokens that are computed and held."""
        waiting = sum([s.pending for s in self.waiting]) + sum([s.pending for s in self.elsewhere])
        held, prefill = 0, 0
        for sequence in (*self.running, *self.ending.values()):
            held += sequence.computed
            pending = sequence.pending
            if pending > 1:
                prefill += pending
        return waiting, prefill, held + sum([s.computed for s in self.migrating.values()])

    def check(self) -> None:
        """Raise AssertionError unless every sequence is in one queue."""
        holding, elsewhere = self.holding, self.elsewhere
        assert self.num_running + self.num_waiting + len(self.migrating) == len(self.sequences)
        assert {*holding, *self.waiting, *elsewhere} == set(self.sequences.values())
        assert all(s.blocks for s in holding)
        assert not any(s.blocks for s in self.awaiting.values())
        assert self.alone.items() <= self.sequences.items()
        self.waiting.check()


class Batcher:
    """Moves sequences between queues, and makes a step of those that run.

    Args:
        queues: where sequences are. What comes and goes by itself is put there by their owner.

    Attributes:
        released: requests that have let go of their blocks since this was emptied.
        called: something online came, and no step was made since.
        now: of the last step, in seconds.
    """

    def __init__(
        self,
        queues: Queues,
        kv: KVManager,
        policy: LocalPolicy,
        encodes: Encodes,
        in_flight: InFlightSteps,
        reservations: Reservations,
        counters: SchedulerCounters,
        offload: Offload | None,
        speculation: Speculation | None,
    ) -> None:
        self._queues, self._kv, self._pool, self._policy = queues, kv, kv.pool, policy
        self._encodes, self._in_flight, self._reservations = encodes, in_flight, reservations
        self._counters, self._offload, self._speculation = counters, offload, speculation
        self._seeing = encodes.starts  # of requests that are text alone nothing is there
        self.released: list[str] = []
        self.called = False
        self.now = 0.0
        self._offline_chunk = OfflineChunk()
        self._ran_alone = False  # one that is to run alone had the last step

    # --- between queues

    def enqueue(self, sequence: Sequence) -> None:
        """Queue it, once what it needs first of its media is there."""
        if sequence.request.media:
            start = self._kv.prefix_hit(sequence).tokens
            self._encodes.join(sequence, start)
            if not self._encodes.most(sequence, start):
                self._policy.leave(sequence)
                self._encodes.wait(sequence, start, max(self.now, sequence.added))  # it may come to one that was idle
                self.called |= not sequence.offline
                return
        self._policy.wait(sequence, lambda s: self._kv.prefix_hit(s).tokens)
        self._queues.waiting.add(sequence)
        self.called |= not sequence.offline

    def load(self, sequence: Sequence, before: Iterable[Sequence] = ()) -> bool:
        """Whether it waits for blocks from now on. Those `before` it come first."""
        if not self._kv.load(sequence, self._queues.running, before):
            return False
        self._policy.leave(sequence)
        return True

    def run(self, sequence: Sequence) -> None:
        """It holds its blocks, and goes on here."""
        self._queues.running.append(sequence)
        self.called |= not sequence.offline

    def preempt(self, victim: Sequence, *, known: bool = True) -> None:
        """Preempt it: free its blocks, and queue it. See `KVManager.let_go`."""
        self._queues.running.remove(victim)
        self.let_go(victim, known=known)
        victim.restart()
        victim.gave_way = True
        victim.preemptions += 1
        self.enqueue(victim)
        self._counters.preemptions += 1

    def let_go(self, sequence: Sequence, *, known: bool = True) -> None:
        """Free its blocks."""
        if self._speculation is not None:
            self._speculation.forget(sequence)
        self._kv.let_go(sequence, known=known)
        self.released.append(sequence.id)

    def victims(self, missing: int, hit: list[int], lower: Iterable[Sequence], rows: int = 1) -> list[Sequence] | None:
        """See `KVManager.victims`; the one that comes takes so many places."""
        places = self._crowd + rows - self._kv.limits.max_sequences
        return self._kv.victims(missing, hit, self._queues.running, lower, places)

    @property
    def _crowd(self) -> int:
        """Places that are taken of those that run at once, or soon will be."""
        return self._queues.rows + len(self._reservations.open)

    # --- a step

    def batch(self, delay: Callable[[], float]) -> StepBuilder:
        """What the next step computes.

        Args:
            delay: tells how many seconds it will be until it can begin.
        """
        builder = self._taking_turns(delay) if self._queues.alone else self._build(delay)
        self._counters.prompt_tokens += builder.prompt_tokens
        self._counters.steps += 1
        self.called = False
        return builder

    def interrupted(self, tokens: int) -> None:
        """A step that held so many tokens of prompts has ended early: they are computed again."""
        self._counters.interruptions += 1
        self._counters.prompt_tokens -= tokens
        self._offline_chunk.interrupted(tokens)

    def _build(self, delay: Callable[[], float]) -> StepBuilder:
        """A step of all that need not run alone."""
        decoding: list[Sequence] = []
        prefilling: list[Sequence] = []
        running, alone = self._queues.running, self._queues.alone
        together = [s for s in running if s.id not in alone] if alone else running
        for sequence in together:
            (decoding if len(sequence.tokens) - sequence.computed == 1 else prefilling).append(sequence)
        if self._seeing:  # the last token of a prompt may be one of an image
            prefilling += [s for s in decoding if not self._reach(s, s.computed)]
            decoding = [s for s in decoding if self._reach(s, s.computed)]
        share = -(-(len(together) + len(self._in_flight.ending)) // self._in_flight.stages)
        # each stage is to have its share of them, and those that waited longest come first
        decoding, others = decoding[:share], decoding[share:]
        builder = StepBuilder(self._kv.limits.token_budget, self._offline_chunk.tokens)
        if self._policy.steady and not (prefilling or self._queues.waiting or self._seeing or self._encodes.asked):
            self._decode(builder, decoding)
        else:
            self._decode_and_fill(builder, delay, decoding, prefilling)
        if not builder.grants:  # those whose turn it was have perhaps given way
            self._decode(builder, others)
        return builder

    def _decode_and_fill(
        self, builder: StepBuilder, delay: Callable[[], float], decoding: list[Sequence], prefilling: list[Sequence]
    ) -> None:
        allowance = self._policy.begin(self.now, delay, decoding, prefilling, self._queues.waiting)
        self._decode(builder, allowance.decoding)
        sees, beside = self._seeing or self._encodes.asked, self._encodes.beside
        if sees and not beside and self._encode(builder, prefilling):
            self._decode(builder, allowance.held_back() if allowance.bounded else ())
            return
        self._fill(builder, allowance, prefilling)
        builder.prompt_tokens = sum([count for count in builder.grants.values() if count > 1])
        if self._offline_chunk.tokens is not None and all_offline(builder.grants):
            self._offline_chunk.granted(builder.prompt_tokens, self._kv.limits.token_budget)
        if sees and (beside or not builder.prompt_tokens):
            self._encode_before(builder, None)

    def _taking_turns(self, delay: Callable[[], float]) -> StepBuilder:
        """A step of one that is to run alone, or of all others; by turns, as far as there is room."""
        # a search begins anew when it is preempted, and brings nothing before its end
        kept = self._queues.alone
        for sequence in [s for s in kept.values() if s.generated >= s.request.alone and not s.branching]:
            del kept[sequence.id]
        if self._encodes.under_way:
            return self._build(delay)
        preempted = False
        # and once more, as the policy of a step of others may have put one that is to run alone at the queue's head
        for alone in (not self._ran_alone, self._ran_alone, True):
            builder = self._build_alone(admitting=not preempted) if alone else self._build(delay)
            if not builder.empty:
                self._ran_alone = alone
                break
            preempted |= builder.short
        return builder

    def _build_alone(self, *, admitting: bool) -> StepBuilder:
        """A step of the first of those that are to run alone: the next in the queue, or else one that runs."""
        builder = StepBuilder(self._kv.limits.token_budget)
        queues, waiting, kept = self._queues, self._queues.waiting, self._queues.alone
        while admitting and not builder.grants and waiting and waiting.head.id in kept:
            admitting = self._admit(builder, Allowance([]), waiting.head)
        for sequence in [s for s in kept.values() if s in queues.running]:
            if builder.grants:
                break
            most = min(self._reach(sequence, sequence.computed), builder.budget, self._kv.chunk)
            if most:
                self._grant_running(builder, sequence, most)
        if self._seeing and not builder.grants:
            here = [s for s in kept.values() if s in queues.running or s.id in queues.encoding]
            first = min(here, key=served, default=None)
            builder.encodes = self._encodes.choose(0, None, lambda s: s is first, others=False)
        builder.prompt_tokens = sum([count for count in builder.grants.values() if count > 1])
        return builder

    # --- encodes

    def _encode(self, builder: StepBuilder, prefilling: Items[Sequence]) -> bool:
        """Have the step encode what comes before all prompts that could be in it, and whether it does: then it is to
        have none of these."""
        turns = [s.turn for s in prefilling if self._reach(s, s.computed)]
        if self._queues.waiting:
            turns.append(self._queues.waiting.head.turn)
        return self._encode_before(builder, min(turns, default=None))

    def _encode_before(self, builder: StepBuilder, turn: tuple[float, ...] | None) -> bool:
        """Have the step encode what comes before a turn, and whether there is any; None is whatever there is."""
        alone, budget, encodes = self._queues.alone, self._kv.limits.encode_budget, self._encodes
        beside = encodes.beside and not alone  # what breaks an engine is to be told from what is computed with it
        builder.encodes = encodes.choose(budget, turn, lambda s: s.id not in alone, builder.grants, beside=beside)
        return bool(builder.encodes)

    def _reach(self, sequence: Sequence, start: int) -> int:
        """Tokens of it that can be computed from a position on."""
        return self._encodes.most(sequence, start) if sequence.request.media else len(sequence.tokens) - start

    # --- tokens

    def _decode(self, builder: StepBuilder, sequences: Iterable[Sequence]) -> None:
        """Each gets its next token, as far as there is room."""
        grants = builder.grants
        for sequence in sequences:
            # most have room for this token and the next one: the rest is passed over
            room = len(sequence.blocks) * BLOCK_TOKENS  # of all groups of layers
            ready = (sequence.computed + 1) * sequence.groups < room and not sequence.branching
            if builder.budget and ready and sequence not in grants:
                grants[sequence] = 1
                builder.budget -= 1
            else:
                self._grant_running(builder, sequence, 1)

    def _fill(self, builder: StepBuilder, allowance: Allowance, prefilling: list[Sequence]) -> None:
        """Spend what is left of the budget on prompts, running and waiting alike, in order of their turns."""
        prefilling.sort(key=_turn, reverse=True)
        admitting = True
        if allowance.bounded:
            admitting = self._prefill(builder, allowance, prefilling, admitting, _ONLINE)
            self._lengthen(builder, allowance)
            self._decode(builder, allowance.held_back())
        self._prefill(builder, allowance, prefilling, admitting)

    def _prefill(
        self,
        builder: StepBuilder,
        allowance: Allowance,
        prefilling: list[Sequence],
        admitting: bool,
        before: tuple[float, ...] | None = None,
    ) -> bool:
        """Of turns below `before`, when that is given. Returns whether the next in the queue may still be admitted."""
        waiting, alone = self._queues.waiting, self._queues.alone
        while builder.budget and (prefilling or (admitting and waiting)):
            runs = bool(prefilling) and (not admitting or not waiting or prefilling[-1].turn < waiting.head.turn)
            if before is not None and (prefilling[-1] if runs else waiting.head).turn >= before:
                break
            if runs:
                sequence = prefilling.pop()
                most = min(self._reach(sequence, sequence.computed), builder.left_for(sequence), self._kv.chunk)
                if most <= 0:
                    continue
                count = allowance.chunk(sequence, sequence.computed, most) if allowance.bounded else most
                if count and self._grant_running(builder, sequence, count) and allowance.bounded:
                    allowance.granted(sequence, sequence.computed, count)
            else:
                # no admission in a step that preempted: the victim would be admitted again
                # one that is to run alone is admitted by a step of its own, and not passed by others meanwhile
                admitting = not builder.short and waiting.head.id not in alone
                admitting = admitting and self._admit(builder, allowance, waiting.head)
        return admitting

    def _lengthen(self, builder: StepBuilder, allowance: Allowance) -> None:
        """Give the favoured prompt what others have left of the step."""
        sequence = allowance.favoured
        if sequence is None or not sequence.blocks or sequence.id in self._queues.alone:
            return
        if sequence.id in self._in_flight.ending or sequence.id in self._queues.migrating:
            return  # it goes no further, for now or for good
        count, room = builder.grants.get(sequence, 0), (len(sequence.blocks) + self._pool.available) // sequence.groups
        reach = self._reach(sequence, sequence.computed)
        most = min(reach, count + builder.budget, room * BLOCK_TOKENS - sequence.computed)
        more = allowance.lengthened(sequence.computed, count, most) - count
        if more:
            builder.grants[sequence] = count + more
            builder.budget -= sequence.cost(more)
            blocks = self._kv.set_aside(sequence, count + more, self._queues.running)
            builder.fresh.setdefault(sequence, []).extend(blocks)

    def _grant_running(self, builder: StepBuilder, sequence: Sequence, count: int) -> bool:
        """Whether it runs in this step; not if it was preempted earlier in it, and perhaps is already back."""
        if builder.budget < sequence.cost(count) or not sequence.blocks or sequence in builder.grants:
            return False
        missing = sequence.blocks_until(sequence.computed + count) - len(sequence.blocks)
        while missing > 0 and self._pool.available < missing:
            builder.short = True
            if self._in_flight.hold_back():
                return False
            victim = max(self._queues.running, key=_rank)
            builder.forget(victim)
            self.preempt(victim)
            if victim is sequence:
                return False
        self._grant(builder, sequence, count)
        return True

    def _grant(self, builder: StepBuilder, sequence: Sequence, count: int) -> None:
        builder.grants[sequence] = count
        builder.budget -= sequence.cost(count)
        if blocks := self._kv.set_aside(sequence, count, self._queues.running):
            builder.fresh[sequence] = blocks

    def _admit(self, builder: StepBuilder, allowance: Allowance, sequence: Sequence) -> bool:
        """Start or resume the first in the queue, or have it wait elsewhere for blocks; False when it waits here."""
        if self.load(sequence):
            self._queues.waiting.remove(sequence)
            return True
        hit = self._kv.prefix_hit(sequence, self._queues.running)
        cached = hit.tokens
        rest = self._reach(sequence, cached)
        if not rest:
            return self._await_encode(sequence, cached)
        most = min(rest, builder.left_for(sequence), self._kv.chunk)
        count = allowance.chunk(sequence, cached, most) if allowance.bounded and most > 0 else most
        if count <= 0:
            return False
        # every token it has must fit beside what others still need for theirs: with less, prompts that are admitted
        # together would starve each other
        standing = sequence.standing
        lower = (s for s in self._queues.running if s.standing > standing)
        victims = self.victims(sequence.missing(self._kv.chunk, hit), hit.held, lower, sequence.rows)
        if victims is None or (victims and self._in_flight.hold_back()):
            if sequence.lacks is None:
                sequence.lacks = self.now
            return False
        if sequence.lacks is not None:
            sequence.lacking, sequence.lacks = sequence.lacking + self.now - sequence.lacks, None
        for victim in victims:
            builder.forget(victim)
            self.preempt(victim)
        if victims:  # their tokens are available again, and the tail that was found may be one of theirs
            hit = hit._replace(tail=None)
            cached, rest = hit.tokens, self._reach(sequence, hit.tokens)
            if not rest:
                return self._await_encode(sequence, cached)
            most = min(rest, builder.left_for(sequence), self._kv.chunk)
            count = allowance.chunk(sequence, cached, most) if allowance.bounded else most
        self._queues.waiting.remove(sequence)
        self._queues.running.append(sequence)
        new = self._kv.admit(sequence, hit)
        if sequence.cached_tokens is None:
            sequence.cached_tokens = cached
            self._counters.prefix_queries += len(sequence.tokens)
            self._counters.prefix_hits += cached
            loaded = 0
            if sequence.loaded and self._offload is not None:
                loaded = self._offload.hit(sequence, cached)
                self._counters.prefix_loads += loaded
            self._counters.prefix_fetches += min(sequence.fetched, cached - loaded)
        self._grant(builder, sequence, count)
        if new:
            builder.fresh.setdefault(sequence, []).extend(new)
        if allowance.bounded:
            allowance.granted(sequence, cached, count)
        return True

    def _await_encode(self, sequence: Sequence, cached: int) -> bool:
        """It leaves the queue until what it needs first is there, which was let go of, or was thought to be cached."""
        self._queues.waiting.remove(sequence)
        self._policy.leave(sequence)
        self._encodes.wait(sequence, cached, max(self.now, sequence.added))
        return True

    def check(self) -> None:
        """Raise AssertionError unless every sequence is in one queue, and no more run than may."""
        self._queues.check()
        assert self._crowd <= self._kv.limits.max_sequences
