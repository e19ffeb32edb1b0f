"""The sequences of one engine, and which of their tokens the next step computes: continuous batching
(`sched.local.batcher`), chunked prefill, paged KV (`kv_manager`), prefix cache, drafts.

A sequence may leave for another instance after its prefill or in the middle (`migrates`), and one may come from another
instance: blocks are set aside for it (`reserve`), filled by the transfer, and then it runs (`resume`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items

from penstock.core.errors import InvalidRequest, PromptTooLong
from penstock.core.plan import BLOCK_TOKENS, SequenceStep, StepPlan, StepResult
from penstock.core.request import FinishReason, Request, TokenLogprobs, TokenOutput
from penstock.kv.groups import WHOLE, Windows, first_seen, stand_in
from penstock.kv.keys import TAIL_INTERVAL
from penstock.kv.pool import BlockPool
from penstock.sched.local.batcher import Batcher, Queues
from penstock.sched.local.beams import BeamGroup, check_group
from penstock.sched.local.encodes import UNBOUNDED, Encodes
from penstock.sched.local.kv_manager import KVManager
from penstock.sched.local.limits import Limits, SchedulerCounters
from penstock.sched.local.offload import Offload
from penstock.sched.local.policy.base import LocalPolicy
from penstock.sched.local.policy.fcfs import Fcfs
from penstock.sched.local.reservations import Reservation, Reservations
from penstock.sched.local.sequence import Sequence, WantedBlock, standing_of
from penstock.sched.local.speculation import Speculation
from penstock.sched.local.steps import InFlightSteps, Measurements, StepBuilder
from penstock.sched.steptime import StepTime


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
        self.measurements = Measurements()
        loading = {} if offload is None else offload.waiting
        self._queues = Queues(self._in_flight.ending, loading, self.encodes.waiting)
        self.reservations = Reservations(self.kv, root, self._queues.running)
        self._batcher = Batcher(
            self._queues,
            self.kv,
            self._policy,
            self.encodes,
            self._in_flight,
            self.reservations,
            self.counters,
            offload,
            speculation,
        )
        self._answered: list[Sequence] = []  # since the last plan: their token clocks are to be started
        self._arrivals = 0

    @property
    def limits(self) -> Limits:
        """Now: they may be set while it runs."""
        return self.kv.limits

    @limits.setter
    def limits(self, limits: Limits) -> None:
        self.kv.limits = limits

    @property
    def num_running(self) -> int:
        return self._queues.num_running

    @property
    def num_waiting(self) -> int:
        """Those that wait for blocks to be loaded or fetched, or for encodes, included."""
        return self._queues.num_waiting

    @property
    def num_migrating(self) -> int:
        return len(self._queues.migrating)

    @property
    def num_reserved_blocks(self) -> int:
        """Of requests that are still to come from other instances, and in quarantine."""
        return self.reservations.num_blocks

    @property
    def has_work(self) -> bool:
        """Whether something runs or waits to run."""
        queues, encodes = self._queues, self.encodes
        return bool(queues.num_running or queues.num_waiting or encodes.asked or encodes.under_way)

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
        return request_id in self._queues.sequences

    def sequence(self, request_id: str) -> Sequence | None:
        """A sequence by id."""
        return self._queues.sequences.get(request_id)

    def tokens_due(self) -> tuple[int, int, int]:
        """See `Queues`."""
        return self._queues.tokens_due()

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
        if request.id in self._queues.sequences:
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
            self._queues.awaiting[request.id] = sequence
            return
        standing = sequence.standing
        if not self._batcher.load(sequence, (s for s in self._queues.waiting if s.standing <= standing)):
            self._batcher.enqueue(sequence)

    def _make(self, request: Request, now: float) -> Sequence:
        if request.params.use_beam_search:
            sequence: Sequence = BeamGroup(request, self._arrivals, now, self.root, self._windows, self.limits)
        else:
            sequence = Sequence(request, self._arrivals, now, self.root, self._windows)
        sequence.entered = self.counters.steps, self.counters.prompt_tokens
        self._arrivals += 1
        self._queues.add(sequence)
        self._policy.join(sequence)
        return sequence

    def cancel(self, request_id: str) -> bool:
        """Cancel a request in any state. False when it is not here."""
        queues = self._queues
        sequence = queues.pop(request_id)
        if sequence is None:
            return False
        if queues.awaiting.pop(request_id, None) is not None:
            return True
        if self.offload is not None and self.offload.stop_waiting(request_id) is not None:
            return True
        if sequence.request.media and self.encodes.leave(sequence):
            return True
        self._policy.leave(sequence)
        if sequence.blocks:  # running and migrating sequences hold blocks, others do not
            if not (queues.migrating.pop(request_id, None) or self._in_flight.ending.pop(request_id, None)):
                queues.running.remove(sequence)
            self._batcher.let_go(sequence)
        else:
            queues.waiting.remove(sequence)
        return True

    # --- coming from tiers below the device

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
            self._batcher.enqueue(sequence)

    # --- blocks from other instances

    def take_in(self, request_id: str, blocks: int) -> list[WantedBlock]:
        """Of a request that `awaits` them; see `KVManager.take_in`."""
        return self.kv.take_in(self._queues.awaiting[request_id], blocks, self._queues.running)

    def fetched(self, request_id: str) -> None:
        """Its blocks have come, or will not: it queues."""
        self._queue(self._queues.awaiting.pop(request_id, None))

    def awaits(self, sequence: Sequence) -> bool:
        """Whether it still waits for blocks."""
        return self._queues.awaiting.get(sequence.id) is sequence

    # --- coming from and going to other instances

    def leave(self, request_id: str) -> None:
        """After its next token it runs no further until it is told to `stay`, or has `migrated`."""
        self._queues.sequences[request_id].migrates = True

    def stay(self, request_id: str) -> None:
        """It is not handed over: it continues here."""
        sequence = self._queues.sequences.get(request_id)
        if sequence is None:
            return
        sequence.migrates = False
        if self._queues.migrating.pop(request_id, None) is not None:
            self._batcher.run(sequence)

    def migrated(self, request_id: str) -> None:
        """Another instance has taken it over: remove it."""
        assert request_id in self._queues.migrating
        self.cancel(request_id)

    def migrating(self, request_id: str) -> bool:
        """Whether it runs no further, and waits for the end of its hand-off."""
        return request_id in self._queues.migrating

    def begin_transfer(self, sequence: Sequence, place: int) -> None:
        """One of its blocks is being sent, and does not change until that has ended."""
        if place not in sequence.transferring:
            sequence.transferring[place] = block = sequence.blocks[place]
            self.pool.begin_transfer([block])

    def end_transfer(self, request_id: str) -> None:
        """Its transfer has ended. Implied when the sequence frees its blocks."""
        sequence = self._queues.sequences.get(request_id)
        if sequence is not None:
            self.kv.end_transfer(sequence)

    def transferring(self) -> list[str]:
        """Requests of which blocks are being sent."""
        return [s.id for s in self._queues.sequences.values() if s.transferring]

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
        ahead = sum(s.missing(chunk) for s in self._queues.waiting if s.standing <= standing)
        offline = (s for s in self._queues.running if s.offline and not request.offline)
        victims = self._batcher.victims(len(reservation.coming) + ahead, hit, offline)
        if victims is None or (victims and self._in_flight.hold_back()):
            return None
        for victim in victims:
            self._batcher.preempt(victim)
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
        assert reservation.request.id not in self._queues.sequences
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
        self._batcher.run(sequence)
        self._answered.append(sequence)
        self.kv.publish(sequence)
        return sequence

    # --- steps

    def schedule(self, now: float = 0.0, delay: Callable[[], float] = float) -> StepPlan:
        """The next step; empty when nothing has work, or when all room is held by what leaves, comes or is in flight.

        Args:
            delay: tells how many seconds it will be until the step can begin.
        """
        self._batcher.now = now
        for sequence in self._answered:
            sequence.start_clock(now)
        self._answered.clear()
        for sequence in self.encodes.arrived(now) if self._queues.encoding else ():
            self._queue(sequence)
        builder = self._batcher.batch(delay)
        if builder.empty:
            assert self._stalls or not self._queues.sequences, "work waits and nothing can run"
            return StepPlan(())
        speculation = self.speculation
        prompts = builder.prompt_tokens or self.kv.copies  # one that begins inside a block may lack only its last token
        idle = speculation is not None and (speculation.hot or not prompts)
        if speculation is not None and idle and speculation.considers(builder.grants):
            self._draft(builder, speculation)
        released, self._batcher.released = self._batcher.released, []
        forgotten = self.encodes.take_forgotten() if self.encodes.forgotten else ()
        plan = builder.plan(released, self.kv.take_copies() if self.kv.copies else (), forgotten)
        if speculation is not None and speculation.head is not None:
            self._ask_head(plan, speculation)
        return plan

    @property
    def _stalls(self) -> bool:
        """Whether something holds room, or is on its way, so that there may be no step although something waits."""
        held = self._queues.migrating or self.reservations.open or self.reservations.quarantine or self._in_flight
        moves = (self.offload is not None and not self.offload.idle) or self._queues.awaiting or self.kv.pinned
        return bool(held or moves or self.encodes.under_way)

    def _draft(self, builder: StepBuilder, speculation: Speculation) -> None:
        """Have drafts computed behind what is granted, where that pays and there is room without evicting anything."""
        times, limits = self.measurements.times, self.limits
        spare = self.pool.unused - self.kv.promised(self._queues.running)

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
                sequence = self._queues.sequences[step.request_id]
                known, request = step.start + len(step.tokens) - step.sample + 1, sequence.request
                end = min(len(request.prompt) + request.max_tokens, self.limits.max_model_len)
                step.proposes = max(0, min(speculation.wanted(sequence), end - known - 2))

    def launch(self, plan: StepPlan) -> bool:
        """A runner has the plan: until its `update`, its blocks get no other owner. Returns whether all that it
        computes is offline."""
        return self._in_flight.launch(plan, self._queues.sequences)

    @property
    def interrupts(self) -> bool:
        """Whether something online has come for which what is in flight, all of it offline, is to be interrupted."""
        return self._batcher.called and self._in_flight.offline

    def look_ahead(self) -> bool:
        """Count the one step in flight as done, to schedule the next one; False when that must wait for its update."""
        if self._queues.alone:
            return False  # what breaks an engine is to be told from what is computed with it
        hot = () if self.speculation is None or self.stages > 1 else self.speculation.hot.values()
        if any(self._in_flight.of(s) for s in hot):
            return False
        return self._in_flight.look_ahead(self._queues.running, self.limits.max_model_len)

    def abandon(self) -> None:
        """The runner has failed and stopped. The steps in flight, and encodes beside them, are computed again."""
        while self._in_flight:
            self.encodes.undone(self._in_flight.first)
            for sequence in self._land(self._in_flight.first).values():
                if sequence.blocks:
                    self._batcher.preempt(sequence, known=False)
        self.encodes.abandon()

    def _pause(self, sequence: Sequence) -> None:
        """It is to leave, and nothing that is in flight computes it."""
        self._queues.running.remove(sequence)
        self._queues.migrating[sequence.id] = sequence
        if self.speculation is not None:
            self.speculation.forget(sequence)

    def _land(self, plan: StepPlan) -> Mapping[str, Sequence]:
        """The plan's blocks are no longer in use. Returns the sequences that it computed."""
        if plan.copies:
            self.kv.landed(plan.copies)
        flight = self._in_flight.land(plan, self._queues.running)
        if flight is None:
            return self._queues.sequences
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
        self._batcher.interrupted(tokens)
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

    def set_aside(self, sequence: Sequence, count: int) -> list[int]:
        """See `KVManager.set_aside`."""
        return self.kv.set_aside(sequence, count, self._queues.running)

    def check(self) -> None:
        """Raise AssertionError unless sequences, queues and blocks agree."""
        self.pool.check()
        self._batcher.check()
        holding = self._queues.holding
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
