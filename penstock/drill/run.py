"""The drill: a run that nothing disturbs, then the same requests again under faults."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import yaml

from penstock.bench.client import Call, Client
from penstock.bench.dataset import Dataset
from penstock.bench.metrics import ClientRecord
from penstock.bench.serve import Bench, RequestOptions, closed_loop, open_loop
from penstock.core.errors import PenstockError
from penstock.drill.faults import Fault, Safety, Strike, is_process, schedule
from penstock.drill.holdings import Holdings, Marks, grown, look, more_than, own_memory
from penstock.drill.hosts import Hosts
from penstock.drill.launched import PORT, Deployed, Expected, fetch, states
from penstock.drill.outcome import Outcome, Struck, judge
from penstock.drill.strikes import strike_one
from penstock.service.programs import KV_POOL
from penstock.workload.requests import WorkRequest, limit_context, unrelated

LOOK = 0.2  # seconds between two looks at the processes
WEIGH = 2.0  # seconds between two looks at their memory
STARTING = 300.0  # seconds that a deployment has until all of it serves
RETURNING = 60.0  # seconds from the end of a fault until its target serves again
QUIET = 45.0  # seconds from the last answer until nothing is held any more
PROBE = 4  # requests for each that runs at once, of which the capacity is measured
WARM_UPS = 8  # requests for each frontend, so that everything is open that ever will be

Tell = Callable[[str, float, float], None]  # what is done, how much of it, of how much


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """
    Attributes:
        dataset: without a rate and a number of requests.
        rate: requests per second; None for a share of the capacity.
        share: of the requests per second that the undisturbed deployment completes when it is never short of any.
        temperature: of sampling; each request has a seed of its own.
        at_once: requests that run at once on each instance while the undisturbed run is made.
    """

    dataset: Dataset
    rate: float | None
    share: float
    temperature: float
    at_once: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Drill:
    """What a file asks for.

    Attributes:
        deployments: content of a deployment file for each host, without how the hosts find each other.
        expected: what runs.
        meets: target -> instances whose streams it meets; none for what may meet all.
        disks: whether hosts have disks of their own.
        secret: of the deployment, where there are several hosts.
        drain_timeout: seconds that its frontends wait for streams at their end.
        api_key: that clients need, if any.
        duration: seconds of load.
        most_recovery_ms: that the 99th percentile of recovery may be; None for any.
    """

    name: str
    deployments: tuple[Mapping[str, Any], ...]
    expected: Expected
    meets: Mapping[str, frozenset[str]]
    disks: bool
    secret: str | None
    drain_timeout: float
    api_key: str | None
    load: Load
    duration: float
    seed: int
    faults: tuple[Fault, ...]
    safety: Safety
    most_recovery_ms: float | None

    @property
    def strikes(self) -> tuple[Strike, ...]:
        return schedule(self.faults, self.safety, self.duration, self.seed)


@dataclass(slots=True, kw_only=True)
class Result:
    """Times are seconds on the clients' clock.

    Attributes:
        began: when the load did.
        rate, capacity: requests per second; the latter None where it was not measured.
        right, records: of the undisturbed run and of the other.
        states: process -> (time, what it does) whenever that changes.
        memory: process -> (time, process id, bytes).
        leaks: one line on each thing that is held or left and should not be.
        wrong: one line on everything else that went wrong.
        raised: exceptions in the log.
    """

    began: float
    rate: float
    capacity: float | None
    right: list[ClientRecord]
    records: list[ClientRecord]
    struck: list[Struck]
    outcome: Outcome
    states: dict[str, list[tuple[float, str]]]
    memory: dict[str, list[tuple[float, int, int]]]
    leaks: list[str]
    wrong: list[str]
    raised: list[str]


@dataclass(slots=True, kw_only=True)
class Place:
    """Where deployments of this drill run.

    Attributes:
        folder: for the files of a drill: what is started, and what it logs.
        temporary: for those of the deployment itself; short, as there are sockets in it.
        environment: of all processes.
    """

    folder: Path
    temporary: Path
    environment: Mapping[str, str]


@contextlib.asynccontextmanager
async def deployed(drill: Drill, place: Place, named: str) -> AsyncIterator[Deployed]:
    """A deployment that serves; it is ended at the end, if it has not been before.

    Args:
        named: of its log.
    """
    with Hosts(len(drill.deployments), place.temporary if drill.disks else None) as hosts:
        files = [place.folder / f"{named}{f'-{host}' if host else ''}.yaml" for host in range(len(drill.deployments))]
        for host, (file, content) in enumerate(zip(files, drill.deployments, strict=True)):
            file.write_text(yaml.safe_dump(_placed(content, host, hosts, drill, place), sort_keys=False))
        environment = {**place.environment, "TMPDIR": str(place.temporary)}
        deployment = Deployed(files, hosts, environment, place.folder / f"{named}.log", drill.expected)
        try:
            await deployment.serves(STARTING)
            yield deployment
        finally:
            await deployment.stop(drill.drain_timeout + STARTING)


def _placed(content: Mapping[str, Any], host: int, hosts: Hosts, drill: Drill, place: Place) -> dict[str, Any]:
    """A host's deployment file."""
    settings = {name.replace("_", "-"): value for name, value in content.items()}
    settings |= {"log-format": "json", "log-level": "info"}
    if "flight-recorder" in settings:  # on the disk that may be full, and no file of another run
        settings["flight-recorder"] = str((place.temporary if drill.disks else place.folder) / "recorder")
    if len(hosts.addresses) > 1:
        settings["host"] = hosts.addresses[0]
        settings["cluster"] = {"host": hosts.addresses[host], "port": PORT}
    return settings


class _Clients:
    """One for each frontend; streams take turns."""

    def __init__(self, clients: Sequence[Client]) -> None:
        self._clients = clients

    @classmethod
    @contextlib.asynccontextmanager
    async def of(cls, deployment: Deployed, key: str | None, timeout: float) -> AsyncIterator[_Clients]:
        async with contextlib.AsyncExitStack() as stack:
            made = [Client(url, timeout=timeout, api_key=key, keep_answers=True) for url in deployment.urls]
            yield cls([await stack.enter_async_context(client) for client in made])

    @property
    def first(self) -> Client:
        return self._clients[0]

    async def send(self, call: Call, due: float) -> ClientRecord:
        return await self._clients[call.number % len(self._clients)].send(call, due)


def _calls(bench: Bench, requests: Sequence[WorkRequest], seed: int) -> list[Call]:
    """Each request with a seed of its own, and named in the log."""
    calls = []
    for request in requests:
        body = bench.body(request, seed) | {"seed": (seed + request.number) % 2**63}
        lengths = request.prompt_tokens, request.output_tokens
        calls.append(Call(request.number, request.at, msgspec.json.encode(body), *lengths, name_of(request.number)))
    return calls


def name_of(stream: int) -> str:
    """Of a request, in the log."""
    return f"drill-{stream}"


# --- the undisturbed run


@dataclass(frozen=True, slots=True)
class _Reference:
    rate: float
    capacity: float | None
    requests: list[WorkRequest]
    records: list[ClientRecord]


async def run(drill: Drill, place: Place, tell: Tell) -> Result:
    """Raises PenstockError when the deployment cannot even be run undisturbed."""
    tell("starting", 0, 1)
    async with deployed(drill, place, "undisturbed") as deployment:
        reference = await _undisturbed(drill, deployment, tell)
    if failed := [record for record in reference.records if record.error is not None]:
        what = f"{len(failed)} of {len(reference.records)} requests failed although nothing disturbed them"
        raise PenstockError(f"{what}: {failed[0].error}: {failed[0].detail}")
    tell("starting again", 0, 1)
    async with deployed(drill, place, "disturbed") as deployment:
        return await _Disturbed(drill, place, deployment, reference, tell).run()


async def _undisturbed(drill: Drill, deployment: Deployed, tell: Tell) -> _Reference:
    """As many requests at once as are good for throughput: their tokens do not depend on it."""
    load = drill.load
    async with _Clients.of(deployment, drill.api_key, drill.duration + STARTING) as clients:
        bench = await _connected(clients, load)
        at_once = load.at_once * len(drill.expected.instances)
        rate, capacity = load.rate, None
        if rate is None:
            capacity = await _capacity(bench, clients, drill, at_once, tell)
            rate = load.share * capacity
        count = max(1, math.ceil(rate * drill.duration * 1.2))  # arrivals are drawn: so that they last
        made = replace(load.dataset, count=count, request_rate=rate, seed=drill.seed).build()
        requests = _fitting(bench, [request for request in made if request.at < drill.duration])
        done = 0

        def count_one(_: ClientRecord) -> None:
            nonlocal done
            done += 1
            tell("undisturbed", done, len(requests))

        calls = _calls(bench, requests, drill.seed)
        records = await closed_loop(calls, clients.send, clients.first.clock, concurrency=at_once, progress=count_one)
    return _Reference(rate, capacity, requests, records)


async def _connected(clients: _Clients, load: Load) -> Bench:
    return await Bench.connect(clients.first, RequestOptions(temperature=load.temperature))


def _fitting(bench: Bench, requests: Sequence[WorkRequest]) -> list[WorkRequest]:
    longest = bench.model.max_model_len
    return list(requests) if longest is None else limit_context(requests, longest)[0]


async def _capacity(bench: Bench, clients: _Clients, drill: Drill, at_once: int, tell: Tell) -> float:
    """Requests per second, of requests that share nothing with those of the drill."""
    count = PROBE * at_once
    made = replace(drill.load.dataset, count=count, request_rate=None, seed=drill.seed + 1).build()
    calls = _calls(bench, _fitting(bench, made), drill.seed + 1)
    done = 0

    def count_one(_: ClientRecord) -> None:
        nonlocal done
        done += 1
        tell("measuring the capacity", done, count)

    records = await closed_loop(calls, clients.send, clients.first.clock, concurrency=at_once, progress=count_one)
    ends = sorted(record.end for record in records if record.error is None)
    if len(ends) < len(records):
        failed = next(record for record in records if record.error is not None)
        raise PenstockError(f"the capacity cannot be measured, a request failed: {failed.error}: {failed.detail}")
    begin, end = ends[at_once // 2], ends[-at_once]  # neither the start, when all send at once, nor the end
    return (len(ends) - at_once - at_once // 2) / max(end - begin, 1e-3)


# --- the other one


@dataclass(slots=True)
class _Disturbed:
    drill: Drill
    place: Place
    deployment: Deployed
    reference: _Reference
    tell: Tell
    struck: list[Struck] = field(default_factory=list)
    states: dict[str, list[tuple[float, str]]] = field(default_factory=dict)
    memory: dict[str, list[tuple[float, int, int]]] = field(default_factory=dict)
    began: float = 0.0
    _ready: set[str] = field(default_factory=set)
    _broken: dict[str, int] = field(default_factory=dict)  # target -> strikes under way
    _ended: int = 0
    _failed: int = 0

    async def run(self) -> Result:
        drill, deployment = self.drill, self.deployment
        patience = drill.duration + STARTING
        async with _Clients.of(deployment, drill.api_key, patience) as clients:
            bench = await _connected(clients, drill.load)
            calls = _calls(bench, self.reference.requests, drill.seed)
            await self._warm_up(bench, clients)
            before = await self._holdings(lambda held: not held.busy)
            watch = asyncio.create_task(self._watch())
            weigh = asyncio.create_task(self._weigh())
            try:
                records = await self._under_load(calls, clients)
                wrong = await self._whole_again()
            finally:
                for task in (watch, weigh):
                    task.cancel()
                await asyncio.gather(watch, weigh, return_exceptions=True)
        self.tell("waiting until nothing is held", 0, 1)
        links = len(drill.expected.instances)
        after = await self._holdings(lambda held: not more_than(before, held, links))
        leaks = more_than(before, after, links) + grown(self.memory)
        return await self._ended_with(records, leaks, wrong)

    async def _ended_with(self, records: list[ClientRecord], leaks: list[str], wrong: list[str]) -> Result:
        drill, deployment = self.drill, self.deployment
        folders = {deployment.hosts.seen(host, self.place.temporary) for host in range(len(drill.deployments))}
        marks = Marks.of(deployment.pids(), folders)
        if why := deployment.ended():
            wrong.append(why)
        else:
            self.tell("stopping", 0, 1)
        wrong += await deployment.stop(drill.drain_timeout + STARTING)
        leaks += await asyncio.to_thread(marks.left)
        routes = {record.number: deployment.said.routes.get(name_of(record.number), ()) for record in records}
        outcome = judge(records, self.reference.records, self.struck, routes, drill.meets, drill.expected.frontends)
        return Result(
            began=self.began,
            rate=self.reference.rate,
            capacity=self.reference.capacity,
            right=self.reference.records,
            records=records,
            struck=self.struck,
            outcome=outcome,
            states=self.states,
            memory=self.memory,
            leaks=leaks,
            wrong=wrong,
            raised=deployment.said.raised,
        )

    async def _warm_up(self, bench: Bench, clients: _Clients) -> None:
        count = WARM_UPS * self.drill.expected.frontends
        calls = _calls(bench, unrelated(self.reference.requests, count), self.drill.seed)
        records = await open_loop(calls, clients.send, clients.first.clock)
        if failed := [record for record in records if record.error is not None]:
            raise PenstockError(f"a request before the drill failed: {failed[0].error}: {failed[0].detail}")

    async def _holdings(self, enough: Callable[[Holdings], bool]) -> Holdings:
        """What is held as soon as that is little enough, or after `QUIET` seconds."""
        deadline = time.monotonic() + QUIET
        while True:
            told = self.deployment.settings()
            engines = {
                name: self._seen(name, told[name]["address"]) for name in self.drill.expected.instances & told.keys()
            }
            pools = {name: self._seen(name, each["path"]) for name, each in told.items() if name.startswith(KV_POOL)}
            held = await asyncio.to_thread(partial(look, self.deployment.pids(), engines, pools, self.drill.secret))
            if enough(held) or time.monotonic() > deadline:
                return held
            await asyncio.sleep(LOOK)

    def _seen(self, name: str, address: str) -> str:
        """Where this process finds a socket of another one's, whose address or path is given."""
        kind, mark, path = address.rpartition("ipc://")
        return f"{kind}{mark}{self.deployment.hosts.seen(self.deployment.host_of(name), Path(path))}"

    # --- the load and the faults beside it

    async def _under_load(self, calls: Sequence[Call], clients: _Clients) -> list[ClientRecord]:
        clock = clients.first.clock
        self.began = clock.now()

        def count_one(record: ClientRecord) -> None:
            self._ended += 1
            self._failed += record.error is not None

        self.struck = [Struck(strike) for strike in self.drill.strikes]
        tasks = [asyncio.create_task(self._strike(each)) for each in self.struck]
        try:
            records = await open_loop(calls, clients.send, clock, progress=count_one)
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)  # what was done is undone by then
        return records

    async def _strike(self, struck: Struck) -> None:
        strike, safety = struck.strike, self.drill.safety
        await asyncio.sleep(max(0.0, self.began + strike.at - time.monotonic()))
        latest = self.began + self.drill.duration - strike.lasts
        while not safety.allows(strike.target, self._broken, self.drill.expected.instances - self._ready):
            if time.monotonic() > latest:
                struck.why = "too much was broken already"
                return
            await asyncio.sleep(LOOK)

        def begun() -> None:
            struck.began = time.monotonic()

        self._broken[strike.target] = 1
        try:
            earlier = self.deployment.pids().get(strike.target)
            struck.why = await strike_one(self.deployment, strike, begun)
            if struck.began is not None:
                await self._back(struck, earlier)
        finally:
            del self._broken[strike.target]

    async def _back(self, struck: Struck, earlier: int | None) -> None:
        """Note when the target runs again, and when it serves again, within `RETURNING` seconds.

        Args:
            earlier: process id that it had.
        """
        target, killed = struck.strike.target, struck.strike.kind in ("kill", "unmount")
        deadline = time.monotonic() + RETURNING
        while time.monotonic() < deadline:
            pid = self.deployment.pids().get(target)
            if not is_process(target) or (pid is not None and not (killed and pid == earlier)):
                struck.ended = struck.ended or time.monotonic()
                if await self._serves(target):
                    struck.back = time.monotonic()
                    return
            await asyncio.sleep(LOOK / 4)

    async def _serves(self, target: str) -> bool:
        taken = self.drill.safety.breaks[target]
        for number, url in enumerate(self.deployment.urls):
            if target == f"frontend-{number}" or not target.startswith("frontend-"):
                try:
                    await fetch(url + "/ready")
                except PenstockError:
                    return False
                return taken <= await states(url, ready=True)
        return False

    async def _whole_again(self) -> list[str]:
        """What has not come back, once everything had time to."""
        self.tell("waiting until all serve", 0, 1)
        deadline = time.monotonic() + RETURNING
        missing: frozenset[str] = self.drill.expected.instances
        while missing and time.monotonic() < deadline and not self.deployment.ended():
            missing = self.drill.expected.instances - await self._known_ready()
            await asyncio.sleep(LOOK)
        return [f"{name} serves no more" for name in sorted(missing)]

    async def _known_ready(self) -> set[str]:
        """Instances that some frontend that answers calls ready."""
        for url in self.deployment.urls:
            if found := await states(url, ready=True):
                return found
        return set()

    # --- what is seen of it

    async def _watch(self) -> None:
        while True:
            pids = self.deployment.pids()
            self._ready = await self._known_ready() or self._ready  # a frontend that is late to answer says nothing new
            now = time.monotonic()
            names = {*pids, *self.states, *self.drill.expected.instances}
            for name in names:
                state = "gone" if name not in pids else "serves"
                if name in self.drill.expected.instances and state == "serves" and name not in self._ready:
                    state = "starts"
                known = self.states.setdefault(name, [])
                if not known or known[-1][1] != state:
                    known.append((now, state))
            if self.began:
                running = sum(call.at <= now - self.began for call in self.reference.requests) - self._ended
                under_way = ", ".join(sorted(self._broken)) or "nothing"
                said = f"{running} run, {self._ended} ended, {self._failed} failed; broken: {under_way}"
                self.tell(said, min(now - self.began, self.drill.duration), self.drill.duration)
            await asyncio.sleep(LOOK)

    async def _weigh(self) -> None:
        while True:
            pids, now = self.deployment.pids(), time.monotonic()
            sizes = await asyncio.to_thread(lambda running: [*map(own_memory, running)], [*pids.values()])
            for name, size in zip(pids, sizes, strict=True):
                if size:
                    self.memory.setdefault(name, []).append((now, pids[name], size))
            await asyncio.sleep(WEIGH)
