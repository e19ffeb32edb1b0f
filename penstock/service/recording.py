"""The flight recorder's entries as records, and back.

A recording is a log: a record holds what has changed since those before it. Loads, demands and the like are written
when they differ from what was written last, and decisions name them by number. So its size depends on changes, not on
the size of the cluster, and every decision has all of its inputs. `BeganRecord` resets the state: no record after it
refers to one before it. Prompts are in none of them.

A view is written whole up to `WHOLE` instances. Of a larger one, the candidates with the least costs are, with the
chosen ones, in the view's order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from heapq import nlargest, nsmallest
from operator import attrgetter
from typing import Any

import msgspec

from penstock.core.device import DeviceModel, ModelShape
from penstock.core.wire.engine import Role
from penstock.core.wire.master import Outcome
from penstock.sched.cluster import (
    ClusterView,
    Decision,
    Demand,
    FleetChange,
    InstanceLoad,
    Move,
    Rates,
    Restart,
    Stage,
    Start,
    Stop,
    Verdict,
)
from penstock.sched.cluster.base import ImageWay, Key, Way
from penstock.sched.steptime import StepTime
from penstock.service.recorder import (
    DecidedEntry,
    EndedEntry,
    Entry,
    HeldEntry,
    MovedEntry,
    RelocatedEntry,
    ScaledEntry,
)

WHOLE = 64  # instances that are all written
BEST = 16  # candidates of a stage that are written when there are more
QUEUE = 256  # demands of each queue that are written, the first ones
OLD_NAMES = {"pool": "role", "reading": "prefilling"}  # of a load's fields in older recordings
HITS = 64  # instances of which a demand's hits are written, those with the most


class FlightRecord(msgspec.Struct, frozen=True, array_like=True, tag=lambda name: name.removesuffix("Record")):
    pass


class BeganRecord(FlightRecord, frozen=True):
    """
    Attributes:
        now, wall: the same moment by the master's clock and in seconds since 1970, UTC.
        load, demand, rates: names of the values in the records below, which so may change with the code.
    """

    now: float
    wall: float
    load: tuple[str, ...]
    demand: tuple[str, ...]
    rates: tuple[str, ...]


class InstanceRecord(FlightRecord, frozen=True):
    """From here on this number is this instance."""

    number: int
    name: str


class ModelRecord(FlightRecord, frozen=True):
    """A model on a device."""

    number: int
    device: DeviceModel
    shape: ModelShape


class TimesRecord(FlightRecord, frozen=True):
    """What predicts an instance's steps from here on."""

    instance: int
    model: int
    factors: dict[str, float]


class LinksRecord(FlightRecord, frozen=True):
    """To whom an instance can hand over from here on, and why not to others."""

    instance: int
    peers: list[int]
    unlinked: dict[str, str]


class LoadRecord(FlightRecord, frozen=True):
    """An instance's load from here on."""

    instance: int
    values: list[Any]


class DemandRecord(FlightRecord, frozen=True):
    """
    Attributes:
        loads: of the hits, by tier; older recordings have none, or tokens of one tier.
    """

    number: int
    key: Key
    values: list[Any]
    hits: dict[int, int]
    exclude: list[int]
    loads: dict[int, dict[str, int] | int] = msgspec.field(default_factory=dict)


class HeldRecord(FlightRecord, frozen=True):
    now: float
    demand: int
    until: float


class MoveRecord(FlightRecord, frozen=True):
    """
    Attributes:
        kind: "move", "start" or "stop"; the last has no role.
    """

    kind: str
    name: str
    role: Role | None
    reason: str


class MovedRecord(FlightRecord, frozen=True):
    now: float
    move: MoveRecord


class ScaledRecord(FlightRecord, frozen=True):
    """
    Attributes:
        verdicts: their role, serving, starting, more, reason and outcome.
    """

    now: float
    verdicts: list[tuple[Role, int, int, int, str, str]]


class DecidedRecord(FlightRecord, frozen=True):
    """
    Attributes:
        instances, waiting: how many there were.
        shown: instances of the view, in its order.
        demand, queue, offline: by their numbers.
        prefill, decode: instances.
    """

    now: float
    instances: int
    waiting: int
    shown: list[int]
    demand: int
    queue: list[int]
    offline: list[int]
    rates: list[Any]
    prefill: int
    decode: int | None
    policy: str
    reason: str
    costs: dict[Stage, dict[int, float]]
    predicted_ttft: float | None
    moves: list[MoveRecord]
    way: Way | None = None
    media_route: str = ""
    images: list[ImageWay] = msgspec.field(default_factory=list)


class RelocatedRecord(FlightRecord, frozen=True):
    now: float
    request_id: str
    frontend: str
    at: str
    to: str
    reason: str


class EndedRecord(FlightRecord, frozen=True):
    now: float
    request_id: str
    frontend: str
    outcome: Outcome | None
    refused: str = ""


Definition = InstanceRecord | ModelRecord | TimesRecord | LinksRecord | LoadRecord | DemandRecord
AnyRecord = (
    BeganRecord | Definition | HeldRecord | MovedRecord | ScaledRecord | DecidedRecord | RelocatedRecord | EndedRecord
)
to_bytes = msgspec.msgpack.Encoder().encode
from_bytes = msgspec.msgpack.Decoder(AnyRecord).decode


def _names(kind: Any, without: Set[str]) -> tuple[str, ...]:
    return tuple(name for name in kind.__struct_fields__ if name not in without)


LOAD = _names(InstanceLoad, {"name", "times", "peers", "unlinked"})
DEMAND = _names(Demand, {"key", "hits", "loads", "lenders", "exclude", "brought", "brought_in"})
RATES = _names(Rates, frozenset())
_verdict_values = attrgetter(*Verdict.__struct_fields__)
_load_values, _demand_values, _rates_values = attrgetter(*LOAD), attrgetter(*DEMAND), attrgetter(*RATES)


class RecordEncoder:
    """Entries to records. Keeps what was written last: of every instance, and of the demands of the last view."""

    def __init__(self) -> None:
        self._began = False

    def begin(self, now: float, wall: float) -> BeganRecord:
        """The first record, and again the first of every further file."""
        self._began = True
        self._instances: dict[str, int] = {}
        self._models: dict[tuple[DeviceModel, ModelShape], int] = {}
        self._times: dict[str, StepTime] = {}
        self._links: dict[str, tuple[Set[str], Mapping[str, str]]] = {}
        self._loads: dict[str, InstanceLoad] = {}
        self._demands: dict[int, tuple[Demand, int]] = {}  # id of the object, which is kept alive beside its number
        self._demands_written = 0
        return BeganRecord(now, wall, LOAD, DEMAND, RATES)

    def encode(self, entry: Entry) -> list[AnyRecord]:
        """The records of an entry, of which it is the last."""
        assert self._began
        out: list[AnyRecord] = []
        match entry:
            case DecidedEntry():
                out.append(self._decided(entry, out))
            case HeldEntry(now, request_id, frontend, demand, until):
                assert demand.key == (frontend, request_id)
                out.append(HeldRecord(now, self._demand(demand, out), until))
            case MovedEntry(now, move):
                out.append(MovedRecord(now, _move_record(move)))
            case ScaledEntry(now, verdicts):
                out.append(ScaledRecord(now, [_verdict_values(verdict) for verdict in verdicts]))
            case RelocatedEntry(now, request_id, frontend, at, to, reason):
                out.append(RelocatedRecord(now, request_id, frontend, at, to, reason))
            case EndedEntry(now, request_id, frontend, outcome, refused):
                out.append(EndedRecord(now, request_id, frontend, outcome, refused))
        return out

    def _decided(self, entry: DecidedEntry, out: list[AnyRecord]) -> DecidedRecord:
        view, decision = entry.view, entry.decision
        assert entry.demand.key == decision.key == (entry.frontend, entry.request_id)
        whole = len(view.instances) <= WHOLE
        chosen = {decision.prefill} | ({decision.decode} if decision.decode is not None else set())
        costs = {stage: _best(held, chosen, whole) for stage, held in decision.costs.items()}
        shown = view.instances if whole else _shown(view, chosen.union(*costs.values()))
        names = {load.name for load in shown}
        for load in shown:
            self._load(load, names, out)
        queue = [self._demand(demand, out) for demand in view.queue[:QUEUE]]
        offline = [self._demand(demand, out) for demand in view.offline[:QUEUE]]
        number = self._demand(entry.demand, out)
        here = {*queue, *offline}
        self._demands = {key: known for key, known in self._demands.items() if known[1] in here}
        return DecidedRecord(
            now=entry.now,
            instances=entry.instances,
            waiting=entry.waiting,
            shown=[self._instances[load.name] for load in shown],
            demand=number,
            queue=queue,
            offline=offline,
            rates=list(_rates_values(view.rates)),
            prefill=self._instance(decision.prefill, out),
            decode=None if decision.decode is None else self._instance(decision.decode, out),
            policy=decision.policy,
            reason=decision.reason,
            costs={
                stage: {self._instance(name, out): float(cost) for name, cost in held.items()}
                for stage, held in costs.items()
            },
            predicted_ttft=decision.predicted_ttft,
            moves=[_move_record(move) for move in decision.moves],
            way=decision.way,
            media_route=decision.media_route,
            images=list(decision.images),
        )

    def _instance(self, name: str, out: list[AnyRecord]) -> int:
        number = self._instances.get(name)
        if number is None:
            number = self._instances[name] = len(self._instances)
            out.append(InstanceRecord(number, name))
        return number

    def _load(self, load: InstanceLoad, shown: Set[str], out: list[AnyRecord]) -> None:
        """What differs from what was written of this instance before. Objects that are the same are equal."""
        name = load.name
        number = self._instance(name, out)
        if self._times.get(name) is not load.times:
            self._times[name] = load.times
            out.append(TimesRecord(number, self._model(load.times, out), dict(load.times.factors)))
        peers, unlinked = load.peers & shown, load.unlinked
        if self._links.get(name, (frozenset(), {})) != (peers, unlinked):
            self._links[name] = frozenset(peers), dict(unlinked)
            out.append(LinksRecord(number, [self._instance(peer, out) for peer in sorted(peers)], dict(unlinked)))
        if self._loads.get(name) is not load:
            self._loads[name] = load
            out.append(LoadRecord(number, list(_load_values(load))))

    def _model(self, times: StepTime, out: list[AnyRecord]) -> int:
        key = times.device, times.shape
        number = self._models.get(key)
        if number is None:
            number = self._models[key] = len(self._models)
            out.append(ModelRecord(number, *key))
        return number

    def _demand(self, demand: Demand, out: list[AnyRecord]) -> int:
        known = self._demands.get(id(demand))
        if known is not None:
            return known[1]
        number, self._demands_written = self._demands_written, self._demands_written + 1
        self._demands[id(demand)] = demand, number
        hits = demand.hits
        if len(hits) > HITS:
            hits = dict(nlargest(HITS, hits.items(), key=lambda hit: hit[1]))
        out.append(
            DemandRecord(
                number,
                demand.key,
                list(_demand_values(demand)),
                {self._instance(name, out): tokens for name, tokens in hits.items()},
                [self._instance(name, out) for name in sorted(demand.exclude)],
                {self._instance(name, out): dict(tiers) for name, tiers in demand.loads.items() if name in hits},
            )
        )
        return number


def _best(costs: Mapping[str, float], chosen: Set[str], whole: bool) -> Mapping[str, float]:
    if whole:
        return costs
    best = {*nsmallest(BEST, costs, key=costs.__getitem__), *(costs.keys() & chosen)}
    return {name: cost for name, cost in costs.items() if name in best}


def _shown(view: ClusterView, named: Set[str]) -> Sequence[InstanceLoad]:
    """Those that are named, and when the policy named no more than it chose, some others."""
    spare = max(0, BEST - len(named))
    shown = []
    for load in view.instances:
        if load.name in named or spare > 0:
            spare -= load.name not in named
            shown.append(load)
    return shown


def _move_record(move: FleetChange) -> MoveRecord:
    role = None if isinstance(move, Stop | Restart) else move.role
    return MoveRecord(type(move).__name__.lower(), move.name, role, move.reason)


def _move(record: MoveRecord) -> FleetChange:
    if record.kind == "restart":
        return Restart(name=record.name, reason=record.reason)
    if record.role is None:
        return Stop(name=record.name, reason=record.reason)
    kind = Start if record.kind == "start" else Move
    return kind(name=record.name, role=record.role, reason=record.reason)


def _verdict(role: Role, serving: int, starting: int, more: int, reason: str, outcome: str) -> Verdict:
    return Verdict(role=role, serving=serving, starting=starting, more=more, reason=reason, outcome=outcome)


class RecordDecoder:
    """Records to entries."""

    def __init__(self) -> None:
        self._began: BeganRecord | None = None

    def decode(self, records: Iterable[AnyRecord]) -> Iterator[tuple[float, Entry]]:
        """Every entry, with its time in seconds since 1970, UTC. Raises ValueError on records that make no sense."""
        for record in records:
            if isinstance(record, BeganRecord):
                self._begin(record)
            elif self._began is None:
                raise ValueError("a recording without a beginning")
            else:
                try:
                    entry = self._take(record, self._began)
                except (KeyError, TypeError, AttributeError) as error:
                    raise ValueError(f"a {type(record).__name__} that does not fit: {error!r}") from None
                if entry is not None:
                    yield self._began.wall + (entry.now - self._began.now), entry

    def _begin(self, record: BeganRecord) -> None:
        self._began = msgspec.structs.replace(record, load=tuple(OLD_NAMES.get(name, name) for name in record.load))
        self._instances: dict[int, str] = {}
        self._models: dict[int, ModelRecord] = {}
        self._times: dict[int, StepTime] = {}
        self._links: dict[int, LinksRecord] = {}
        self._loads: dict[int, dict[str, Any]] = {}
        self._views: dict[int, InstanceLoad] = {}  # put together of the three above, until one of them changes
        self._demands: dict[int, Demand] = {}

    def _take(self, record: AnyRecord, began: BeganRecord) -> Entry | None:
        match record:
            case InstanceRecord(number, name):
                self._instances[number] = name
            case ModelRecord(number):
                self._models[number] = record
            case TimesRecord(instance, model, factors):
                self._times[instance] = StepTime(self._models[model].device, self._models[model].shape, factors)
                self._views.pop(instance, None)
            case LinksRecord(instance):
                self._links[instance] = record
                self._views.pop(instance, None)
            case LoadRecord(instance, values):
                self._loads[instance] = _known(began.load, values, LOAD)
                self._views.pop(instance, None)
            case DemandRecord(number):
                self._demands[number] = self._demand(record, began)
            case HeldRecord(now, number, until):
                demand = self._demands[number]
                frontend, request_id = demand.key
                return HeldEntry(now, request_id, frontend, demand, until)
            case MovedRecord(now, move):
                return MovedEntry(now, _move(move))
            case ScaledRecord(now, verdicts):
                return ScaledEntry(now, [_verdict(*values) for values in verdicts])
            case DecidedRecord():
                return self._decided(record, began)
            case RelocatedRecord(now, request_id, frontend, at, to, reason):
                return RelocatedEntry(now, request_id, frontend, at, to, reason)
            case EndedRecord(now, request_id, frontend, outcome, refused):
                return EndedEntry(now, request_id, frontend, outcome, refused)
        return None

    def _demand(self, record: DemandRecord, began: BeganRecord) -> Demand:
        return Demand(
            key=record.key,
            hits={self._instances[number]: tokens for number, tokens in record.hits.items()},
            loads={
                self._instances[number]: {"host": tiers} if isinstance(tiers, int) else tiers
                for number, tiers in record.loads.items()
            },
            exclude=frozenset(self._instances[number] for number in record.exclude),
            **_known(began.demand, record.values, DEMAND),
        )

    def _decided(self, record: DecidedRecord, began: BeganRecord) -> DecidedEntry:
        demand = self._demands[record.demand]
        view = ClusterView(
            now=record.now,
            instances=tuple(self._view(number) for number in record.shown),
            queue=tuple(self._demands[number] for number in record.queue),
            offline=tuple(self._demands[number] for number in record.offline),
            rates=Rates(**_known(began.rates, record.rates, RATES)),
        )
        decision = Decision(
            key=demand.key,
            prefill=self._instances[record.prefill],
            decode=None if record.decode is None else self._instances[record.decode],
            policy=record.policy,
            reason=record.reason,
            costs={
                stage: {self._instances[number]: cost for number, cost in held.items()}
                for stage, held in record.costs.items()
            },
            predicted_ttft=record.predicted_ttft,
            moves=tuple(move for move in map(_move, record.moves) if isinstance(move, Move)),
            way=record.way,
            media_route=record.media_route,
            images=tuple(record.images),
        )
        here = {record.demand, *record.queue, *record.offline}
        self._demands = {number: known for number, known in self._demands.items() if number in here}
        frontend, request_id = demand.key
        return DecidedEntry(record.now, request_id, frontend, demand, decision, view, record.instances, record.waiting)

    def _view(self, number: int) -> InstanceLoad:
        if number not in self._views:
            links = self._links.get(number)
            self._views[number] = InstanceLoad(
                name=self._instances[number],
                times=self._times[number],
                peers=frozenset() if links is None else frozenset(self._instances[peer] for peer in links.peers),
                unlinked={} if links is None else links.unlinked,
                **self._loads[number],
            )
        return self._views[number]


def _known(names: Sequence[str], values: Sequence[Any], known: Sequence[str]) -> dict[str, Any]:
    """By name, without what this version does not know."""
    return {name: value for name, value in zip(names, values, strict=True) if name in known}
