"""A simulated engine: the real scheduler, blocks and hand-offs, with modelled step times.

It sends what an engine's server sends: outputs to frontends, snapshots and cache deltas to the master. Messages are
read between steps, but for those about sequences that wait to leave and about fetches, which no step concerns. Of a
request's outputs only the first and the last are sent, the last with all tokens in between, as no simulated client
streams; and all while it is being handed over, since others know nothing of those before.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from math import inf
from typing import NamedTuple, Protocol

from msgspec.structs import replace

from penstock.core.plan import StepPlan, StepResult
from penstock.core.request import TokenOutput
from penstock.core.wire.engine import (
    AskCache,
    CacheDelta,
    Cancel,
    Command,
    Drain,
    Encode,
    Enqueue,
    Event,
    Fetched,
    Lacking,
    LinkFailed,
    Migrate,
    Peer,
    Pixels,
    Ready,
    Refused,
    Role,
    SetRole,
    Snapshot,
    Stayed,
    UnlinkPeer,
)
from penstock.core.wire.handoff import Committed, Fetch, Lent, Missing, PeerMessage, Push, Release, Reserved, Waiting
from penstock.kv.cache_log import CacheLog, DeltaPace
from penstock.kv.embeddings import EMBEDDINGS
from penstock.sched.local import Scheduler
from penstock.sched.local.intake import Intake
from penstock.sched.local.limits import SOON, STOPS_IN
from penstock.sched.local.offload import Store
from penstock.sim.events import Due, Priority
from penstock.sim.repeat import repeat, set_aside, update
from penstock.sim.steps import StepTimer, Stride, begin_stride
from penstock.sim.store import SimStore
from penstock.sim.tower import SimTower
from penstock.sim.traffic import STOP, own_token
from penstock.sim.wires import LoadedBlocks, MemoryCarrier, PeerArrival, RemappedBlocks, SharedOrphans, TierWay

IDLE_REPORT = 0.5  # seconds between snapshots while nothing changes
IDLE = 0  # the lane of idle reports; see `Due`
NO_EMBEDDING = (0.0,)  # nobody looks at it
TICKS = 20  # of the hand-offs, in a lease


class ClientCommand(NamedTuple):
    frontend: str
    command: Command


@dataclass(frozen=True, slots=True)
class PeerLost:
    """The link to a peer broke."""

    peer: Peer
    reason: str


# a bare command is the master's
Letter = ClientCommand | Command | PeerArrival | PeerLost | LoadedBlocks | RemappedBlocks


class OutputBatch(NamedTuple):
    """Outputs of one frontend's requests; a `StepReport` without the load, which is not used here."""

    incarnation: int
    outputs: tuple[TokenOutput, ...]


class InstanceSender(Protocol):
    """Sends an instance's messages."""

    def to_master(self, now: float, name: str, event: Event) -> Due: ...
    def report_arrives(self, at: float) -> float: ...
    def at_master(self, now: float, name: str, event: Event) -> list[Due]: ...
    def to_frontend(
        self, now: float, frontend: str, name: str, message: OutputBatch | Refused | Stayed | Fetched | Lacking
    ) -> Due: ...
    def to_peer(self, now: float, sender: Peer, peer: Peer, messages: Sequence[PeerMessage]) -> Due: ...


class SimInstance:
    """One incarnation of an engine.

    Args:
        ready: its `Ready`.
        lengths: tokens that each request will generate; known to the device only.
        report_interval: seconds between snapshots while the load changes.
        lease: seconds of silence after which a hand-off is over.
        tells_cache: whether the master looks at what comes and goes in the cache.
        ways: tier below its device -> the way there; the scheduler has the same tiers.
        orphans: what failed instances have left where it can take it over; None without such a place.
        strides: whether equal steps are taken together; without, the same comes out more slowly.
        tower: with which it looks at images; None where the model sees nothing.

    Attributes:
        busy: seconds that its steps took.
    """

    def __init__(
        self,
        ready: Ready,
        scheduler: Scheduler,
        carrier: MemoryCarrier,
        pace: StepTimer,
        post: InstanceSender,
        lengths: Mapping[str, int],
        *,
        report_interval: float,
        lease: float,
        tells_cache: bool = True,
        ways: Mapping[str, TierWay] | None = None,
        orphans: SharedOrphans | None = None,
        strides: bool = True,
        tower: SimTower | None = None,
    ) -> None:
        self.tower = tower
        scheduler.encodes.gives = tower is not None
        self._lanes = () if scheduler.offload is None else scheduler.offload.lanes
        self._ways = dict(ways or {})
        assert self._ways.keys() == {lane.name for lane in self._lanes}
        self.ready, self.name = ready, ready.peer.name
        self.scheduler = scheduler
        self.intake = Intake(ready.peer, ready.role, scheduler)
        self.handoffs = self.intake.hand_off(carrier, lease, orphans, None if tower is None else tower.embeddings)
        if times := scheduler.measurements.learn(ready.device_model, ready.shape):
            scheduler.predict_by(times)
        self.steps = 0
        self.busy = 0.0
        self._carrier, self._pace, self._post, self._lengths = carrier, pace, post, lengths
        self._orphans = orphans
        self._report_interval, self._tick_every = report_interval, lease / TICKS
        self._strides, self._tells_cache = strides, tells_cache
        self._incarnation = ready.peer.incarnation
        self._inbox: list[Letter] = []
        self._news: list[Due] = []
        self._now = 0.0
        self._stopped = inf
        self._stride: Stride | None = None
        self._turn = 0  # numbers the times to wake up, of which only the newest counts
        self._changed = True
        self._snapshots = 0
        tiers = ("device", *self._ways) if tower is None else ("device", EMBEDDINGS, *self._ways)
        self._logs = {tier: CacheLog() for tier in tiers}
        self._deltas = DeltaPace()
        self._arriving: dict[int, int] = {}  # loads under way, and their blocks
        self._load: Snapshot | None = None  # as it is now; None when it may have changed
        self._told = self.intake.snapshot()  # the load as the master was told
        self._looked_at = self._told_at = self._ticked_at = -inf
        self._idle_report = max(report_interval, IDLE_REPORT)
        self._says_so_at = inf  # time of the next idle report; inf unless idle

    @property
    def role(self) -> Role:
        """Its role, as set by the master."""
        return self.intake.role

    # --- what happens

    def start(self, now: float) -> list[Due]:
        """Register and start."""
        self._now = self._looked_at = self._ticked_at = now
        self._news.append(self._post.to_master(now, self.name, self.ready))
        self._send_cache(now)
        return self._go_on(now)

    def stop(self, now: float) -> dict[str, OutputBatch]:
        """Fail. Returns the outputs up to now, as clients had received every token as soon as it was sampled."""
        self._stopped = now
        self._leave_store()
        self.intake.handoffs = self.intake.images = None  # breaks reference cycles
        ahead: dict[str, int] = {}  # tokens of steps that are over and not recorded
        if self._stride is not None:
            done = self._stride.done(now)
            self.steps += done
            self.busy += now - self._stride.began
            if self._stride.quiet:
                done -= self._stride.ends_somebody and now >= self._stride.end  # its outcome is not known
                ahead = {s.request_id: done for s in self._stride.plan.sequences}
        untold = []
        for request_id, owner in self.intake.owners():
            sequence = self.scheduler.sequence(request_id)
            if sequence is not None and owner.told is not None:
                more = sequence.tokens[-1:] * ahead.get(request_id, 0)
                tokens = sequence.tokens[len(sequence.request.prompt) + owner.told :] + more
                if tokens:
                    untold.append(TokenOutput(request_id, tokens, start=owner.told))
        return {name: OutputBatch(self._incarnation, tuple(own)) for name, own in self.intake.address(untold).items()}

    def slow_down(self, now: float, factor: float) -> list[Due]:
        """Its steps take so many times as long, from the next one on."""
        self._pace.slow_down(factor)
        return [] if self._stride is None else self._cut(now, self._stride)

    def deliver(self, now: float, letters: Sequence[Letter]) -> list[Due]:
        """A message has arrived; it is read between steps."""
        if now >= self._stopped:
            return []
        self._now = now
        stride = self._stride
        if stride is not None and (beside := [letter for letter in letters if self._is_beside(letter, stride)]):
            for letter in beside:
                self._handle(now, letter)
            self._changed, self._load = True, None
            self._send_peers(now)
            told, self._news = self._news, []
            rest = [letter for letter in letters if letter not in beside]
            if rest:
                return [*told, *self.deliver(now, rest)]
            return [*told, *self._cut(now, stride)] if any(map(self._goes_on_here, beside)) else told
        self._inbox += letters
        while self._says_so_at < now:  # an idle report is on its way to the master
            self._looked_at = self._told_at = self._says_so_at
            self._news.append(self._post.to_master(self._told_at, self.name, self._next_snapshot()))
            self._says_so_at += self._idle_report
        self._says_so_at = inf
        if self._stride is None:
            return self._go_on(now)
        # a block alone changes nothing: what it is for is in the commit after it; but for one that is fetched
        blocks = all(isinstance(letter, PeerArrival) and isinstance(letter.message, Push) for letter in letters)
        if blocks and not any(map(_fetches, letters)):
            return []
        if self._makes_way(now, self._stride, letters):
            self._stride.interrupt(now + STOPS_IN)
            return [self._wake_at(self._stride.end)]
        return self._cut(now, self._stride)

    def _cut(self, now: float, stride: Stride) -> list[Due]:
        """The step after this one will be another."""
        dropped = stride.cut(now)
        self._pace.give_back(dropped)
        return [self._wake_at(stride.end)] if dropped else []

    def _makes_way(self, now: float, stride: Stride, letters: Sequence[Letter]) -> bool:
        """Whether what runs is only offline, would run on for long, and something online has come. A request that comes
        prefilled waits for the end of the step."""
        if stride.quiet or stride.interrupted or stride.end <= now + SOON or stride.plan.encodes:
            return False
        if not any(
            isinstance(letter, ClientCommand)
            and isinstance(letter.command, Enqueue)
            and not letter.command.request.offline
            for letter in letters
        ):
            return False
        here = [self.scheduler.sequence(step.request_id) for step in stride.plan.sequences]
        return all(sequence is None or sequence.offline for sequence in here)

    def _wake(self, turn: int, now: float) -> list[Due]:
        if now >= self._stopped or turn != self._turn:
            return []
        self._now = now
        if self._stride is not None:
            if self._goes_on(self._stride):
                return self._look_around(now, self._stride)
            self._finish(now, self._stride)
        return self._go_on(now)

    def _go_on(self, now: float) -> list[Due]:
        """Between steps: do what is due, read messages, and begin the next step."""
        self._copy(now)
        self._on_clock(now)
        self._read(now)
        if failed := self.intake.take_failed():
            self._send(now, failed)
        for frontend, said in self.intake.admit_seen(now):
            self._changed, self._load = True, None
            self._news.append(self._post.to_frontend(now, frontend, self.name, said))
        for frontend, stayed in self.intake.take_stayed():
            self._news.append(self._post.to_frontend(now, frontend, self.name, stayed))
        for frontend, fetched in self.intake.take_fetched():
            self._news.append(self._post.to_frontend(now, frontend, self.name, fetched))
        for arrival in self._orphans.take(now) if self._orphans is not None else ():
            self._news.append(Due(arrival.at, Priority.MESSAGE, partial(self._arrived, arrival)))
        if self.scheduler.has_work:
            self._begin(now)
        self._copy(now)
        self._send_peers(now)
        wake = self._stride.end if self._stride is not None else self._next_due()
        if self._stride is None and self._ways and self.scheduler.has_work:
            # a sequence may wait for blocks that are being copied
            wake = min(wake, *(way.next_store for way in self._ways.values()))
        # whatever comes or begins makes the load unknown
        idle = self._load is not None and not self.handoffs.busy and not self._ways
        if idle and self._told_at == now and self._delta_due == inf:
            return self._say(self._rest_until(now + self._idle_report))
        return self._wait_until(max(now, wake))

    def _wait_until(self, at: float) -> list[Due]:
        return self._say(self._wake_at(at))

    def _say(self, then: Due) -> list[Due]:
        """Its messages to send now, and its next event."""
        news, self._news = self._news, []
        news.append(then)
        return news

    def _wake_at(self, at: float) -> Due:
        self._turn += 1
        return Due(at, Priority.STEP, partial(self._wake, self._turn))

    def _rest_until(self, at: float, lane: int | None = None) -> Due:
        """It is idle until its next idle report. Only the report's arrival is an event, as otherwise most events of a
        large cluster would be idle instances'."""
        self._turn += 1
        self._says_so_at = at
        return Due(self._post.report_arrives(at), Priority.MESSAGE, partial(self._said_so, self._turn), lane)

    def _said_so(self, turn: int, now: float) -> list[Due]:
        at = self._says_so_at
        if at >= self._stopped or turn != self._turn:
            return []
        self._looked_at = self._told_at = at
        dues = self._post.at_master(now, self.name, self._next_snapshot())
        dues.append(self._rest_until(at + self._idle_report, IDLE))
        return dues

    # --- steps

    def _begin(self, now: float) -> None:
        self._load = None
        plan = self.scheduler.schedule(now) if self.scheduler.has_work else StepPlan(())
        if plan.empty:
            return  # no room: until a message or a deadline makes some
        self.handoffs.started(now, plan)
        alike = self._strides and not plan.work.prefills and not plan.encodes  # the steps after it may be
        repeats = alike and all(s.request_id in self.intake.news for s in plan.sequences)
        until = self._next_due() if repeats else now
        to_end = not self._ways  # else blocks are to be copied before it
        self._stride = begin_stride(now, plan, self._pace, self.scheduler, self._lengths, until, to_end=to_end)

    def _goes_on(self, stride: Stride) -> bool:
        """Whether the next step is like the last although a look at the clock is due."""
        return stride.more > 0 and not self._inbox and not self.handoffs.busy

    def _look_around(self, now: float, stride: Stride) -> list[Due]:
        """Between two steps of a stride that goes on: nothing has come, only the clock asks for something."""
        self._record(now, stride)
        self._copy(now)
        self._on_clock(now)
        set_aside(self.scheduler, stride.plan)
        stride.go_on(self._pace, self._next_due())
        return self._wait_until(stride.end)

    def _finish(self, now: float, stride: Stride) -> None:
        self._stride = None
        self._record(now, stride)
        if stride.ends_somebody:
            self._record(now, stride.split(self.scheduler))
        if times := self.scheduler.measurements.times:
            self.scheduler.predict_by(times)  # of steps in between nothing was to be predicted
        self.handoffs.progress(now)

    def _record(self, now: float, stride: Stride) -> None:
        """Report the ended steps."""
        self._load = None
        before, (began, ends) = stride.recorded, stride.record()
        self.steps += len(ends)
        self.busy += stride.began - began
        if self.tower is not None and stride.plan.encodes and not stride.interrupted:
            self.tower.end(stride.plan, stride.began - began, {request_id for request_id, _ in self.intake.owners()})
            self.intake.seen(stride.plan.encodes)
            self._changed = True
        if stride.interrupted:
            self.scheduler.update(stride.plan, StepResult([], [], interrupted=True))
            return
        if stride.quiet:
            repeat(self.scheduler, stride.plan, len(ends))
        else:
            outputs = update(self.scheduler, stride.plan, self.intake.news, self._draw, began, now)
            # one more token for each is no change of the load
            news = bool(stride.plan.work.prefills) or any(output.finish is not None for output in outputs)
            self._changed |= news
            self._deltas.hurries |= news
            self._report(now, outputs)
        if not stride.plan.encodes:  # as an engine does
            self.scheduler.measurements.ran(stride.plan, began, ends, before)

    def _draw(self, plan: StepPlan) -> StepResult:
        lengths = self._lengths
        tokens = [
            STOP if s.start + len(s.tokens) + 1 == len(s.prompt) + lengths[s.request_id] else own_token(s.seed)
            for s in plan.sequences
            if s.sample
        ]
        pooled = {s.request_id: NO_EMBEDDING for s in plan.sequences if s.pool}
        return StepResult([[token] for token in tokens], [None] * len(tokens), pooled=pooled)

    def _last(self, request_id: str) -> int:
        """The position of a request's last token."""
        sequence = self.scheduler.sequence(request_id)
        assert sequence is not None
        request = sequence.request
        most = min(self._lengths[request_id], request.max_tokens)
        return min(len(request.prompt) + most, self.scheduler.limits.max_model_len) - 1

    def _report(self, now: float, outputs: Iterable[TokenOutput]) -> None:
        """Send frontends their new outputs."""
        news = []
        for output in outputs:
            owner = self.intake.owner(output.request_id)
            if owner.told is not None:
                if output.finish is None and not owner.migrates:
                    self.intake.news[output.request_id] = self._last(output.request_id)
                    continue
                output.tokens = output.tokens * (output.start + len(output.tokens) - owner.told)
            if owner.told is not None:
                output.start = owner.told
            owner.told = output.start + len(output.tokens)
            if output.finish is None and not owner.migrates:
                self.intake.news[output.request_id] = self._last(output.request_id)
            news.append(output)
        self._send(now, news)

    def _send(self, now: float, outputs: Iterable[TokenOutput]) -> None:
        for frontend, own in self.intake.address(outputs).items():
            self._news.append(
                self._post.to_frontend(now, frontend, self.name, OutputBatch(self._incarnation, tuple(own)))
            )

    def _copy(self, now: float) -> None:
        """Between the device and the tiers below it. That a store is over is seen between steps, as only then its
        blocks are needed; and of blocks that decoding fills in a stride the stores begin when it is recorded."""
        offload = self.scheduler.offload
        if offload is None:
            return
        for way in self._ways.values():
            for number in way.stored(now):
                self.scheduler.stored(number)
        orders = offload.take_orders()
        for tier, way in self._ways.items():
            for arrival in way.send(now, (order for order in orders if order.tier == tier)):
                self._arriving[arrival.number] = arrival.blocks
                self._news.append(Due(arrival.at, Priority.MESSAGE, partial(self._arrived, arrival)))

    def _arrived(self, arrival: LoadedBlocks | RemappedBlocks, now: float) -> list[Due]:
        return self.deliver(now, [arrival])

    def _leave_store(self) -> None:
        """It has failed: what it was about to write is not there, and nobody reads for it."""
        offload = self.scheduler.offload
        shared = [lane.tier for lane in self._lanes if isinstance(lane.tier, SimStore)]
        if offload is None or not shared:
            return
        for order in offload.take_orders():
            if isinstance(order, Store):
                offload.stored(order.number, whole=False)
            else:
                self._arriving[order.number] = len(order.moves)
        for number in [number for way in self._ways.values() for number in way.cut()]:
            offload.stored(number, whole=False)
        for number, blocks in self._arriving.items():
            offload.loaded(number, blocks)
        for tier in shared:
            tier.leave(self.name)

    # --- by the clock

    def _next_due(self) -> float:
        """When the clock next asks for something."""
        snapshot = self._looked_at + self._report_interval
        if not self._changed:
            snapshot = max(snapshot, min(self._told_at + IDLE_REPORT, self._delta_due))
        return min(snapshot, self._ticked_at + self._tick_every) if self.handoffs.busy else snapshot

    def _on_clock(self, now: float) -> None:
        if self.handoffs.busy and now >= self._ticked_at + self._tick_every:
            self._ticked_at, self._load = now, None
            self.handoffs.tick(now)
        if now < self._looked_at + self._report_interval:
            return
        if self._changed or now >= min(self._told_at + IDLE_REPORT, self._delta_due):
            self._tell_master(now)

    def _tell_master(self, now: float) -> None:
        """Send masters the load when it changed or is due, and the cache's deltas."""
        self._looked_at, self._changed = now, False
        if self._load is None:
            self._load = self.intake.snapshot()
        if self._load != self._told or now >= self._told_at + IDLE_REPORT:
            self._told, self._told_at = self._load, now
            self._news.append(self._post.to_master(now, self.name, self._next_snapshot()))
        self._write_down()
        if now >= self._delta_due:
            self._deltas.told(now)
            for tier, log in self._logs.items():
                if (changes := log.take()) is not None:
                    delta = CacheDelta(self._incarnation, log.sequence, *changes, tier)
                    self._news.append(self._post.to_master(now, self.name, delta))

    @property
    def _delta_due(self) -> float:
        """When the master is to be told what has changed in the cache, of what is written down."""
        return self._deltas.due(self._logs.values())

    def _write_down(self) -> None:
        """What has come and gone in each tier of the cache."""
        added, removed = self.scheduler.pool.take_changes()
        changes = {"device": ([published.key for published in added if published.told], removed)}
        for lane in self._lanes:
            tier = lane.tier
            changes[lane.name] = tier.changes_of(self.name) if isinstance(tier, SimStore) else tier.take_changes()
        if self.tower is not None:
            changes[EMBEDDINGS] = self.tower.embeddings.take_changes()
        for name, log in self._logs.items():
            if self._tells_cache or name == EMBEDDINGS:
                log.note(*changes[name])

    def _next_snapshot(self) -> Snapshot:
        self._snapshots += 1
        encode_ms = None if self.tower is None else self.tower.encode_ms
        return replace(self._told, sequence=self._snapshots, encode_ms=encode_ms)

    def _send_cache(self, now: float) -> None:
        """Everything that can be found, numbered like the last delta, so that the next one follows it."""
        self._write_down()
        tiers = {lane.name: lane.tier for lane in self._lanes}
        for name, log in self._logs.items():
            log.take()
            tier = tiers.get(name, self.scheduler.pool)
            keys = tier.keys_of(self.name) if isinstance(tier, SimStore) else tier.keys()
            if name == EMBEDDINGS and self.tower is not None:
                keys = self.tower.embeddings.keys()
            delta = CacheDelta(self._incarnation, log.sequence, keys, [], name, whole=True)
            self._news.append(self._post.to_master(now, self.name, delta))

    # --- messages

    def _read(self, now: float) -> None:
        if not self._inbox:
            return
        self._changed, self._load = True, None
        letters, self._inbox = self._inbox, []
        for letter in letters:
            self._handle(now, letter)

    def _is_beside(self, letter: Letter, stride: Stride) -> bool:
        """Whether it is about a sequence that waits to leave, or about what is fetched: an engine reads all messages
        beside its steps, and of these the order does not matter. Where steps only decode, which may be taken together,
        fetches wait for the end of one."""
        return self.scheduler.migrating(_about(letter)) or (_fetches(letter) and bool(stride.plan.work.prefills))

    def _goes_on_here(self, letter: Letter) -> bool:
        """Whether it was about a sequence that waited to leave, and now is in the next step."""
        request_id = _about(letter)
        return self.scheduler.sequence(request_id) is not None and not self.scheduler.migrating(request_id)

    def _handle(self, now: float, letter: Letter) -> None:
        match letter:
            case PeerArrival():
                self.handoffs.on(now, letter)
            case LoadedBlocks():
                del self._arriving[letter.number]
                self.scheduler.loaded(letter.number, letter.blocks, letter.seconds)
            case RemappedBlocks():
                assert self._orphans is not None
                self._orphans.looked_at(letter)
                self.handoffs.collect(now)
            case PeerLost(peer=peer, reason=reason):
                self.handoffs.lost(peer, for_good=False)
                self._news.append(self._post.to_master(now, self.name, LinkFailed(self._incarnation, peer, reason)))
            case ClientCommand(frontend=frontend, command=Enqueue() as enqueue):
                if refused := self.intake.enqueue(now, frontend, enqueue):
                    self._news.append(self._post.to_frontend(now, frontend, self.name, refused))
            case ClientCommand(frontend=frontend, command=Cancel() as cancel):
                self._deltas.hurries = True
                self.intake.obey(frontend, cancel)
            case ClientCommand(command=Encode() as encode):
                self.intake.encode(encode)
            case ClientCommand(frontend=frontend, command=Pixels() as pixels):
                self.intake.pixels(frontend, pixels)
            case ClientCommand(frontend=frontend, command=Migrate() as migrate):
                self.intake.migrate(now, frontend, migrate)
            case _ if getattr(letter, "to", None) == self._incarnation:
                self._obey(now, letter)

    def _obey(self, now: float, command: Letter) -> None:
        """The master."""
        match command:
            case UnlinkPeer(peer=peer):
                self.handoffs.lost(peer, for_good=True)
            case SetRole() | Drain():
                self._deltas.hurries |= isinstance(command, Drain)
                self.intake.obey("", command)
            case AskCache():
                self._send_cache(now)

    def _send_peers(self, now: float) -> None:
        """Blocks that leave together for one peer are delivered together, when the last of them is there."""
        for (peer, pushes), run in groupby(self._carrier.take(), lambda sent: (sent[0], isinstance(sent[1], Push))):
            messages = [message for _, message in run]
            for together in [messages] if pushes else ([message] for message in messages):
                self._news.append(self._post.to_peer(now, self.ready.peer, peer, together))

    def check(self) -> None:
        """Raise AssertionError unless everything it holds belongs to a live request."""
        self.intake.check()
        if self.tower is not None:
            self.tower.check()


def _fetches(letter: Letter) -> bool:
    """Whether it is about what one instance fetches from another."""
    match letter:
        case PeerArrival(message=Fetch()):
            return True
        case PeerArrival(message=Lent(lease=lease) | Push(lease=lease) | Release(lease=lease)):
            return lease.fetches
        case ClientCommand(command=Enqueue(source=source)):
            return source is not None
    return False


def _about(letter: Letter) -> str:
    """The request that may wait for it to leave; "" where there is none."""
    match letter:
        case PeerArrival(message=Waiting() | Reserved() | Missing() | Committed() as answer):
            return answer.lease.request_id
        case ClientCommand(command=Migrate(request_id=request_id)):
            return request_id
    return ""
