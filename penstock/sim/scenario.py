"""What is simulated: instances, policy, traffic, limits, and what goes wrong; from one YAML file.

What each setting may be is in the tables that `parse` is given, which the command line makes of the same options as its
flags. What is here is which sections there are, and what goes together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from penstock.core.errors import ConfigError
from penstock.core.plan import BLOCK_TOKENS
from penstock.core.wire.engine import Pool
from penstock.sched.local.sequence import blocks_for
from penstock.sched.steptime import DEVICES, GEOMETRIES, StepTime
from penstock.service.settings_file import Setting, SettingsFile, Spot
from penstock.sim.bundles import BUNDLES
from penstock.sim.wires import Transport

PREFIX = "modelled:"
MEMORY_SHARE = 0.9  # of a device's memory, for weights and KV together
MOST_TOKENS = 8192  # in a step, however fast the device is
SECTIONS = ("workload", "slo", "engine", "instances", "layouts", "heartbeat", "transport", "failures")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tables:
    """The settings of each section; see `parse`.

    Attributes:
        top: description, policy, seed, latency-ms.
        engine: of every instance.
        instances: of a group besides those: name, count, pool.
        failures: of each entry in that list.
    """

    top: Sequence[Setting]
    workload: Sequence[Setting]
    synthetic: Sequence[Setting]
    slo: Sequence[Setting]
    engine: Sequence[Setting]
    instances: Sequence[Setting]
    heartbeat: Sequence[Setting]
    transport: Sequence[Setting]
    failures: Sequence[Setting]


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Instances that are alike.

    Attributes:
        times: of its steps, without slowdown and noise.
        num_blocks: of KV, for each instance.
        token_budget: tokens in one step.
        slowdown: factor on all times.
        noise: standard deviation of a step's time, relative to it.
    """

    name: str
    count: int
    pool: Pool
    device: str
    geometry: str
    times: StepTime
    num_blocks: int
    token_budget: int
    max_num_seqs: int
    max_model_len: int
    slowdown: float
    noise: float
    prefix_cache: bool

    @property
    def instances(self) -> list[str]:
        """Their names."""
        return [f"{self.name}-{i}" for i in range(self.count)]

    @property
    def block_bytes(self) -> int:
        return self.times.shape.kv_bytes_per_token * BLOCK_TOKENS


@dataclass(frozen=True, slots=True, kw_only=True)
class Synthetic:
    """Traffic put together from distributions; see `workload.synthetic`. Lengths are log-normal, in tokens."""

    requests: int
    rate: float
    burstiness: float
    prompt: int
    prompt_cv: float
    output: int
    output_cv: float
    prefixes: int
    prefix_tokens: int
    prefix_zipf: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """
    Attributes:
        trace: a file in the folder of traces; "" when the traffic is synthetic.
        rate_scale: factor on its own rate.
        start: seconds of the trace, at its own rate, that are left out.
        duration: seconds of arrivals, at the scaled rate, for which the trace is repeated if need be; None is all of it
            once.
        spread: seconds over which arrivals of one tick of the trace's clock are spread.
        max_tokens: limit on outputs that clients set; policies see this and not how long outputs will be.
    """

    trace: str
    synthetic: Synthetic | None
    rate_scale: float
    start: float
    duration: float | None
    spread: float
    max_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SLO:
    """What a request must keep to count: time to first token, and mean time per token after it, in seconds."""

    ttft: float
    tpot: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """An instance dies `at` a time, and `restart_after` so many seconds lives again, with an empty cache; None is
    never."""

    instance: str
    at: float
    restart_after: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """
    Attributes:
        layouts: groups of instances by name; "" is the file's own.
        policy: a name in `bundles.BUNDLES`.
        latency: seconds that a message takes between frontend, master and instances.
        heartbeat: seconds between an instance's snapshots while its load changes.
        heartbeat_delay: seconds that the master hears of them later than it could.
    """

    name: str
    description: str
    layouts: Mapping[str, tuple[Group, ...]]
    policy: str
    workload: Workload
    slo: SLO
    latency: float
    heartbeat: float
    heartbeat_delay: float
    transport: Transport
    failures: tuple[Failure, ...]
    seed: int

    def choose(self, variant: str) -> tuple[str, tuple[Group, ...]]:
        """Policy and groups of a variant "POLICY" or "POLICY@LAYOUT". Raises ConfigError."""
        policy, _, layout = variant.partition("@")
        layout = layout.replace("_", "-")
        if policy not in BUNDLES:
            raise ConfigError(f"policy: {policy!r}, allowed are {', '.join(BUNDLES)}", "policy")
        if layout not in self.layouts:
            named = ", ".join(name for name in self.layouts if name) or "none"
            raise ConfigError(f"layout: {layout!r}, {self.name} has {named}", "policy")
        groups = self.layouts[layout]
        names = [name for group in groups for name in group.instances]
        for failure in self.failures:
            if failure.instance not in names:
                raise ConfigError(f"layout: {layout!r} has no {failure.instance}, which is to fail", "policy")
        return policy, groups


def parse(name: str, text: str, tables: Tables) -> Scenario:
    """
    Args:
        name: of the file, for messages.

    Raises:
        ConfigError: one line "FILE:LINE: key.path: value, allowed is ..." for each mistake.
    """
    return _Parser(SettingsFile(name, text), tables).parse()


class _Parser:
    def __init__(self, file: SettingsFile, tables: Tables) -> None:
        self.file, self.tables = file, tables
        self.spots = file.section(file.root, [*_names(tables.top), *SECTIONS])

    def parse(self) -> Scenario:
        file, tables, spots = self.file, self.tables, self.spots
        for needed in ("workload", "slo", "instances"):
            if needed not in spots:
                file.complain(file.root, f"{needed}: missing, and there is no default")
        top = self._values(spots, tables.top)
        workload = self._workload()
        slo = self._required("slo", tables.slo)
        heartbeat = self._section("heartbeat", tables.heartbeat)
        transport = self._section("transport", tables.transport)
        layouts = self._layouts()
        failures = self._failures(layouts[""])
        file.finish()
        return Scenario(
            name=file.name,
            description=top["description"],
            layouts=layouts,
            policy=top["policy"],
            workload=workload,
            slo=SLO(ttft=slo["ttft_ms"] / 1e3, tpot=slo["tpot_ms"] / 1e3),
            latency=top["latency_ms"] / 1e3,
            heartbeat=heartbeat["every_ms"] / 1e3,
            heartbeat_delay=heartbeat["delay_ms"] / 1e3,
            transport=Transport(
                kind=transport["kind"],
                bandwidth=transport["gbps"] * 1e9 / 8,
                latency=transport["latency_us"] / 1e6,
                lease=transport["lease"],
            ),
            failures=failures,
            seed=top["seed"],
        )

    def _values(self, spots: Mapping[str, Spot], settings: Sequence[Setting]) -> dict[str, Any]:
        return {s.key: s.default for s in settings} | self.file.values(spots, settings)

    def _section(self, name: str, settings: Sequence[Setting]) -> dict[str, Any]:
        return self._values(self.file.section(self.spots.get(name), _names(settings)), settings)

    def _required(self, name: str, settings: Sequence[Setting]) -> dict[str, Any]:
        """A section whose settings have no defaults."""
        spots = self.file.section(self.spots.get(name), _names(settings))
        if name in self.spots:
            self._need(self.spots[name], spots, settings)
        return {s.key: 1.0 for s in settings} | self.file.values(spots, settings)

    def _need(self, spot: Spot, spots: Mapping[str, Spot], settings: Iterable[Setting]) -> None:
        for setting in settings:
            if setting.name not in spots:
                self.file.complain(spot, f"{setting.name} is missing, and there is no default")

    def _workload(self) -> Workload:
        file, tables = self.file, self.tables
        spots = file.section(self.spots.get("workload"), [*_names(tables.workload), "synthetic"])
        values = self._values(spots, tables.workload)
        synthetic = None
        if "synthetic" in spots:
            inner = file.section(spots["synthetic"], _names(tables.synthetic))
            synthetic = Synthetic(**self._values(inner, tables.synthetic))
        if "workload" in self.spots and ("trace" in spots) == ("synthetic" in spots):
            file.complain(self.spots["workload"], "either trace or synthetic is needed, and not both")
        return Workload(synthetic=synthetic, **values)

    # --- instances

    def _layouts(self) -> dict[str, tuple[Group, ...]]:
        file = self.file
        layouts = {"": self._groups(self.spots.get("instances"))}
        spot = self.spots.get("layouts")
        names = _keys(spot)
        for name, inner in file.section(spot, names).items():
            layouts[name] = self._groups(inner)
        return layouts

    def _groups(self, spot: Spot | None) -> tuple[Group, ...]:
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
        self._check_pools(pairs)
        return tuple(group for _, group in pairs)

    def _check_pools(self, pairs: Sequence[tuple[Spot, Group]]) -> None:
        """What is read in the pool "prefill" must go on somewhere, and what "decode" goes on with must be read."""
        pools = {group.pool for _, group in pairs}
        for at, group in pairs:
            other = {"prefill": "decode", "decode": "prefill"}.get(group.pool)
            if other and not pools & {other, "any"}:
                self.file.complain(at, f"pool {group.pool!r}, allowed only beside instances of {other!r} or 'any'")
        if len({group.geometry for _, group in pairs}) > 1:
            self.file.complain(pairs[-1][0], "another geometry than the first group's, allowed is one for all")

    def _group(self, spot: Spot) -> Group | None:
        file, tables = self.file, self.tables
        shared = file.section(self.spots.get("engine"), _names(tables.engine))
        own = file.section(spot, [*_names(tables.engine), *_names(tables.instances)])
        head = self._values(own, tables.instances)
        options = self._values({**shared, **own}, tables.engine)
        head["name"] = head["name"] or ("engine" if head["pool"] == "any" else head["pool"])
        try:
            return Group(**head, **_sized(options))
        except ConfigError as error:
            file.complain(own.get(error.field or "", shared.get(error.field or "", spot)), str(error))
            return None

    def _failures(self, groups: Sequence[Group]) -> tuple[Failure, ...]:
        file, tables = self.file, self.tables
        names = [name for group in groups for name in group.instances]
        failures = []
        for spot in file.items(self.spots.get("failures")):
            spots = file.section(spot, _names(tables.failures))
            self._need(spot, spots, [s for s in tables.failures if s.name != "restart-after"])
            values = self._values(spots, tables.failures)
            if "instance" in spots and values["instance"] not in names:
                file.complain(spots["instance"], f"{values['instance']!r}, allowed are {', '.join(names)}")
            failures.append(Failure(**values))
        return tuple(failures)


def _sized(options: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a `Group` from engine options. Raises ConfigError naming the option."""
    device, shape = DEVICES[options["device"].removeprefix(PREFIX)], GEOMETRIES[options["geometry"]]
    times = StepTime(device, shape)
    model_len, sequences = options["max_model_len"], options["max_num_seqs"]
    free = int(device.memory * MEMORY_SHARE) - shape.weight_bytes
    fitting = max(0, free) // (shape.kv_bytes_per_token * BLOCK_TOKENS)
    num_blocks = options["kv_blocks"] or min(fitting, sequences * blocks_for(model_len))
    if num_blocks > fitting:
        raise ConfigError(f"{num_blocks}, allowed are up to {fitting} beside the weights", "kv-blocks")
    if blocks_for(model_len) > num_blocks:
        raise ConfigError(f"{model_len} tokens need more KV than the {num_blocks} blocks there", "max-model-len")
    budget = options["max_num_batched_tokens"]
    if budget is None:
        high = max(min(MOST_TOKENS, model_len), sequences)
        budget = times.largest_prefill(options["step_time_limit_ms"], sequences, high)
    if budget < sequences:
        raise ConfigError(f"{budget}, allowed is at least max-num-seqs ({sequences})", "max-num-batched-tokens")
    return {
        "device": options["device"],
        "geometry": options["geometry"],
        "times": times,
        "num_blocks": num_blocks,
        "token_budget": budget,
        "max_num_seqs": sequences,
        "max_model_len": model_len,
        "slowdown": options["slowdown"],
        "noise": options["noise"],
        "prefix_cache": options["enable_prefix_caching"],
    }


def _names(settings: Iterable[Setting]) -> list[str]:
    return [setting.name for setting in settings]


def _keys(spot: Spot | None) -> list[str]:
    """Names that a section happens to have, spelled as `SettingsFile.section` does."""
    if spot is None or not isinstance(spot.node, yaml.MappingNode):
        return []
    return [str(key.value).replace("_", "-") for key, _ in spot.node.value]
