"""Which tokens of which sequences run in the next step (continuous batching, chunked prefill, paged KV, prefix cache).

A step is filled in this order: every decoding sequence gets its one token; then whatever has more tokens to compute,
running or waiting, gets as many as the token budget still allows. In which order, and whether less than the budget is
used, is decided by the local policy (`sched.local.policy`). A sequence that meets a shortage of blocks waits; a running
one takes blocks from the last in rank, which goes back to waiting with its tokens, and later computes again what is no
longer in the cache.

A sequence may leave for another instance after its prefill or in the middle (`migrates`), and one may come from another
instance: blocks are set aside for it (`reserve`), filled by the transfer, and then it runs (`resume`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Items
from operator import attrgetter

from penstock.core.errors import InvalidRequest, PromptTooLong
from penstock.core.plan import BLOCK_TOKENS, Encode, SequenceStep, StepPlan, StepResult, TailCopy
from penstock.core.request import FinishReason, Request, TokenLogprobs, TokenOutput
from penstock.kv.groups import WHOLE, Windows, first_seen, stand_in
from penstock.kv.keys import TAIL_INTERVAL
from penstock.kv.pool import BlockPool
from penstock.sched.local.beams import BeamGroup, check_group
from penstock.sched.local.encodes import UNBOUNDED, Encodes, served
from penstock.sched.local.kv_manager import KVManager
from penstock.sched.local.limits import Limits, OfflineChunk, SchedulerCounters
from penstock.sched.local.offload import Offload
from penstock.sched.local.policy.base import Allowance, LocalPolicy
from penstock.sched.local.policy.fcfs import Fcfs
from penstock.sched.local.reservations import Reservation, Reservations
from penstock.sched.local.sequence import Sequence, WaitingQueue, WantedBlock, standing_of
from penstock.sched.local.speculation import Speculation
from penstock.sched.local.steps import InFlightSteps, Measurements, all_offline
from penstock.sched.steptime import StepTime

_turn, _rank = attrgetter("turn"), attrgetter("rank")
_ONLINE = (1,)  # every turn of an online sequence is less


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


class Scheduler:
    """The sequences of one engine. `add` and `cancel` at any time between steps; then, again and again,

    plan = schedule(now); result = run(plan); outputs = update(plan, result)

    One more step may be scheduled while a plan runs: see `sched.local.steps`. Then `add` and `cancel` may come at
    any time.

    Times are seconds of any one clock; without deadlines they may be omitted.

    Args:
        root: parent of every first block's prefix key; equal for instances that may exchange blocks.
        policy: a new one; first come, first served by default.
        offload: this pool's; None without tiers below the device. With some, `stored`, `loaded` and `give_up` may come
            whenever `add` may.
        speculation: a new one; None computes no drafts.
        windows: of the model's groups of layers (`kv.groups`). Blocks that left them are given back.
        tail_interval: see `KVManager`.
        stages: of the pipeline that computes steps.
        media_tokens: whose embeddings an engine keeps, and `encodes_beside`: see `Encodes`.
    """

    def __init__(
        self,
        limits: Limits,
        pool: BlockPool,
        *,
        root: bytes = b"",
        prefix_cache: bool = True,
        policy: LocalPolicy | None = None,
        offload: Offload | None = None,
        speculation: Speculation | None = None,
        windows: Windows = WHOLE,
        tail_interval: int = TAIL_INTERVAL,
        stages: int = 1,
        media_tokens: int = UNBOUNDED,
        encodes_beside: bool = False,
    ) -> None:
        self.pool = pool
        self.stages = stages
        self.root = root
        self.counters = SchedulerCounters()
        self.offload = offload
        self.speculation = speculation
        self._policy = Fcfs() if policy is None else policy
        self._in_flight = InFlightSteps(stages)
        self.kv = KVManager(pool, limits, prefix_cache, self._in_flight, offload, windows, tail_interval)
        self._windows = windows
        self.encodes = Encodes(media_tokens, beside=encodes_beside)
        self._seeing: Mapping[Sequence, int] = self.encodes.starts  # of requests that are text alone nothing is there
        self._encoding: Mapping[str, Sequence] = self.encodes.waiting  # unknown to the policy
        self._asked: Mapping[bytes, Encode] = self.encodes.asked  # by others
        self.measurements = Measurements()
        # a sequence is in one of these, or `ending` with the step in flight
        self._running: list[Sequence] = []
        self._waiting = WaitingQueue()
        self._loading: Mapping[str, Sequence] = {} if offload is None else offload.waiting  # unknown to the policy
        self._awaiting: dict[str, Sequence] = {}  # blocks from other instances; unknown to the policy too
        self._migrating: dict[str, Sequence] = {}  # they only hold blocks, until another instance has them
        self._sequences: dict[str, Sequence] = {}  # all of them
        self._alone: dict[str, Sequence] = {}  # those of them that are to run alone
        self._ran_alone = False  # one of these had the last step
        self.reservations = Reservations(self.kv, root, self._running)
        self._released: list[str] = []  # requests that have let go of their blocks since the last plan
        self._answered: list[Sequence] = []  # since the last plan: their token clocks are to be started
        self._offline_chunk = OfflineChunk()
        self._called = False  # something online came, and no step was scheduled since
        self._arrivals = 0
        self._now = 0.0  # of the last plan

    @property
    def limits(self) -> Limits:
        """Now: they may be set while it runs."""
        return self.kv.limits

    @limits.setter
    def limits(self, limits: Limits) -> None:
        self.kv.limits = limits

    @property
    def num_running(self) -> int:
        return len(self._running) + len(self._in_flight.ending)

    @property
    def num_waiting(self) -> int:
        """Those that wait for blocks to be loaded or fetched, or for encodes, included."""
        return len(self._waiting) + len(self._loading) + len(self._awaiting) + len(self._encoding)

    @property
    def num_migrating(self) -> int:
        return len(self._migrating)

    @property
    def num_reserved_blocks(self) -> int:
        """Of requests that are still to come from other instances, and in quarantine."""
        return self.reservations.num_blocks

    @property
    def has_work(self) -> bool:
        """Whether something runs or waits to run."""
        waits = self._waiting or self._loading or self._awaiting or self._encoding or self._asked
        return bool(self._running or self._in_flight.ending or waits or self.encodes.under_way)

    @property
    def held_back(self) -> bool:
        """Whether there is not room for something because steps are in flight."""
        return self._in_flight.held_back

    @property
    def steady(self) -> bool:
        """Whether a step in which all decode is followed by its like for as long as nothing comes and nothing ends."""
        return self._policy.steady

    def predict_by(self, times: StepTime) -> None:
        """Set the step-time model of the local policy."""
        self._policy.predict_by(times)
        if self.offload is not None:
            self.offload.predict_by(times)

    def holds(self, request_id: str) -> bool:
        return request_id in self._sequences

    def sequence(self, request_id: str) -> Sequence | None:
        """A sequence by id."""
        return self._sequences.get(request_id)

    def tokens_due(self) -> tuple[int, int, int]:
        """Tokens still to be computed for what waits; for what runs; and tokens that are computed and held."""
        elsewhere = self._elsewhere
        waiting = sum([s.pending for s in self._waiting]) + sum([s.pending for s in elsewhere])
        held, prefill = 0, 0
        for sequence in (*self._running, *self._in_flight.ending.values()):
            held += sequence.computed
            pending = sequence.pending
            if pending > 1:
                prefill += pending
        return waiting, prefill, held + sum([s.computed for s in self._migrating.values()])

    @property
    def _elsewhere(self) -> tuple[Sequence, ...]:
        """Those that wait for something else than their turn."""
        return (*self._loading.values(), *self._awaiting.values(), *self._encoding.values())

    def add(self, request: Request, *, migrates: bool = False, awaits: bool = False, now: float = 0.0) -> None:
        """Add a request.

        Args:
            migrates: once its first token is sampled it runs no further until it is told to `stay`, or has `migrated`.
            awaits: it does not queue before it is said to have `fetched` blocks from elsewhere.

        Raises:
            PromptTooLong: it could never fit, even alone.
            InvalidRequest: a request of that id is here already, the prompt is empty, nothing is left to generate, a
                beam search is wider or longer than what ever runs at once, or an image larger than what is kept.
        """
        length, longest = len(request.prompt) + len(request.generated), self.limits.max_model_len
        embeds = request.pooling is not None
        if not request.prompt:
            raise InvalidRequest("prompt: empty, at least one token is needed", "prompt")
        if length + (not embeds) > longest:
            raise PromptTooLong.of(length, longest, output=int(not embeds))
        if embeds and (request.max_tokens or request.generated or migrates):
            raise InvalidRequest("pooling: given, allowed only where nothing is generated", "pooling")
        if len(request.generated) >= request.max_tokens and not embeds:
            count = len(request.generated)
            raise InvalidRequest(f"generated: {count} tokens, fewer than max_tokens={request.max_tokens} are allowed")
        if request.id in self._sequences:
            raise InvalidRequest(f"request id {request.id!r} is in use", "request_id")
        if request.params.use_beam_search:
            check_group(request, self.limits, self.kv.kept_blocks(self.pool.num_blocks))
        if request.media:
            self.encodes.check_request(request)
        sequence = self._make(request, now)
        sequence.migrates = migrates
        if self.offload is not None:
            self.offload.look_at(now)
        if awaits:
            self._policy.leave(sequence)
            self._awaiting[request.id] = sequence
            return
        standing = sequence.standing
        if not self._load(sequence, (s for s in self._waiting if s.standing <= standing)):
            self._enqueue(sequence)

    def _make(self, request: Request, now: float) -> Sequence:
        if request.params.use_beam_search:
            sequence: Sequence = BeamGroup(request, self._arrivals, now, self.root, self._windows, self.limits)
        else:
            sequence = Sequence(request, self._arrivals, now, self.root, self._windows)
        sequence.entered = self.counters.steps, self.counters.prompt_tokens
        self._arrivals += 1
        self._sequences[request.id] = sequence
        if request.alone:
            self._alone[request.id] = sequence
        self._policy.join(sequence)
        return sequence

    def cancel(self, request_id: str) -> bool:
        """Cancel a request in any state. False when it is not here."""
        sequence = self._sequences.pop(request_id, None)
        if sequence is None:
            return False
        self._alone.pop(request_id, None)
        if self._awaiting.pop(request_id, None) is not None:
            return True
        if self.offload is not None and self.offload.stop_waiting(request_id) is not None:
            return True
        if sequence.request.media and self.encodes.leave(sequence):
            return True
        self._policy.leave(sequence)
        if sequence.blocks:  # running and migrating sequences hold blocks, others do not
            if not (self._migrating.pop(request_id, None) or self._in_flight.ending.pop(request_id, None)):
                self._running.remove(sequence)
            self._let_go(sequence)
        else:
            self._waiting.remove(sequence)
        return True

    # --- coming from tiers below the device

    def _load(self, sequence: Sequence, before: Iterable[Sequence] = ()) -> bool:
        """Whether it waits for blocks from now on. Those `before` it come first."""
        if not self.kv.load(sequence, self._running, before):
            return False
        self._policy.leave(sequence)
        return True

    def stored(self, number: int, *, whole: bool = True) -> None:
        """A store has ended; see `Offload.stored`."""
        assert self.offload is not None
        self.offload.stored(number, whole=whole)

    def loaded(self, number: int, good: int, seconds: float | None = None) -> None:
        """A load has ended; see `Offload.loaded`."""
        assert self.offload is not None
        self._queue(self.offload.loaded(number, good, seconds))

    def answered(self, number: int, count: int, seconds: float) -> None:
        """A question has ended; see `Offload.answered`."""
        assert self.offload is not None
        self._queue(self.offload.answered(number, count, seconds))

    def give_up(self, number: int) -> None:
        """A load or an answer takes too long; see `Offload.give_up`."""
        assert self.offload is not None
        self._queue(self.offload.give_up(number))

    def _queue(self, sequence: Sequence | None) -> None:
        """Queue it after waiting for blocks."""
        if sequence is not None:
            self._policy.join(sequence)
            self._enqueue(sequence)

    # --- blocks from other instances

    def take_in(self, request_id: str, blocks: int) -> list[WantedBlock]:
        """Of a request that `awaits` them; see `KVManager.take_in`."""
        return self.kv.take_in(self._awaiting[request_id], blocks, self._running)

    def fetched(self, request_id: str) -> None:
        """Its blocks have come, or will not: it queues."""
        self._queue(self._awaiting.pop(request_id, None))

    def awaits(self, sequence: Sequence) -> bool:
        """Whether it still waits for blocks."""
        return self._awaiting.get(sequence.id) is sequence

    # --- coming from and going to other instances

    def leave(self, request_id: str) -> None:
        """After its next token it runs no further until it is told to `stay`, or has `migrated`."""
        self._sequences[request_id].migrates = True

    def stay(self, request_id: str) -> None:
        """It is not handed over: it continues here."""
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return
        sequence.migrates = False
        if self._migrating.pop(request_id, None) is not None:
            self._running.append(sequence)
            self._called |= not sequence.offline

    def migrated(self, request_id: str) -> None:
        """Another instance has taken it over: remove it."""
        assert request_id in self._migrating
        self.cancel(request_id)

    def migrating(self, request_id: str) -> bool:
        """Whether it runs no further, and waits for the end of its hand-off."""
        return request_id in self._migrating

    def begin_transfer(self, sequence: Sequence, place: int) -> None:
        """One of its blocks is being sent, and does not change until that has ended."""
        if place not in sequence.transferring:
            sequence.transferring[place] = block = sequence.blocks[place]
            self.pool.begin_transfer([block])

    def end_transfer(self, request_id: str) -> None:
        """Its transfer has ended. Implied when the sequence frees its blocks."""
        sequence = self._sequences.get(request_id)
        if sequence is not None:
            self.kv.end_transfer(sequence)

    def transferring(self) -> list[str]:
        """Requests of which blocks are being sent."""
        return [s.id for s in self._sequences.values() if s.transferring]

    def reserve(self, request: Request, sampled: Items[int] = ()) -> Reservation | None:
        """Set blocks aside for a request that comes from elsewhere; None when there is no room now. Offline sequences
        are preempted for an online one, unless that is `held_back`.

        Args:
            sampled: there, so far.

        Raises InvalidRequest or PromptTooLong when there never will be.
        """
        reservation, hit = self.reservations.sized(request, sampled)
        standing = standing_of(request)
        # waiting sequences come first
        chunk = self.kv.chunk
        ahead = sum(s.missing(chunk) for s in self._waiting if s.standing <= standing)
        offline = (s for s in self._running if s.offline and not request.offline)
        victims = self._victims(len(reservation.coming) + ahead, hit, offline)
        if victims is None or (victims and self._in_flight.hold_back()):
            return None
        for victim in victims:
            self._preempt(victim)
        self.reservations.add(reservation, hit)
        return reservation

    def resume(
        self,
        reservation: Reservation,
        cached_tokens: int,
        now: float = 0.0,
        spent: tuple[float, float, str] = (0.0, 0.0, ""),
        decode: float = 0.0,
    ) -> Sequence:
        """It is complete, and the KV of all but its last token has arrived: it runs from here on.

        Args:
            spent: see `Sequence.spent`; `decode`: seconds since.
        """
        assert reservation.request.id not in self._sequences
        self.reservations.open.remove(reservation)
        sequence = self._make(reservation.request, 0.0)
        sequence.tokens = reservation.tokens
        sequence.computed = len(sequence.tokens) - 1
        sequence.prompt_logprobs = None  # they left with the first token
        queue, prefill, sequence.wait = spent
        sequence.answered = now - decode
        sequence.started = sequence.answered - prefill
        sequence.added = sequence.started - queue
        sequence.blocks, sequence.dropped = reservation.blocks, reservation.dropped
        for group, end in enumerate(reservation.dropped):
            stand_in(sequence.blocks, sequence.groups, group, end)
        sequence.keys = reservation.keys
        sequence.published = reservation.have // sequence.groups
        sequence.cached_tokens = cached_tokens
        self._running.append(sequence)
        self._called |= not sequence.offline
        self._answered.append(sequence)
        self.kv.publish(sequence)
        return sequence

    # --- steps

    def schedule(self, now: float = 0.0, delay: Callable[[], float] = float) -> StepPlan:
        """The next step; empty when nothing has work, or when all room is held by what leaves, comes or is in flight.

        Args:
            delay: tells how many seconds it will be until the step can begin.
        """
        self._now = now
        for sequence in self._answered:
            sequence.start_clock(now)
        self._answered.clear()
        for sequence in self.encodes.arrived(now) if self._encoding else ():
            self._queue(sequence)
        builder = self._taking_turns(delay) if self._alone else self._build(delay)
        self.counters.prompt_tokens += builder.prompt_tokens
        self.counters.steps += 1
        self._called = False
        if builder.empty:
            held = self._migrating or self.reservations.open or self.reservations.quarantine or self._in_flight
            moves = (self.offload is not None and not self.offload.idle) or self._awaiting or self.kv.pinned
            assert held or moves or self.encodes.under_way or not self._sequences, "work waits and nothing can run"
            return StepPlan(())
        speculation = self.speculation
        prompts = builder.prompt_tokens or self.kv.copies  # one that begins inside a block may lack only its last token
        idle = speculation is not None and (speculation.hot or not prompts)
        if speculation is not None and idle and speculation.considers(builder.grants):
            self._draft(builder, speculation)
        released, self._released = self._released, []
        forgotten = self.encodes.take_forgotten() if self.encodes.forgotten else ()
        plan = builder.plan(released, self.kv.take_copies() if self.kv.copies else (), forgotten)
        if speculation is not None and speculation.head is not None:
            self._ask_head(plan, speculation)
        return plan

    def _build(self, delay: Callable[[], float]) -> StepBuilder:
        """A step of all that need not run alone."""
        decoding: list[Sequence] = []
        prefilling: list[Sequence] = []
        together = self._running if not self._alone else [s for s in self._running if s.id not in self._alone]
        for sequence in together:
            (decoding if len(sequence.tokens) - sequence.computed == 1 else prefilling).append(sequence)
        if self._seeing:  # the last token of a prompt may be one of an image
            prefilling += [s for s in decoding if not self._reach(s, s.computed)]
            decoding = [s for s in decoding if self._reach(s, s.computed)]
        share = -(-(len(together) + len(self._in_flight.ending)) // self.stages)
        # each stage is to have its share of them, and those that waited longest come first
        decoding, others = decoding[:share], decoding[share:]
        builder = StepBuilder(self.limits.token_budget, self._offline_chunk.tokens)
        if self._policy.steady and not (prefilling or self._waiting or self._seeing or self._asked):
            self._decode(builder, decoding)
        else:
            self._decode_and_fill(builder, delay, decoding, prefilling)
        if not builder.grants:  # those whose turn it was have perhaps given way
            self._decode(builder, others)
        return builder

    def _decode_and_fill(
        self, builder: StepBuilder, delay: Callable[[], float], decoding: list[Sequence], prefilling: list[Sequence]
    ) -> None:
        allowance = self._policy.begin(self._now, delay, decoding, prefilling, self._waiting)
        self._decode(builder, allowance.decoding)
        sees, beside = self._seeing or self._asked, self.encodes.beside
        if sees and not beside and self._encode(builder, prefilling):
            self._decode(builder, allowance.held_back() if allowance.bounded else ())
            return
        self._fill(builder, allowance, prefilling)
        builder.prompt_tokens = sum([count for count in builder.grants.values() if count > 1])
        if self._offline_chunk.tokens is not None and all_offline(builder.grants):
            self._offline_chunk.granted(builder.prompt_tokens, self.limits.token_budget)
        if sees and (beside or not builder.prompt_tokens):
            self._encode_before(builder, None)

    def _encode(self, builder: StepBuilder, prefilling: Items[Sequence]) -> bool:
        """Have the step encode what comes before all prompts that could be in it, and whether it does: then it is to
        have none of these."""
        turns = [s.turn for s in prefilling if self._reach(s, s.computed)]
        if self._waiting:
            turns.append(self._waiting.head.turn)
        return self._encode_before(builder, min(turns, default=None))

    def _encode_before(self, builder: StepBuilder, turn: tuple[float, ...] | None) -> bool:
        """Have the step encode what comes before a turn, and whether there is any; None is whatever there is."""
        alone, budget, encodes = self._alone, self.limits.encode_budget, self.encodes
        beside = encodes.beside and not alone  # what breaks an engine is to be told from what is computed with it
        builder.encodes = encodes.choose(budget, turn, lambda s: s.id not in alone, builder.grants, beside=beside)
        return bool(builder.encodes)

    def _reach(self, sequence: Sequence, start: int) -> int:
        """Tokens of it that can be computed from a position on."""
        return self.encodes.most(sequence, start) if sequence.request.media else len(sequence.tokens) - start

    def _taking_turns(self, delay: Callable[[], float]) -> StepBuilder:
        """A step of one that is to run alone, or of all others; by turns, as far as there is room."""
        # a search begins anew when it is preempted, and brings nothing before its end
        for sequence in [s for s in self._alone.values() if s.generated >= s.request.alone and not s.branching]:
            del self._alone[sequence.id]
        if self.encodes.under_way:
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
        builder = StepBuilder(self.limits.token_budget)
        while admitting and not builder.grants and self._waiting and self._waiting.head.id in self._alone:
            admitting = self._admit(builder, Allowance([]), self._waiting.head)
        for sequence in [s for s in self._alone.values() if s in self._running]:
            if builder.grants:
                break
            most = min(self._reach(sequence, sequence.computed), builder.budget, self.kv.chunk)
            if most:
                self._grant_running(builder, sequence, most)
        if self._seeing and not builder.grants:
            here = [s for s in self._alone.values() if s in self._running or s.id in self._encoding]
            first = min(here, key=served, default=None)
            builder.encodes = self.encodes.choose(0, None, lambda s: s is first, others=False)
        builder.prompt_tokens = sum([count for count in builder.grants.values() if count > 1])
        return builder

    def _draft(self, builder: StepBuilder, speculation: Speculation) -> None:
        """Have drafts computed behind what is granted, where that pays and there is room without evicting anything."""
        times, limits, spare = self.measurements.times, self.limits, self.pool.unused - self.kv.promised(self._running)

        def room(sequence: Sequence) -> int:
            """Drafts that may be right, in the blocks that it has or may have."""
            length, request = len(sequence.tokens), sequence.request
            end = min(len(request.prompt) + request.max_tokens, limits.max_model_len)
            return min(end - length - 1, sequence.room + max(0, spare) // sequence.groups * BLOCK_TOKENS - length)

        builder.drafts = speculation.choose(builder.grants, room, builder.budget, times)
        for sequence, drafts in builder.drafts.items():
            missing = sequence.blocks_until(len(sequence.tokens) + len(drafts)) - len(sequence.blocks)
            if missing > spare:
                del drafts[sequence.room - len(sequence.tokens) :]
            elif missing > 0:
                spare -= missing
                blocks = self.pool.allocate(missing)
                sequence.blocks += blocks
                builder.fresh.setdefault(sequence, []).extend(blocks)

    def _ask_head(self, plan: StepPlan, speculation: Speculation) -> None:
        """Have the model's draft head propose what may be right behind the tokens that a step draws."""
        for step in plan.sequences:
            if step.sample:
                sequence = self._sequences[step.request_id]
                known, request = step.start + len(step.tokens) - step.sample + 1, sequence.request
                end = min(len(request.prompt) + request.max_tokens, self.limits.max_model_len)
                step.proposes = max(0, min(speculation.wanted(sequence), end - known - 2))

    def launch(self, plan: StepPlan) -> bool:
        """A runner has the plan: until its `update`, its blocks get no other owner. Returns whether all that it
        computes is offline."""
        return self._in_flight.launch(plan, self._sequences)

    @property
    def interrupts(self) -> bool:
        """Whether something online has come for which what is in flight, all of it offline, is to be interrupted."""
        return self._called and self._in_flight.offline

    def look_ahead(self) -> bool:
        """Count the one step in flight as done, to schedule the next one; False when that must wait for its update."""
        if self._alone:
            return False  # what breaks an engine is to be told from what is computed with it
        hot = () if self.speculation is None or self.stages > 1 else self.speculation.hot.values()
        if any(self._in_flight.of(s) for s in hot):
            return False
        return self._in_flight.look_ahead(self._running, self.limits.max_model_len)

    def abandon(self) -> None:
        """The runner has failed and stopped. The steps in flight, and encodes beside them, are computed again."""
        while self._in_flight:
            self.encodes.undone(self._in_flight.first)
            for sequence in self._land(self._in_flight.first).values():
                if sequence.blocks:
                    self._preempt(sequence, known=False)
        self.encodes.abandon()

    def _pause(self, sequence: Sequence) -> None:
        """It is to leave, and nothing that is in flight computes it."""
        self._running.remove(sequence)
        self._migrating[sequence.id] = sequence
        if self.speculation is not None:
            self.speculation.forget(sequence)

    def _land(self, plan: StepPlan) -> Mapping[str, Sequence]:
        """The plan's blocks are no longer in use. Returns the sequences that it computed."""
        if plan.copies:
            self.kv.landed(plan.copies)
        flight = self._in_flight.land(plan, self._running)
        if flight is None:
            return self._sequences
        for blocks in flight.kept:
            self.pool.release(blocks)
        return flight.sequences

    def update(self, plan: StepPlan, result: StepResult, began: float = 0.0, ended: float = 0.0) -> list[TokenOutput]:
        """Record a finished step. A sequence that was cancelled meanwhile is skipped."""
        outputs, drafted = [], 0
        computed = self._land(plan)
        if result.interrupted:
            self._set_back(plan)
            return []
        sampled = iter(zip(result.tokens, result.logprobs, strict=True))
        for step in plan.sequences:
            run, logprobs = next(sampled) if step.sample else ((), None)
            sequence = computed.get(step.request_id)
            if sequence is None:
                continue
            if sequence.started is None:
                sequence.started = began
            if step.sample > 1 and self.speculation is not None:
                self.speculation.count(step.sample - 1, len(run) - 1)
                drafted += 1
            if why := result.broken.get(step.request_id):  # its blocks of this step are not published
                output = TokenOutput(sequence.id, [], finish=FinishReason.ERROR, start=sequence.generated, error=why)
            elif step.candidates:
                assert isinstance(sequence, BeamGroup)
                told = sequence.advance(step, result)
                self.kv.publish(sequence)
                if sequence.first is None:
                    self._answered.append(sequence)
                if told is None:
                    continue
                output = told
            else:
                told = self._advance(sequence, step, result, run, logprobs)
                if told is None:
                    continue
                output = told
            if sequence.answered is None:
                sequence.wait = self._wait(sequence)
                if output.finish is None:  # else it leaves more at once
                    self.kv.leave_tail(sequence)
            if sequence.answered is None or output.finish is not None:
                self.measurements.stamp(sequence, output, ended)
            if output.finish is not None:
                self.cancel(sequence.id)
            elif sequence.migrates:
                if self._in_flight.of(sequence) is None:  # else it was told to leave when the next step was under way
                    self._pause(sequence)
            elif self.speculation is not None and not sequence.branching:
                self.speculation.land(sequence, run, result.proposed.get(sequence.id, ()))
            outputs.append(output)
        if self.speculation is not None and (times := self.measurements.times) is not None:
            self.speculation.ran(plan.work, drafted, (ended - began) * 1e3, times)
        return outputs

    def _set_back(self, plan: StepPlan) -> None:
        """A step has ended early. Its sequences hold their blocks and are where they were: what it was to compute is
        computed again, over what it has left there."""
        tokens = sum([len(s.tokens) for s in plan.sequences if len(s.tokens) > max(1, s.sample)])
        self.counters.interruptions += 1
        self.counters.prompt_tokens -= tokens
        self._offline_chunk.interrupted(tokens)
        self.encodes.undone(plan)

    def _advance(
        self,
        sequence: Sequence,
        step: SequenceStep,
        result: StepResult,
        run: Items[int],
        logprobs: Items[TokenLogprobs] | None,
    ) -> TokenOutput | None:
        """A step has brought it further; None when there is nothing to tell of that."""
        sequence.computed = step.start + len(step.tokens) - step.sample
        if sequence.prompt_logprobs is not None:
            sequence.prompt_logprobs += result.prompt_logprobs.get(sequence.id, ())
        if step.pool is not None:
            told = sequence.pool(result.pooled[sequence.id])
        else:
            told = self._append(sequence, run, logprobs) if run else None
        kv = self.kv
        if sequence.computed // BLOCK_TOKENS != sequence.published or (kv.windowed and kv.outgrown(sequence)):
            kv.publish(sequence)
        return told

    def _append(self, sequence: Sequence, run: Items[int], logprobs: Items[TokenLogprobs] | None) -> TokenOutput:
        """Sampled tokens become part of the output; one of them perhaps ends it, and those after it are nothing."""
        request, tokens = sequence.request, sequence.tokens
        output = TokenOutput(request.id, [])
        output.cached_tokens = sequence.cached_tokens or 0
        output.start = len(tokens) - len(request.prompt)
        if sequence.first is None:
            self._answered.append(sequence)
        if sequence.prompt_logprobs is not None:
            output.prompt_logprobs, sequence.prompt_logprobs = sequence.prompt_logprobs, None
        longest = min(len(request.prompt) + request.max_tokens, self.kv.limits.max_model_len)
        for token in run:
            tokens.append(token)
            output.tokens.append(token)
            if token in request.stop_ids:
                output.finish, output.stop_token = FinishReason.STOP, token
                break
            if len(tokens) >= longest:
                output.finish = FinishReason.LENGTH
                break
        sequence.computed += len(output.tokens)  # but for the last, all were computed; and the one before them
        if logprobs is not None:
            output.logprobs = list(logprobs[: len(output.tokens)])
        return output

    def _wait(self, sequence: Sequence) -> str:
        """See `Timing`."""
        steps, tokens = self.counters.steps - sequence.entered[0], self.counters.prompt_tokens - sequence.entered[1]
        others = max(0, tokens - max(0, len(sequence.request.prompt) - (sequence.cached_tokens or 0)))
        said = f"{steps} steps, in which others had {others} prompt tokens computed; {self._policy.order(sequence)}"
        return f"{said}; {sequence.lacking:.3f} s without room for it" if sequence.lacking else said

    # --- filling a step

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
        waiting = self._waiting
        while builder.budget and (prefilling or (admitting and waiting)):
            runs = bool(prefilling) and (not admitting or not waiting or prefilling[-1].turn < waiting.head.turn)
            if before is not None and (prefilling[-1] if runs else waiting.head).turn >= before:
                break
            if runs:
                sequence = prefilling.pop()
                most = min(self._reach(sequence, sequence.computed), builder.left_for(sequence), self.kv.chunk)
                if most <= 0:
                    continue
                count = allowance.chunk(sequence, sequence.computed, most) if allowance.bounded else most
                if count and self._grant_running(builder, sequence, count) and allowance.bounded:
                    allowance.granted(sequence, sequence.computed, count)
            else:
                # no admission in a step that preempted: the victim would be admitted again
                # one that is to run alone is admitted by a step of its own, and not passed by others meanwhile
                admitting = not builder.short and waiting.head.id not in self._alone
                admitting = admitting and self._admit(builder, allowance, waiting.head)
        return admitting

    def _lengthen(self, builder: StepBuilder, allowance: Allowance) -> None:
        """Give the favoured prompt what others have left of the step."""
        sequence = allowance.favoured
        if sequence is None or not sequence.blocks or sequence.id in self._alone:
            return
        if sequence.id in self._in_flight.ending or sequence.id in self._migrating:
            return  # it goes no further, for now or for good
        count, room = builder.grants.get(sequence, 0), (len(sequence.blocks) + self.pool.available) // sequence.groups
        reach = self._reach(sequence, sequence.computed)
        most = min(reach, count + builder.budget, room * BLOCK_TOKENS - sequence.computed)
        more = allowance.lengthened(sequence.computed, count, most) - count
        if more:
            builder.grants[sequence] = count + more
            builder.budget -= sequence.cost(more)
            builder.fresh.setdefault(sequence, []).extend(self.set_aside(sequence, count + more))

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

    def _grant_running(self, builder: StepBuilder, sequence: Sequence, count: int) -> bool:
        """Whether it runs in this step; not if it was preempted earlier in it, and perhaps is already back."""
        if builder.budget < sequence.cost(count) or not sequence.blocks or sequence in builder.grants:
            return False
        missing = sequence.blocks_until(sequence.computed + count) - len(sequence.blocks)
        while missing > 0 and self.pool.available < missing:
            builder.short = True
            if self._in_flight.hold_back():
                return False
            victim = max(self._running, key=_rank)
            builder.forget(victim)
            self._preempt(victim)
            if victim is sequence:
                return False
        self._grant(builder, sequence, count)
        return True

    def _grant(self, builder: StepBuilder, sequence: Sequence, count: int) -> None:
        builder.grants[sequence] = count
        builder.budget -= sequence.cost(count)
        if blocks := self.set_aside(sequence, count):
            builder.fresh[sequence] = blocks

    def set_aside(self, sequence: Sequence, count: int) -> list[int]:
        """See `KVManager.set_aside`."""
        return self.kv.set_aside(sequence, count, self._running)

    def _admit(self, builder: StepBuilder, allowance: Allowance, sequence: Sequence) -> bool:
        """Start or resume the first in the queue, or have it wait elsewhere for blocks; False when it waits here."""
        if self._load(sequence):
            self._waiting.remove(sequence)
            return True
        hit = self.kv.prefix_hit(sequence, self._running)
        cached = hit.tokens
        rest = self._reach(sequence, cached)
        if not rest:
            return self._await_encode(sequence, cached)
        most = min(rest, builder.left_for(sequence), self.kv.chunk)
        count = allowance.chunk(sequence, cached, most) if allowance.bounded and most > 0 else most
        if count <= 0:
            return False
        # every token it has must fit beside what others still need for theirs: with less, prompts that are admitted
        # together would starve each other
        standing = sequence.standing
        lower = (s for s in self._running if s.standing > standing)
        victims = self._victims(sequence.missing(self.kv.chunk, hit), hit.held, lower, sequence.rows)
        if victims is None or (victims and self._in_flight.hold_back()):
            if sequence.lacks is None:
                sequence.lacks = self._now
            return False
        if sequence.lacks is not None:
            sequence.lacking, sequence.lacks = sequence.lacking + self._now - sequence.lacks, None
        for victim in victims:
            builder.forget(victim)
            self._preempt(victim)
        if victims:  # their tokens are available again, and the tail that was found may be one of theirs
            hit = hit._replace(tail=None)
            cached, rest = hit.tokens, self._reach(sequence, hit.tokens)
            if not rest:
                return self._await_encode(sequence, cached)
            most = min(rest, builder.left_for(sequence), self.kv.chunk)
            count = allowance.chunk(sequence, cached, most) if allowance.bounded else most
        self._waiting.remove(sequence)
        self._running.append(sequence)
        new = self.kv.admit(sequence, hit)
        if sequence.cached_tokens is None:
            sequence.cached_tokens = cached
            self.counters.prefix_queries += len(sequence.tokens)
            self.counters.prefix_hits += cached
            loaded = 0
            if sequence.loaded and self.offload is not None:
                loaded = self.offload.hit(sequence, cached)
                self.counters.prefix_loads += loaded
            self.counters.prefix_fetches += min(sequence.fetched, cached - loaded)
        self._grant(builder, sequence, count)
        if new:
            builder.fresh.setdefault(sequence, []).extend(new)
        if allowance.bounded:
            allowance.granted(sequence, cached, count)
        return True

    def _await_encode(self, sequence: Sequence, cached: int) -> bool:
        """It leaves the queue until what it needs first is there, which was let go of, or was thought to be cached."""
        self._waiting.remove(sequence)
        self._policy.leave(sequence)
        self.encodes.wait(sequence, cached, max(self._now, sequence.added))
        return True

    # --- preemption

    def _victims(self, missing: int, hit: list[int], lower: Iterable[Sequence], rows: int = 1) -> list[Sequence] | None:
        """See `KVManager.victims`; the one that comes takes so many places."""
        return self.kv.victims(missing, hit, self._running, lower, self._crowd + rows - self.limits.max_sequences)

    @property
    def _crowd(self) -> int:
        """Sequences that run here or soon will, or that may yet stay; of a beam search as many as it is wide."""
        here = sum([s.rows for s in (*self._running, *self._in_flight.ending.values())])
        return here + len(self._migrating) + len(self.reservations.open)

    def _preempt(self, victim: Sequence, *, known: bool = True) -> None:
        """Preempt it: free its blocks, and queue it. See `KVManager.let_go`."""
        self._running.remove(victim)
        self._let_go(victim, known=known)
        victim.restart()
        victim.gave_way = True
        victim.preemptions += 1
        self._enqueue(victim)
        self.counters.preemptions += 1

    def _let_go(self, sequence: Sequence, *, known: bool = True) -> None:
        """Free its blocks."""
        if self.speculation is not None:
            self.speculation.forget(sequence)
        self.kv.let_go(sequence, known=known)
        self._released.append(sequence.id)

    def _enqueue(self, sequence: Sequence) -> None:
        """Queue it, once what it needs first of its media is there."""
        if sequence.request.media:
            start = self.kv.prefix_hit(sequence).tokens
            self.encodes.join(sequence, start)
            if not self.encodes.most(sequence, start):
                self._policy.leave(sequence)
                self.encodes.wait(sequence, start, max(self._now, sequence.added))  # it may come to one that was idle
                self._called |= not sequence.offline
                return
        self._policy.wait(sequence, lambda s: self.kv.prefix_hit(s).tokens)
        self._waiting.add(sequence)
        self._called |= not sequence.offline

    def check(self) -> None:
        """Raise AssertionError unless sequences, queues and blocks agree."""
        self.pool.check()
        assert self._crowd <= self.limits.max_sequences
        assert self.num_running + self.num_waiting + len(self._migrating) == len(self._sequences)
        holding = [*self._running, *self._in_flight.ending.values(), *self._migrating.values()]
        elsewhere = self._elsewhere
        assert {*holding, *self._waiting, *elsewhere} == set(self._sequences.values())
        assert not any(s.blocks for s in self._awaiting.values())
        assert self._alone.items() <= self._sequences.items()
        self._waiting.check()
        self.encodes.check()
        self._in_flight.check()
        owners: list[Sequence | Reservation] = [*holding, *self.reservations.open]
        held = [*(owner.held for owner in owners), *self._in_flight.kept, self.reservations.quarantine]
        holders = Counter(block for blocks in held for block in blocks) + self.kv.pinned
        holders += Counter(self.kv.copied_from())
        transfers = Counter(block for s in holding for block in s.transferring.values())
        if self.offload is not None:
            self.offload.check()
            holders += self.offload.holders()
        if self.speculation is not None:
            self.speculation.check(holding)
        self.pool.check_holders(holders)
        self.pool.check_transfers(transfers)
        for s in holding:
            assert s.blocks
            assert len(s.blocks) % s.groups == 0
            assert set(s.transferring.values()) <= set(s.held)
            assert 0 <= s.computed < len(s.tokens) + (s.pooling is not None and s.in_flight > 0)
            assert len(s.tokens) <= self.limits.max_model_len
            drafted = 0 if self.speculation is None else self.speculation.most
            most = len(s.tokens) + 2 + drafted  # two where a step after one that was interrupted had set its own aside
            assert s.blocks_until(s.computed) <= len(s.blocks) <= s.blocks_until(most)
            assert len(set(s.held)) == len(s.held) > 0, "a block stands twice in one sequence"
            for group, end in enumerate(s.dropped):
                gone, after = s.blocks[group : end * s.groups : s.groups], s.blocks[end * s.groups + group]
                assert set(gone) <= {after}, "a block that was given back may be read"
                assert end <= first_seen(s.windows[group], s.settled), "a block that is seen was given back"
