"""The engine: a scheduler, an executor, and the loop that joins them."""

from __future__ import annotations

import select
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Protocol

from penstock.core.clock import Clock
from penstock.core.plan import Encode, StepPlan
from penstock.core.request import Request, TokenOutput
from penstock.engine.executor.base import Executor, Pending, Ran
from penstock.kv.cache_log import CacheLog
from penstock.kv.connector import KVTier
from penstock.kv.embeddings import EMBEDDINGS, Below, Embedding, EmbeddingCache
from penstock.kv.pool import Published
from penstock.sched.local import Scheduler
from penstock.sched.local.limits import SOON, STOPS_IN, StepBudget
from penstock.sched.local.offload import Load, Order, Question

LEAD = 10e-3  # seconds before a step's predicted end, from when on the next one is scheduled
PATIENCE, GRACE = 4.0, 1.0  # a load may take so many times what was expected, and so many seconds more
ANSWERS_IN = 0.1  # instead of GRACE, for a question
LOOKING = 1.0  # seconds for which an image may be looked at beside steps before that is a matter of the heartbeat
SMOOTH = 0.3  # weight of the newest step in the mean time of encodes
LOOK_AGAIN = 0.5  # seconds after which a wait for moves checks everything


class Expects(Protocol):
    """Prepares blocks before they are used."""

    @property
    def size(self) -> int:
        """How many."""
        ...

    def use(self, blocks: Sequence[int]) -> bool:
        """These blocks are in use. Returns whether more should be announced."""
        ...

    def expect(self, coming: Iterable[int], *, hurry: bool = False) -> None:
        """These blocks are next; with hurry soon, else when nothing runs."""
        ...


class Ledger(Protocol):
    """Records block contents for the engine's next incarnation."""

    def clear(self, blocks: Iterable[int]) -> None:
        """These blocks will be overwritten."""
        ...

    def write(self, published: Published) -> None:
        """Record a full block."""
        ...


class TierBelow(KVTier, Protocol):
    """Copies blocks between the device and a tier below it."""

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""
        ...

    @property
    def away(self) -> bool:
        """Whether it does not answer at present."""
        ...

    @property
    def full(self) -> bool:
        """Whether it takes nothing at present."""
        ...


class Seen(Protocol):
    """An image that was looked at beside steps."""

    @property
    def encode(self) -> Encode: ...
    @property
    def data(self) -> bytes | None:
        """What was made of it, where that is wanted."""
        ...

    @property
    def seconds(self) -> float:
        """That it took."""
        ...


class Looks(Protocol):
    """Looks at images beside steps, of which the executor's worker gives it those that plans say."""

    def fileno(self) -> int:
        """Readable when something may have ended."""
        ...

    def take(self) -> Sequence[Seen]:
        """What has ended. Raises what that raised."""
        ...

    def settle(self) -> None:
        """Return when nothing is under way."""
        ...

    def drop(self) -> None:
        """Wait for what is under way, which is not to be taken."""
        ...


@dataclass(frozen=True, slots=True)
class Step:
    """An ended step, its outputs, and how many tokens it has computed: 0 when it was ended early."""

    plan: StepPlan
    outputs: list[TokenOutput]
    tokens: int


class Engine:
    """Requests in, tokens out. Not thread-safe: one loop owns it.

    That loop begins steps as long as it may, and takes what has ended:

        while engine.begin(): ...
        step = engine.end()

    Args:
        executor: computes steps. Where it does so beside the loop, the next step is scheduled meanwhile
            (`sched.local.steps`).
        ledger: None where blocks do not outlive the engine.
        budget: finds out how many tokens a step may hold; None where that is known.
        encode_budget: the same of tokens that stand for what a step encodes; None where the model sees nothing.
        prefaulter: prepares blocks; None where blocks need no preparation.
        movers: copy blocks for the scheduler's tiers, by their names.
        media_bytes: of what was made of images, that are kept for other engines, at most; 0 where it sees none.
        looks: at images beside steps; None where steps wait for them.

    Attributes:
        steps: that have ended.
        busy: seconds that they took.
        idle: seconds between them without computation although there was work.
        look_again_at: when `begin` may schedule ahead, in seconds of the clock; inf when it waits for something else.
        at_work: requests in the steps in flight, and until the next one in the last.
        tell: is told of these before they are computed.
        embeddings: what it has made of images, for other engines; None where there are none.
        encode_ms: of an image's token, a recent mean; None before there was one.
        looks: see above.
        cache_logs: what came and went on the device and in the tiers below it, by the tier's name; empty where nobody
            asks.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        clock: Clock,
        ledger: Ledger | None = None,
        budget: StepBudget | None = None,
        prefaulter: Expects | None = None,
        movers: Mapping[str, TierBelow] = {},
        encode_budget: StepBudget | None = None,
        media_bytes: int = 0,
        looks: Looks | None = None,
    ) -> None:
        assert [*movers] == ([] if scheduler.offload is None else [lane.name for lane in scheduler.offload.lanes])
        self.scheduler = scheduler
        self.executor = executor
        self.movers = movers
        self.media_bytes = media_bytes
        self.looks = looks
        self._looking: dict[bytes, Encode] = {}  # beside steps, in order
        self._looking_since = 0.0  # at the first of them
        self._looked: list[Encode] = []  # nobody has been told
        self._failure: Exception | None = None  # of these
        self.steps = 0
        self.busy = self.idle = 0.0
        self.at_work: Sequence[str] = ()
        self.tell: Callable[[Sequence[str]], None] = _nobody
        self.embeddings: EmbeddingCache | None = None
        self.encode_ms: float | None = None
        self.cache_logs: dict[str, CacheLog] = {}
        self._clock = clock
        self._ledger = ledger
        self._budget, self._encode_budget = budget, encode_budget
        self._prefaulter = prefaulter
        self._flying: deque[tuple[StepPlan, Pending]] = deque()
        self._began = 0.0  # the first of them, as far as is known
        self._ended = -inf  # the last that has
        self._stopped = False  # the last of them was told to end early
        self._called_at: float | None = None  # when something online came, if what is in flight was let be
        self.look_again_at = inf
        self._moving: dict[tuple[str, int], Order] = {}  # tier, and handle of its mover -> what is under way
        self._moved = select.poll()
        for mover in movers.values():
            self._moved.register(mover.fileno(), select.POLLIN)
        if looks is not None:
            self._moved.register(looks.fileno(), select.POLLIN)
        self._computed: select.poll | None = None  # steps, beside the loop
        if (fd := executor.fileno()) is not None:
            self._computed = select.poll()
            self._computed.register(fd, select.POLLIN)
        self._given_up_at: dict[int, float] = {}  # loads, and their time-outs
        self._free_since: float | None = None  # when the runner had ended a step and there was more to do
        self._expect()

    @property
    def has_work(self) -> bool:
        return bool(self._flying) or self.scheduler.has_work

    @property
    def tokens_in_flight(self) -> int:
        """Tokens of the steps in flight."""
        return sum(plan.num_tokens for plan, _ in self._flying)

    @property
    def ended(self) -> bool:
        """Whether the oldest step in flight can be taken at once."""
        return bool(self._flying) and self._flying[0][1].done()

    def add(self, request: Request, *, migrates: bool = False, awaits: bool = False, now: float | None = None) -> None:
        """Take a request in, see `Scheduler.add`. Raises PromptTooLong or InvalidRequest; then nothing has changed."""
        at = self._clock.now() if now is None else now
        self.scheduler.add(request, migrates=migrates, awaits=awaits, now=at)
        self._order_moves()

    def cancel(self, request_ids: Iterable[str]) -> None:
        """Cancel requests. Unknown ids are ignored: they may have just finished."""
        for request_id in request_ids:
            self.scheduler.cancel(request_id)

    def step(self) -> tuple[list[TokenOutput], int]:
        """Run one step to its end. Returns its outputs and how many tokens it computed; 0 when no step can run."""
        self._begin_all()
        if not self._flying and ((self.movers and self.awaits_moves) or self.awaits_encodes):
            self._moved.poll(1e3 * max(0.0, min(LOOK_AGAIN, self.gives_up_at - self._clock.now())))
            self._begin_all()
        step = self.end(wait=True)
        return (step.outputs, step.plan.num_tokens) if step is not None else ([], 0)

    def _begin_all(self) -> None:
        """What may be begun; also, where steps are computed beside this, what may be only shortly before one ends."""
        while self.begin():
            pass
        while self._computed is not None and self.look_again_at < inf and not self.ended:
            self._computed.poll(1e3 * max(0.0, self.look_again_at - self._clock.now()))
            while self.begin():
                pass

    def try_out(self, plan: StepPlan) -> None:
        """Run a plan while there is no work, in as many free blocks as it names."""
        blocks = self.scheduler.pool.allocate(len(plan.fresh_blocks))
        try:
            if self._ledger is not None:
                self._ledger.clear(blocks)
            steps = tuple(replace(step, blocks=tuple(blocks)) for step in plan.sequences)
            self.executor.launch(StepPlan(steps, tuple(blocks))).result()
        finally:
            self.scheduler.pool.release(blocks)

    def begin(self) -> StepPlan | None:
        """Schedule the next step. None when enough steps are in flight, or when there is no work or no room.

        Raises what was raised beside steps; all that is under way is then undone.
        """
        self.move()
        if self._failure is not None:
            failure, self._failure = self._failure, None
            self._abandon()
            raise failure
        self.look_again_at = inf
        if self._flying:
            if self.scheduler.interrupts:
                self._make_way()
                return None  # what has to end for something online, now or when it is late, may have nothing behind it
            stages = self.scheduler.stages
            if self._stopped or not self.executor.ahead or len(self._flying) >= max(2, stages):
                return None
            if stages == 1 and not self.ended and (early := self._delay() - LEAD) > 0:
                # what comes meanwhile is still in time for the next step
                self.look_again_at = min(self.look_again_at, self._clock.now() + early)
                return None
            if not self.scheduler.look_ahead():
                return None
        now = self._clock.now()
        plan = self.scheduler.schedule(now, self._delay)
        self._order_moves()
        if plan.empty:
            return None
        if self._ledger is not None:
            self._ledger.clear(plan.fresh_blocks)
        if not self._flying:
            self._began = now
        beside = {each.span.digest: each for each in plan.encodes if each.beside}
        if beside and not self._looking:
            self._looking_since = now
        self._looking |= beside
        self._tell_of(plan)
        # what is to end soon may have to be stopped too: behind another step, or when it takes longer than predicted
        stoppable = self.scheduler.launch(plan) and (
            bool(self._flying) or self.executor.ahead or self._seconds(plan) > STOPS_IN
        )
        self._flying.append((plan, self.executor.launch(plan, stoppable=stoppable)))
        if self._prefaulter is not None and plan.fresh_blocks and self._prefaulter.use(plan.fresh_blocks):
            self._expect(hurry=True)
        return plan

    def _tell_of(self, plan: StepPlan) -> None:
        together = [request_id for flying, _ in self._flying for request_id in flying.request_ids]
        together += [each.request_id for each in self._looking.values()]
        requests = plan.request_ids
        self.at_work = list(dict.fromkeys(together + requests)) if together else requests
        self.tell(self.at_work)

    def _expect(self, *, hurry: bool = False) -> None:
        if self._prefaulter is not None:
            self._prefaulter.expect(self.scheduler.pool.coming(self._prefaulter.size), hurry=hurry)

    def _make_way(self) -> None:
        """Something online has come, and all that is in flight is offline: end what does not end soon by itself, or
        should have and has not."""
        now = self._clock.now()
        if self._called_at is None:
            self._called_at = now
        ends, late, last = self._began, now - self._called_at >= SOON, len(self._flying)
        for place, (plan, _) in enumerate(self._flying):
            ends = max(now, ends + self._seconds(plan))
            if late or ends > now + SOON:
                last = place
                break
        if last and not late:
            self.look_again_at = self._called_at + SOON
        for _, pending in reversed([*self._flying][last:]):
            self._stopped |= pending.stop()

    def _seconds(self, plan: StepPlan) -> float:
        """That a step takes; inf where nobody can say."""
        times = self.scheduler.measurements.times
        if times is None:
            return inf
        looks = sum([each.span.length for each in plan.encodes if not (each.made or each.beside)])
        return (times.step_ms(*plan.work) + looks * (self.encode_ms or 0.0)) / 1e3

    def _delay(self) -> float:
        """Seconds until the step in flight has ended, as far as can be said."""
        if not self._flying or self.scheduler.measurements.times is None:
            return 0.0
        return max(0.0, self._began + self._seconds(self._flying[0][0]) - self._clock.now())

    def end(self, *, wait: bool = False) -> Step | None:
        """The oldest step in flight. None when there is none, or when it has not ended and is not to be waited for.

        Raises what the computation raised; the steps in flight are then undone.
        """
        if not self._flying:
            return None
        self.move()
        plan, pending = self._flying[0]
        if not wait and not pending.done():
            return None
        try:
            ran = pending.result()
        except BaseException:
            self._abandon()
            raise
        self._flying.popleft()
        self._landed()
        self._began = ran.ended
        return Step(plan, self._record(plan, ran), 0 if ran.result.interrupted else plan.num_tokens)

    def _abandon(self) -> None:
        self.executor.settle()
        self._flying.clear()
        self._landed()
        if self.looks is not None:
            self.looks.drop()
        self._looking.clear()
        self.scheduler.abandon()

    def _landed(self) -> None:
        self._called_at = None
        self._stopped &= bool(self._flying)

    def _record(self, plan: StepPlan, ran: Ran) -> list[TokenOutput]:
        measured = self.scheduler.measurements
        if self.embeddings is not None:
            for digest, data in ran.result.embeddings.items():
                self.embeddings.put(digest, Embedding.of(data, ran.result.encoding.get(digest, 0.0)))
        outputs = self.scheduler.update(plan, ran.result, ran.began, ran.ended)
        self._order_moves()
        self.steps += 1
        took = ran.ended - ran.began
        self.busy += ran.ended - max(ran.began, self._ended)  # of steps that overlap, in stages, the time once
        self._ended = ran.ended
        if self._free_since is not None:
            self.idle += max(0.0, ran.began - self._free_since)
        self._free_since = ran.ended if self.has_work else None
        if not self.has_work:
            self.at_work = ()
            self.tell(())
            self._expect()
        self.write_down()
        if ran.result.interrupted:
            return outputs
        if waited := [each for each in plan.encodes if not each.beside]:
            self._looked += waited
        encoding = self._encodes_of(waited, ran, alone=not plan.sequences) if waited else 0.0
        if not plan.sequences:
            return outputs
        if measured.ran(plan, min(ran.began + encoding, ran.ended), [ran.ended]) and (times := measured.times):
            self.scheduler.predict_by(times)
        if not waited and (budget := self._budget) is not None and budget.ran(plan.num_tokens, took):
            self.scheduler.limits = replace(self.scheduler.limits, token_budget=budget.tokens)
        return outputs

    def _encodes_of(self, encodes: Sequence[Encode], ran: Ran, *, alone: bool) -> float:
        """Seconds that a step took for its encodes, which come first in it. Of several stages none is told of those;
        then a step that does nothing else says what they took together."""
        looked, known = [encode for encode in encodes if not encode.made], ran.result.encoding
        tokens = sum([encode.span.length for encode in looked])
        total = sum(known.values()) if known else ran.ended - ran.began if alone else 0.0
        if not tokens or not total:
            return 0.0
        for encode in looked:
            seconds = known.get(encode.span.digest, total * encode.span.length / tokens)
            self.scheduler.encodes.took(self.scheduler.sequence(encode.request_id), seconds)
        self._encoded(tokens, total)
        return total

    def _encoded(self, tokens: int, took: float) -> None:
        """Find out how much may be encoded at once: each image is computed by itself, and so takes its share."""
        ms = took * 1e3 / tokens
        self.encode_ms = ms if self.encode_ms is None else self.encode_ms + SMOOTH * (ms - self.encode_ms)
        budget = self._encode_budget
        if budget is not None and budget.ran(budget.tokens, took * budget.tokens / tokens):
            self.scheduler.limits = replace(self.scheduler.limits, encode_budget=budget.tokens)

    # --- encodes beside steps

    @property
    def awaits_encodes(self) -> bool:
        """Whether only encodes beside steps prevent one; for when none can run."""
        scheduler = self.scheduler
        if not scheduler.encodes.under_way or scheduler.num_running:
            return False
        return scheduler.num_waiting == len(scheduler.encodes.waiting)

    def looks_long(self, now: float) -> int:
        """Tokens of what is under way beside steps, where that says nothing for long; else 0."""
        if not self._looking or now - self._looking_since < LOOKING:
            return 0
        return sum([each.span.length for each in self._looking.values()])

    def take_looked(self) -> list[Encode]:
        """What was looked at since it was last asked for."""
        looked, self._looked = self._looked, []
        return looked

    def _take_encodes(self) -> None:
        if self.looks is None or not self._looking:
            return
        try:
            taken = self.looks.take()
        except Exception as error:  # for `begin`, as what runs then is part of what is told of it
            self._failure = error
            return
        if taken:
            self._looking_since = self._clock.now()
        for seen in taken:
            encode = seen.encode
            del self._looking[encode.span.digest]
            if seen.data is not None and self.embeddings is not None:
                self.embeddings.put(encode.span.digest, Embedding.of(seen.data, seen.seconds))
            self._looked.append(encode)
            self.scheduler.encodes.took(self.scheduler.sequence(encode.request_id), seen.seconds)
            self._encoded(encode.span.length, seen.seconds)
        self.scheduler.encodes.made([seen.encode.span.digest for seen in taken])
        if taken and not self.has_work:
            self.at_work = ()
            self.tell(())

    # --- the tiers below the device

    @property
    def awaits_moves(self) -> bool:
        """Whether only moves prevent a step; for when none can run."""
        scheduler, offload = self.scheduler, self.scheduler.offload
        if offload is None or offload.idle:
            return False
        if scheduler.num_waiting == len(offload.waiting) and not scheduler.num_running:
            return bool(offload.waiting)
        return scheduler.has_work and not (scheduler.num_migrating or scheduler.num_reserved_blocks)

    @property
    def gives_up_at(self) -> float:
        """When the next load has taken too long, in seconds of the engine's clock."""
        return min(self._given_up_at.values(), default=inf)

    def move(self) -> None:
        """Handle completed moves and encodes, and start the wanted moves. `begin` and `end` do so too; a loop that
        waits without a step in flight calls it when one of `movers` or `looks` has something."""
        self._take_encodes()
        if not self.movers:
            return
        over = [(tier, moved) for tier, mover in self.movers.items() for moved in mover.poll()]
        self._look_at_tiers()
        for tier, (handle, blocks, seconds) in over:
            order = self._moving.pop((tier, handle))
            if isinstance(order, Load):
                self._given_up_at.pop(order.number, None)
                self.scheduler.loaded(order.number, len(blocks), seconds)
            elif isinstance(order, Question):
                self._given_up_at.pop(order.number, None)
                self.scheduler.answered(order.number, len(blocks), seconds)
            else:
                self.scheduler.stored(order.number, whole=len(blocks) == len(order.moves))
        if self._given_up_at:
            now = self._clock.now()
            for number in [number for number, due in self._given_up_at.items() if due <= now]:
                del self._given_up_at[number]
                self.scheduler.give_up(number)
        self._order_moves()
        if over:
            self.write_down()

    def _look_at_tiers(self) -> None:
        """Which of them answer, and take something."""
        offload = self.scheduler.offload
        for lane in () if offload is None else offload.lanes:
            mover = self.movers[lane.name]
            lane.away, lane.full = mover.away, mover.full

    def _order_moves(self) -> None:
        """Start the moves that the scheduler wants."""
        if self.scheduler.offload is None:
            return
        for order in self.scheduler.offload.take_orders():
            mover = self.movers[order.tier]
            if isinstance(order, Load):
                self._given_up_at[order.number] = self._clock.now() + PATIENCE * order.seconds + GRACE
                if self._ledger is not None:
                    self._ledger.clear(move.block for move in order.moves)
                self._moving[order.tier, mover.pull(order.moves)] = order
            elif isinstance(order, Question):
                self._given_up_at[order.number] = self._clock.now() + PATIENCE * order.seconds + ANSWERS_IN
                self._moving[order.tier, mover.ask(order.moves)] = order
            else:
                self._moving[order.tier, mover.push(order.moves)] = order

    # --- reports

    def write_down(self) -> None:
        """Pass changes of the prefix cache to the ledger and the cache logs."""
        if self.scheduler.pool.changed:
            added, removed = self.scheduler.pool.take_changes()
            if self._ledger is not None:
                for published in added:
                    self._ledger.write(published)
            if "device" in self.cache_logs:
                self.cache_logs["device"].note([p.key for p in added if p.told], removed)
        if self.embeddings is not None and EMBEDDINGS in self.cache_logs:
            self.cache_logs[EMBEDDINGS].note(*self.embeddings.take_changes())
        if self.cache_logs and self.scheduler.offload is not None:
            for lane in self.scheduler.offload.lanes:
                self.cache_logs[lane.name].note(*lane.tier.take_changes())

    @property
    def at_rest(self) -> bool:
        """Whether nothing is computed, moved or held."""
        scheduler = self.scheduler
        return not (self.has_work or self._moving or scheduler.num_migrating or scheduler.pool.used)

    def clear_cache(self) -> list[int]:
        """Forget all prefixes and embeddings on the device. Returns the blocks whose memory may be given back."""
        if self.looks is not None:
            self.looks.settle()
            self._take_encodes()
        blocks = self.scheduler.pool.clear()
        self.scheduler.encodes.forget()
        if self._ledger is not None:
            self._ledger.clear(blocks)
        self.write_down()
        return blocks

    def expect(self) -> None:
        """Have coming blocks prepared."""
        self._expect()

    def give_embeddings(self, below: Below | None = None) -> None:
        """From now on what it makes of images is kept for other engines, in as much memory as it may take itself."""
        if not self.media_bytes:
            return
        self.embeddings = EmbeddingCache(self.media_bytes, below)
        self.scheduler.encodes.gives = True

    def log_cache(self) -> None:
        """From now on it is kept what comes and goes in each tier of the cache."""
        self.cache_logs = {"device": CacheLog()}
        if self.embeddings is not None:
            self.cache_logs[EMBEDDINGS] = CacheLog()
        for tier in self.movers:
            self.cache_logs[tier] = CacheLog()

    # --- ends and checks

    def settle(self) -> None:
        """Wait for all computation and moves. Their results can still be taken."""
        self.executor.settle()
        if self.looks is not None:
            self.looks.settle()
        for mover in self.movers.values():
            mover.settle()

    def close(self) -> None:
        """Stop all access to the cache's memory; the engine cannot be used afterwards."""
        self.executor.close()
        if self.looks is not None:
            self.looks.drop()
        for mover in self.movers.values():
            mover.close()

    def check(self) -> None:
        """Raise AssertionError unless everything that runs is accounted for."""
        self.scheduler.check()
        self.executor.check()


def _nobody(requests: Sequence[str]) -> None:
    """Wants to know what is computed."""
