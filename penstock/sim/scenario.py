"""A scenario: instances, policy, traffic, limits and failures, from one YAML file.

The allowed values of each setting are in the tables given to `parse`, which the command line makes of the same options
as its flags. This module knows the sections, and which settings are compatible.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import yaml

from penstock.core.errors import ConfigError
from penstock.core.layout import windows_of
from penstock.core.plan import BLOCK_TOKENS
from penstock.core.wire.engine import Role
from penstock.core.wire.handoff import EmbeddingPart, PeerMessage
from penstock.kv.groups import Windows, most_held
from penstock.sched.cluster.startup import StartSeconds
from penstock.sched.local.limits import sized, tier_bandwidth, tier_blocks
from penstock.sched.local.policy.base import StepLimit
from penstock.sched.steptime import DeviceModel, ModelShape, StepTime
from penstock.service.settings_file import Setting, SettingsFile, Spot
from penstock.sim.baselines import POLICIES
from penstock.sim.wires import TransportModel
from penstock.sim.workload import SLO, Offline, Synthetic, Task, Workload

PREFIX = "modelled:"
SECTIONS = ("workload", "slo", "engine", "instances", "layouts", "scaling", "status-reports", "transport", "failures")
SOURCES = ("trace", "synthetic", "tasks")  # of online requests


@dataclass(frozen=True, slots=True, kw_only=True)
class ScenarioTables:
    """The settings of each section; see `parse`.

    Attributes:
        top: description, policy, live-roles, seed, target, latency-ms.
        tasks: of each entry in that list, as for `failures`.
        engine: of every instance.
        instances: of a group besides those: name, count, role.
        start_paths: seconds to start an instance by another path than from disk.
        load_device: what a device can do, by its name or file; raises ConfigError.
        load_factors: (the same name, a model) -> `StepTime.factors` where that model's steps were measured there.
        load_geometry: a model, by its name or folder; raises ConfigError.
    """

    top: Sequence[Setting]
    workload: Sequence[Setting]
    synthetic: Sequence[Setting]
    tasks: Sequence[Setting]
    offline: Sequence[Setting]
    slo: Sequence[Setting]
    engine: Sequence[Setting]
    instances: Sequence[Setting]
    scaling: Sequence[Setting]
    start_paths: Sequence[Setting]
    status_reports: Sequence[Setting]
    transport: Sequence[Setting]
    failures: Sequence[Setting]
    load_device: Callable[[str], DeviceModel]
    load_factors: Callable[[str, ModelShape], Mapping[str, float]]
    load_geometry: Callable[[str], ModelShape]


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceGroup:
    """Instances that are alike.

    Attributes:
        times: of its steps, without noise; with factors where steps were measured; policies and schedulers
            do not know them, but learn them.
        num_blocks: of KV, for each instance.
        host_blocks, disk_blocks: for each, of tiers of KV in its host's memory and on a disk; 0 is none.
        remote_blocks: of a store that all share; 0 is none.
        disk_bandwidth, remote_bandwidth: bytes per second there and back, each by itself, of each instance.
        token_budget: tokens in one step.
        limit: of a step's time.
        noise: standard deviation of a step's time, relative to it.
        scheduling_policy: a name in `baselines.ENGINE_POLICIES`; None is what its policy's bundle has.
        step_time_error: factor by which steps are believed to take longer than they do.
        devices: that each takes.
        encodes: decode instances look at the images of prompts that others prefill: the route "ED+P".
        stage_scheduling: images and prompts have steps within their limit; else a step has all images that wait.
    """

    name: str
    count: int
    role: Role
    device: str
    geometry: str
    times: StepTime
    num_blocks: int
    token_budget: int
    limit: StepLimit
    max_num_seqs: int
    max_model_len: int
    noise: float
    prefix_cache: bool
    host_blocks: int = 0
    disk_blocks: int = 0
    remote_blocks: int = 0
    disk_bandwidth: float = 1.0
    remote_bandwidth: float = 1.0
    kv_cache_dtype: str = "auto"
    scheduling_policy: str | None = None
    step_time_error: float = 1.0
    devices: int = 1
    encodes: bool = False
    stage_scheduling: bool = True

    @property
    def believed(self) -> DeviceModel:
        """What the device is taken for, by its own scheduler and by the master, before anything was measured."""
        return self.times.device.slowed(self.step_time_error)

    @property
    def instances(self) -> list[str]:
        """Their names."""
        return [f"{self.name}-{i}" for i in range(self.count)]

    @property
    def windows(self) -> Windows:
        """Of the groups of layers, each of which has blocks of its own."""
        return windows_of(self.times.shape.kv_groups)

    @property
    def tier_seconds(self) -> dict[str, float]:
        """Tier below the device -> what a block takes, either way."""
        ways = {
            "host": (self.host_blocks, self.times.device.host_bandwidth),
            "disk": (self.disk_blocks, self.disk_bandwidth),
            "remote": (self.remote_blocks, self.remote_bandwidth),
        }
        return {tier: self.block_bytes / bandwidth for tier, (blocks, bandwidth) in ways.items() if blocks}

    @property
    def block_bytes(self) -> int:
        return self.times.shape.block_bytes

    def sent_bytes(self, message: PeerMessage) -> int:
        """Of what comes with a message between instances: a block, or an embedding, here a byte for each token."""
        tower = self.times.shape.vision
        if isinstance(message, EmbeddingPart) and tower is not None:
            return len(message.data) * tower.token_bytes
        return self.block_bytes

    @property
    def whole_blocks(self) -> int:
        """Blocks of tokens of all groups, in sequences of the greatest length: what the others know."""
        most = most_held(self.windows, self.max_model_len, min(self.token_budget, self.max_model_len))
        return self.num_blocks * -(-self.max_model_len // BLOCK_TOKENS) // most

    @property
    def kept_blocks(self) -> float:
        """Blocks of tokens whose KV fits at most, if nothing is in a window."""
        return self.num_blocks / max(1, self.windows.count(None))


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """How many instances may serve, for policies that start and stop them; more are like the first group's.

    Attributes:
        start: seconds from the decision until one serves, by what its host offers.
        devices: that all instances may take together; None sets no such bound.
        interval: seconds between two decisions; None leaves it to the policy.
        cooldown_out, cooldown_in: seconds from one growth of a stage to the next, and from any change of it to a cut;
            likewise.
        per_host: instances that share a host, in the order of their names.
        warm_pool: processes without weights that wait on each host.
        warm_seconds: until one of them that was taken is replaced.
    """

    least: int
    most: int
    start: StartSeconds
    devices: int | None = None
    interval: float | None = None
    cooldown_out: float | None = None
    cooldown_in: float | None = None
    per_host: int = 8
    warm_pool: int = 0
    warm_seconds: float = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """An instance fails `at` a time, and restarts after `restart_after` seconds with an empty cache, or with what it
    left in a pool that all share; None is never. Where `slow` is given, its steps take so many times as long from then
    on, until it is restarted for that, which takes `restart_after` seconds."""

    instance: str
    at: float
    restart_after: float | None
    slow: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """
    Attributes:
        layouts: groups of instances by name; "" is the file's own.
        policy: a name in `baselines.POLICIES`.
        live_roles: whether roles change, whatever the policy.
        target: share of online requests that have to keep their targets.
        scaling: None when the instances that serve are always the same.
        latency: seconds that a message takes between frontend, master and instances.
        report_interval: seconds between an instance's snapshots while its load changes.
        slow_after: seconds of work after which a slow instance is restarted; 0 for never.
        report_delay: additional delay of its snapshots to the master, in seconds.
    """

    name: str
    description: str
    layouts: Mapping[str, tuple[InstanceGroup, ...]]
    policy: str
    live_roles: bool
    target: float
    workload: Workload
    scaling: Scaling | None
    latency: float
    report_interval: float
    report_delay: float
    transport: TransportModel
    failures: tuple[Failure, ...]
    slow_after: float
    seed: int

    @property
    def slo(self) -> SLO:
        """Of requests that have no task."""
        return self.workload.slo

    def choose(self, variant: str) -> tuple[str, tuple[InstanceGroup, ...]]:
        """Policy and groups of a variant "POLICY" or "POLICY@LAYOUT". Raises ConfigError."""
        policy, _, layout = variant.partition("@")
        layout = layout.replace("_", "-")
        if policy not in POLICIES:
            raise ConfigError(f"policy: {policy!r}, allowed are {', '.join(POLICIES)}", "policy")
        if layout not in self.layouts:
            named = ", ".join(name for name in self.layouts if name) or "none"
            raise ConfigError(f"layout: {layout!r}, {self.name} has {named}", "policy")
        groups = self.layouts[layout]
        names = [name for group in groups for name in group.instances]
        for failure in self.failures:
            if failure.instance not in names:
                raise ConfigError(f"layout: {layout!r} has no {failure.instance}, which is to fail", "policy")
        return policy, groups


def parse(name: str, text: str, tables: ScenarioTables) -> Scenario:
    """
    Args:
        name: of the file, for messages.

    Raises:
        ConfigError: one line "FILE:LINE: key.path: value, allowed is ..." for each mistake.
    """
    return _Parser(SettingsFile(name, text), tables).parse()


class _Parser:
    def __init__(self, file: SettingsFile, tables: ScenarioTables) -> None:
        self.file, self.tables = file, tables
        self.spots = file.section(file.root, [*_names(tables.top), *SECTIONS])

    def parse(self) -> Scenario:
        file, tables, spots = self.file, self.tables, self.spots
        for needed in ("workload", "instances"):
            if needed not in spots:
                file.complain(file.root, f"{needed}: missing, and there is no default")
        top = self._values(spots, tables.top)
        workload = self._workload()
        reports = self._section("status-reports", tables.status_reports)
        transport = self._section("transport", tables.transport)
        layouts = self._layouts()
        scaling = self._scaling(layouts)
        failures = self._failures(layouts[""])
        file.finish()
        return Scenario(
            name=file.name,
            description=top["description"],
            layouts=layouts,
            policy=top["policy"],
            live_roles=top["live_roles"],
            target=top["target"],
            workload=workload,
            scaling=scaling,
            latency=top["latency_ms"] / 1e3,
            report_interval=reports["every_ms"] / 1e3,
            report_delay=reports["delay_ms"] / 1e3,
            transport=TransportModel(
                kind=transport["kind"],
                bandwidth=transport["gbps"] * 1e9 / 8,
                latency=transport["latency_us"] / 1e6,
                lease=transport["lease"],
            ),
            failures=failures,
            slow_after=top["slow_after"],
            seed=top["seed"],
        )

    def _values(self, spots: Mapping[str, Spot], settings: Sequence[Setting]) -> dict[str, Any]:
        return {s.key: s.default for s in settings} | self.file.values(spots, settings)

    def _section(self, name: str, settings: Sequence[Setting]) -> dict[str, Any]:
        return self._values(self.file.section(self.spots.get(name), _names(settings)), settings)

    def _need(self, spot: Spot, spots: Mapping[str, Spot], names: Iterable[str]) -> None:
        for name in names:
            if name not in spots:
                self.file.complain(spot, f"{name} is missing, and there is no default")

    # --- workload

    def _workload(self) -> Workload:
        file, tables = self.file, self.tables
        spot = self.spots.get("workload")
        spots = file.section(spot, [*_names(tables.workload), "synthetic", "tasks", "offline"])
        values = self._values(spots, tables.workload)
        if spot is not None and sum(source in spots for source in SOURCES) != 1:
            file.complain(spot, f"exactly one of {', '.join(SOURCES)} is needed")
        synthetic = None
        if "synthetic" in spots:
            inner = file.section(spots["synthetic"], _names(tables.synthetic))
            synthetic = Synthetic(**self._values(inner, tables.synthetic))
        slo = self._slo("tasks" not in spots)
        tasks = self._tasks(spots.get("tasks"), slo, values["duration"])
        offline = self._offline(spots.get("offline"))
        for name in ("start", "spread", "chats"):
            if name in spots and "trace" not in spots:
                file.complain(spots[name], f"{spots[name].shown}, allowed only with a trace")
        for name in ("tasks", "tide"):
            if name in spots and values["duration"] is None:
                file.complain(spots[name], "given, and workload.duration is not: when would it end?")
        if values["vary"] == "offline" and (offline is None or offline.rate is None):
            file.complain(spots["vary"], "'offline', allowed only with workload.offline.rate")
        return Workload(synthetic=synthetic, slo=slo, tasks=tasks, offline=offline, **values)

    def _slo(self, needed: bool) -> SLO:
        """Of requests without a task."""
        if "slo" not in self.spots:
            if needed:
                self.file.complain(self.file.root, "slo: missing, and there is no default")
            return SLO()
        spots = self.file.section(self.spots["slo"], _names(self.tables.slo))
        self._need(self.spots["slo"], spots, _names(self.tables.slo))
        return _targets(self.file.values(spots, self.tables.slo), SLO())

    def _tasks(self, spot: Spot | None, slo: SLO, until: float | None) -> tuple[Task, ...]:
        file, tables = self.file, self.tables
        entries = file.items(spot)
        if spot is not None and not entries:
            file.complain(spot, "empty, allowed is a list of at least one task")
        tasks: list[Task] = []
        for entry in entries:
            spots = file.section(entry, _names(tables.tasks))
            needed = ["name", "rate", "prompt", "output"]
            self._need(entry, spots, needed if "slo" in self.spots else [*needed, "ttft-ms", "tpot-ms"])
            values = self._values(spots, tables.tasks)
            if until is not None and values["start"] >= until:
                allowed = f"allowed is less than the workload's duration of {until:g}"
                file.complain(spots["start"], f"{values['start']:g}, {allowed}")
            if values["name"] is not None and values["name"] in [task.name for task in tasks]:
                file.complain(spots["name"], f"a second task called {values['name']!r}, allowed is a name of its own")
            targets = {"ttft_ms": values.pop("ttft_ms"), "tpot_ms": values.pop("tpot_ms")}
            tasks.append(Task(slo=_targets(targets, slo), **values))
        return tuple(tasks)

    def _offline(self, spot: Spot | None) -> Offline | None:
        if spot is None:
            return None
        file, tables = self.file, self.tables
        spots = file.section(spot, _names(tables.offline))
        if ("rate" in spots) == ("backlog" in spots):
            file.complain(spot, "either rate or backlog is needed, and not both")
        values = self._values(spots, tables.offline)
        if values["like_online"]:
            for name in ("prompt", "prompt-sd", "output", "output-sd"):
                if name in spots:
                    file.complain(spots[name], "given, allowed only without like-online")
        return Offline(**values)

    # --- instances

    def _layouts(self) -> dict[str, tuple[InstanceGroup, ...]]:
        file = self.file
        layouts = {"": self._groups(self.spots.get("instances"))}
        spot = self.spots.get("layouts")
        names = _keys(spot)
        for name, inner in file.section(spot, names).items():
            layouts[name] = self._groups(inner)
        return layouts

    def _groups(self, spot: Spot | None) -> tuple[InstanceGroup, ...]:
        file = self.file
        spots = file.items(spot)
        if spot is not None and not spots:
            file.complain(spot, "empty, allowed is a list of at least one group")
        pairs = [(s, g) for s in spots if (g := self._group(s)) is not None]
        seen = set()
        for at, group in pairs:
            if group.name in seen:
                file.complain(at, f"a second group called {group.name!r}, allowed is a name of its own")
            seen.add(group.name)
        self._check_roles(pairs)
        return tuple(group for _, group in pairs)

    def _check_roles(self, pairs: Sequence[tuple[Spot, InstanceGroup]]) -> None:
        """The role "prefill" needs instances that decode, "decode" and "encode" need instances that prefill."""
        roles = {group.role for _, group in pairs}
        for at, group in pairs:
            other = {"prefill": "decode", "decode": "prefill", "encode": "prefill"}.get(group.role)
            if other and not roles & {other, "any"}:
                self.file.complain(at, f"role {group.role!r}, allowed only beside instances of {other!r} or 'any'")
        if len({group.geometry for _, group in pairs}) > 1:
            self.file.complain(pairs[-1][0], "another geometry than the first group's, allowed is one for all")

    def _group(self, spot: Spot) -> InstanceGroup | None:
        file, tables = self.file, self.tables
        shared = file.section(self.spots.get("engine"), _names(tables.engine))
        own = file.section(spot, [*_names(tables.engine), *_names(tables.instances)])
        head = self._values(own, tables.instances)
        options = self._values({**shared, **own}, tables.engine)
        head["name"] = head["name"] or ("engine" if head["role"] == "any" else head["role"])
        try:
            return InstanceGroup(**head, **_sized(options, tables))
        except ConfigError as error:
            file.complain(
                own.get(error.field or "", shared.get(error.field or "", spot)),
                str(error).removeprefix(f"{error.field}: "),
            )
            return None

    def _scaling(self, layouts: Mapping[str, Sequence[InstanceGroup]]) -> Scaling | None:
        file, spot = self.file, self.spots.get("scaling")
        if spot is None:
            return None
        spots = file.section(spot, [*_names(self.tables.scaling), "start-paths"])
        self._need(spot, spots, ("least", "most"))
        values = self._values(spots, self.tables.scaling)
        paths = file.section(spots.get("start-paths"), _names(self.tables.start_paths))
        start = StartSeconds(disk=values.pop("start_seconds"), **self._values(paths, self.tables.start_paths))
        scaling = Scaling(start=start, **values)
        if "least" in spots and "most" in spots:
            if scaling.least > scaling.most:
                file.complain(spots["most"], f"{scaling.most}, allowed is at least least ({scaling.least})")
            for name, groups in layouts.items():
                count = sum(group.count for group in groups)
                if count > scaling.most:
                    where = f" in layout {name}" if name else ""
                    allowed = f"allowed is at least the {count} that serve from the start{where}"
                    file.complain(spots["most"], f"{scaling.most}, {allowed}")
                taken = sum(group.count * group.devices for group in groups)
                if scaling.devices is not None and taken > scaling.devices:
                    where = f" in layout {name}" if name else ""
                    allowed = f"allowed is at least the {taken} of those that serve from the start{where}"
                    file.complain(spots["devices"], f"{scaling.devices}, {allowed}")
        return scaling

    def _failures(self, groups: Sequence[InstanceGroup]) -> tuple[Failure, ...]:
        file, tables = self.file, self.tables
        names = [name for group in groups for name in group.instances]
        failures = []
        for spot in file.items(self.spots.get("failures")):
            spots = file.section(spot, _names(tables.failures))
            self._need(spot, spots, ("instance", "at"))
            values = self._values(spots, tables.failures)
            if "instance" in spots and values["instance"] not in names:
                file.complain(spots["instance"], f"{values['instance']!r}, allowed are {', '.join(names)}")
            failures.append(Failure(**values))
        return tuple(failures)


def _targets(values: Mapping[str, float | None], default: SLO) -> SLO:
    """Of settings in ms."""
    ttft, tpot = values.get("ttft_ms"), values.get("tpot_ms")
    return SLO(
        ttft=default.ttft if ttft is None else ttft / 1e3,
        tpot=default.tpot if tpot is None else tpot / 1e3,
    )


def _device(options: Mapping[str, Any], load: Callable[[str], DeviceModel]) -> DeviceModel:
    sheet = load(options["device"].removeprefix(PREFIX))
    share = options["efficiency"]
    reached = replace(sheet, peak_flops=sheet.peak_flops * share, bandwidth=sheet.bandwidth * share)
    return reached.parallel(options["tensor_parallel_size"])


def _sized(options: Mapping[str, Any], tables: ScenarioTables) -> dict[str, Any]:
    """Fields of a `InstanceGroup` from engine options. Raises ConfigError naming the option."""
    device, slowdown = _device(options, tables.load_device), options["slowdown"]
    shape = tables.load_geometry(options["geometry"]).storing(options["kv_cache_dtype"])
    factors = tables.load_factors(options["device"].removeprefix(PREFIX), shape)
    sizes = sized(
        device.slowed(options["step_time_error"]),
        shape,
        max_model_len=options["max_model_len"],
        max_num_seqs=options["max_num_seqs"],
        kv_blocks=options["kv_blocks"],
        max_num_batched_tokens=options["max_num_batched_tokens"],
        step_time_limit_ms=options["step_time_limit_ms"],
    )
    return {
        "device": options["device"],
        "geometry": options["geometry"],
        "kv_cache_dtype": options["kv_cache_dtype"],
        "times": StepTime(device.slowed(slowdown), shape, factors),
        "num_blocks": sizes.num_blocks,
        "token_budget": sizes.token_budget,
        "limit": sizes.limit.slowed(slowdown),
        "max_num_seqs": options["max_num_seqs"],
        "max_model_len": options["max_model_len"],
        "noise": options["noise"],
        "prefix_cache": options["enable_prefix_caching"],
        **{
            f"{tier}_blocks": tier_blocks(
                options[option.replace("-", "_")],
                shape.block_bytes,
                prefix_cache=options["enable_prefix_caching"],
                option=option,
            )
            for tier, option in TIER_SIZES.items()
        },
        "disk_bandwidth": tier_bandwidth(options["disk_cache_gbps"], slowdown),
        "remote_bandwidth": tier_bandwidth(options["remote_cache_gbps"], slowdown),
        "scheduling_policy": options["scheduling_policy"],
        "step_time_error": options["step_time_error"],
        "devices": options["tensor_parallel_size"],
        "stage_scheduling": options["stage_scheduling"],
    }


TIER_SIZES = {"host": "host-cache-memory", "disk": "disk-cache-size", "remote": "remote-cache-size"}


def _names(settings: Iterable[Setting]) -> list[str]:
    return [setting.name for setting in settings]


def _keys(spot: Spot | None) -> list[str]:
    """Names that a section happens to have, spelled as `SettingsFile.section` does."""
    if spot is None or not isinstance(spot.node, yaml.MappingNode):
        return []
    return [str(key.value).replace("_", "-") for key, _ in spot.node.value]
