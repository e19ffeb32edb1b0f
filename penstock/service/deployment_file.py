"""The YAML file that describes a deployment.

The allowed values of each setting are in the tables given to `parse`, which the command line makes of the same options
as its flags. This module knows the sections, and which settings are compatible.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from ipaddress import ip_address
from typing import Any

from penstock.sched.cluster.priority_slo import Bounds, Range
from penstock.service.deployment import (
    ADOPTED,
    Cluster,
    Common,
    Deployment,
    Group,
    Ray,
    Scaling,
    Transport,
    kind_of,
)
from penstock.service.policies import BUNDLES
from penstock.service.settings_file import Setting, SettingsFile, Spot
from penstock.service.supervisor import RestartPolicy

# part of process names, socket paths and metrics' labels; short, because a socket's path has at most 107 bytes
GROUP_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]{0,31}")
RESERVED_NAMES = ("kv-pool", "master", "frontend")
HIGHEST_PORT = 65535
DEFAULT = "unified"  # policy of files without one
ONE_LAYOUT = (
    "dtype",
    "quantization",
    "kv-cache-dtype",
    "kv-layout",
)  # of all instances that share a KV pool server's memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Tables:
    """The settings of each section.

    Attributes:
        top: of the file itself; at least model, frontends, host, port, policy, live-roles.
        engine: of an instance on a real device; at least device.
        modelled: of one on a modelled device; at least device.
        adopted: of a running server that becomes one; at least url.
        instances: of a group besides those: name, count, role, cpus, resources.
        priorities: of each entry in that list; all are needed.
        tls: of `transport.tls`; all are needed.
        faults: of `transport.faults`, `partition` of the section in it.
    """

    top: Sequence[Setting]
    limits: Sequence[Setting]
    engine: Sequence[Setting]
    modelled: Sequence[Setting]
    adopted: Sequence[Setting]
    instances: Sequence[Setting]
    priorities: Sequence[Setting]
    transport: Sequence[Setting]
    tls: Sequence[Setting]
    faults: Sequence[Setting]
    partition: Sequence[Setting]
    kv_pool: Sequence[Setting]
    restart: Sequence[Setting]
    scaling: Sequence[Setting]
    cluster: Sequence[Setting]
    ray: Sequence[Setting]


def parse(
    name: str,
    text: str,
    tables: Tables,
    overrides: dict[str, Any] | None = None,
    memory: int | None = None,
    cluster: Mapping[str, Any] | None = None,
    common: Common | None = None,
) -> Deployment:
    """
    Args:
        name: of the file, for messages.
        overrides: values of settings at the top by key, that go before the file's.
        memory: bytes of the host's; None when it is not known.
        cluster: values of settings in that section, for where the file gives none.
        common: of a deployment that this host joins, for what the file does not give.

    Raises:
        ConfigError: one line "FILE:LINE: key.path: value, allowed is ..." for each mistake.
    """
    return _Parser(SettingsFile(name, text), tables, memory, common).parse(overrides or {}, cluster or {})


def registry_in(name: str, text: str, tables: Tables) -> str | None:
    """Address of the etcd that a file names, before the rest of it can be read. ConfigError when it is no YAML; of
    other mistakes `parse` tells."""
    file = SettingsFile(name, text)
    section = file.section(file.section(file.root, ["cluster"]).get("cluster"), _names(tables.cluster))
    return file.values(section, tables.cluster).get("registry")


class _Parser:
    def __init__(self, file: SettingsFile, tables: Tables, memory: int | None, common: Common | None = None) -> None:
        self.file, self.tables, self.memory, self.common = file, tables, memory, common
        self.engine_settings = {s.name: s for s in (*tables.engine, *tables.modelled)}
        self.group_settings = {s.name: s for s in tables.adopted} | self.engine_settings
        sections = (
            "limits",
            "engine",
            "instances",
            "priorities",
            "transport",
            "kv-pool",
            "restart",
            "scaling",
            "cluster",
            "ray",
        )
        elsewhere = dict.fromkeys(self.engine_settings, "engine") | dict.fromkeys(_names(tables.limits), "limits")
        self.spots = file.section(file.root, [*_names(tables.top), *sections], elsewhere)
        self.group_spots: list[Mapping[str, Spot]] = []  # beside the groups: every option, wherever it was given

    def parse(self, overrides: dict[str, Any], cluster_defaults: Mapping[str, Any]) -> Deployment:
        file, tables, spots = self.file, self.tables, self.spots
        known: dict[str, Any] = {}
        if (common := self.common) is not None:
            known = {"model": common.model, "policy": common.policy, "live_roles": common.live_roles}
        top = _defaults(tables.top) | known | file.values(spots, tables.top) | overrides
        limits = self._section("limits", tables.limits)
        priorities = self._priorities() if common is None or "priorities" in spots else dict(common.priorities)
        transport_spots = file.section(spots.get("transport"), [*_names(tables.transport), "tls", "faults"])
        known = {} if common is None else {"kind": common.transport, "lease": common.lease}
        transport = _defaults(tables.transport) | known | file.values(transport_spots, tables.transport)
        faults = self._faults(transport_spots.get("faults"))
        orphans = self._section("kv-pool", tables.kv_pool)["orphans"]
        restart = RestartPolicy(**self._section("restart", tables.restart))
        cluster = self._cluster(cluster_defaults)
        ray = self._ray(top.pop("launcher"))
        groups = self._groups()
        roles = {group.role for group in groups} - {"any"}
        policy = top.pop("policy") or DEFAULT
        groups = [_with_policy(group, BUNDLES[policy].local_policy) for group in groups]
        scaling = self._scaling(policy, groups)
        if scaling is not None and groups and "scaling" in spots:
            more = scaling.most - sum(group.count for group in groups)
            groups[0] = replace(groups[0], more=max(0, more))
        for needed in ("model", "instances"):
            if needed not in spots and (common is None if needed == "model" else cluster is None):
                file.complain(file.root, f"{needed}: missing, and there is no default")
        self._check_ports(top)
        if top["warm_pool"]:
            self._check_warm_pool(groups, ray is not None)
        self._check_groups(groups, alone=cluster is None, ray=ray is not None)
        linked = "transport" in spots or bool(roles) or (BUNDLES[policy].moves and _can_be_linked(groups))
        if cluster is not None:
            linked |= bool(groups) and all(group.shares_memory for group in groups)
        if common is None and (cluster is not None or ray is not None):
            transport["kind"] = transport["kind"] if "kind" in transport_spots else "tcp"
        if ray is not None and transport["kind"] == "shared":
            why = "allowed with launcher ray is tcp or mooncake: its nodes share no memory"
            file.complain(transport_spots["kind"], f"'shared', {why}")
        tls = self._tls(transport_spots.get("tls"), transport["kind"])
        file.finish()
        warnings = ["transport.faults: messages between engines are damaged on purpose"] if faults else []
        names = ("model", "frontends", "warm_pool", "flight_recorder", "live_roles")
        model, frontends, warm_pool, flight_recorder, live_roles = (top.pop(key) for key in names)
        return Deployment(
            model=model,
            common=Common(
                model=model,
                policy=policy,
                live_roles=live_roles,
                priorities=priorities,
                scaling=scaling,
                transport=transport["kind"],
                lease=transport["lease"],
            ),
            frontends=frontends,
            warm_pool=warm_pool,
            server=top | limits,
            groups=tuple(groups),
            policy=policy,
            live_roles=live_roles,
            priorities=priorities,
            cluster=cluster,
            ray=ray,
            scaling=scaling,
            lease=transport["lease"],
            transport=Transport(kind=transport["kind"], tls=tls, faults=faults) if linked else None,
            orphans=orphans if any(group.shares_memory for group in groups) and ray is None else None,
            restart=restart,
            flight_recorder=flight_recorder,
            warnings=tuple(warnings),
        )

    def _section(self, name: str, settings: Sequence[Setting]) -> dict[str, Any]:
        spots = self.file.section(self.spots.get(name), _names(settings))
        return _defaults(settings) | self.file.values(spots, settings)

    def _cluster(self, defaults: Mapping[str, Any]) -> Cluster | None:
        """
        Args:
            defaults: for what the file does not give.
        """
        spot, settings = self.spots.get("cluster"), self.tables.cluster
        if spot is None:
            return None
        spots = self.file.section(spot, _names(settings))
        cluster = Cluster(**_defaults(settings) | dict(defaults) | self.file.values(spots, settings))
        if cluster.secret is None and not ip_address(cluster.host).is_loopback:
            allowed = "allowed without a secret is only 127.0.0.1 or ::1; set cluster.secret or PENSTOCK_CLUSTER_SECRET"
            self.file.complain(spots.get("host", spot), f"{cluster.host!r}, {allowed}")
        if (cluster.masters or 1) > 1 and cluster.registry is None:
            why = "allowed without a registry is 1: it chooses which leads"
            self.file.complain(spots["masters"], f"{cluster.masters}, {why}")
        return cluster

    def _ray(self, launcher: str) -> Ray | None:
        spot = self.spots.get("ray")
        if launcher != "ray":
            if spot is not None:
                self.file.complain(spot, f"{spot.shown}, allowed only with launcher ray")
            return None
        return Ray(**self._section("ray", self.tables.ray))

    def _scaling(self, policy: str, groups: Sequence[Group]) -> Scaling | None:
        spot = self.spots.get("scaling")
        if spot is None and self.common is not None and self.common.policy == policy:
            return self.common.scaling
        if spot is None:
            if BUNDLES[policy].scales:
                self.file.complain(self.spots["policy"], f"{policy!r}, allowed only beside a section scaling")
            return None
        if not BUNDLES[policy].scales:
            scales = " or ".join(name for name, bundle in BUNDLES.items() if bundle.scales)
            self.file.complain(spot, f"{spot.shown}, allowed only with policy {scales}")
        spots = self.file.section(spot, _names(self.tables.scaling))
        scaling = Scaling(**_defaults(self.tables.scaling) | self.file.values(spots, self.tables.scaling))
        count = sum(group.count for group in groups)
        if scaling.most < max(count, scaling.least):
            why = f"the {count} that are started at first" if count >= scaling.least else f"least ({scaling.least})"
            self.file.complain(spots.get("most", spot), f"{scaling.most}, allowed is at least {why}")
        taken = sum(group.count * group.ranks for group in groups)
        if scaling.devices is not None and scaling.devices < taken:
            why = f"the {taken} of those that are started at first"
            self.file.complain(spots["devices"], f"{scaling.devices}, allowed is at least {why}")
        return scaling

    def _priorities(self) -> dict[int, Bounds]:
        found: dict[int, Bounds] = {}
        spot, settings = self.spots.get("priorities"), self.tables.priorities
        for entry in self.file.items(spot):
            spots = self.file.section(entry, _names(settings))
            values = self.file.values(spots, settings)
            for name in _names(settings):
                if name not in spots:
                    self.file.complain(entry, f"{name}: missing, and there is no default")
            if values.get("priority") in found:
                self.file.complain(spots["priority"], f"{values['priority']}, allowed is each priority once")
            if len(values) == len(settings):
                ttft, tpot = (Range(*(ms / 1e3 for ms in values[key])) for key in ("ttft_ms", "tpot_ms"))
                found[values["priority"]] = Bounds(ttft=ttft, tpot=tpot)
        return found

    def _tls(self, spot: Spot | None, kind: str) -> dict[str, Any] | None:
        if spot is None:
            return None
        if kind != "tcp":
            self.file.complain(spot, f"{spot.shown}, allowed only with kind tcp, and this is {kind}")
        spots = self.file.section(spot, _names(self.tables.tls))
        for name in _names(self.tables.tls):
            if name not in spots:
                self.file.complain(spot, f"{name}: missing, and there is no default")
        return self.file.values(spots, self.tables.tls)

    def _faults(self, spot: Spot | None) -> dict[str, Any] | None:
        """The faults that are given."""
        spots = self.file.section(spot, [*_names(self.tables.faults), "partition"])
        faults = self.file.values(spots, self.tables.faults)
        if "partition" in spots:
            partition = self.file.section(spots["partition"], _names(self.tables.partition))
            faults["partition"] = _defaults(self.tables.partition) | self.file.values(partition, self.tables.partition)
        return faults or None

    def _groups(self) -> list[Group]:
        file = self.file
        shared_spots = file.section(self.spots.get("engine"), self.engine_settings)
        shared = file.values(shared_spots, self.engine_settings.values())
        groups = [self._group(spot, shared_spots, shared) for spot in file.items(self.spots.get("instances"))]
        used = {key for group in groups for key in group.options}
        for name, spot in shared_spots.items():
            if groups and self.engine_settings[name].key not in used:
                devices = ", ".join(sorted({group.device for group in groups}))
                file.complain(spot, f"{spot.shown}, allowed is nothing with device {devices}")
        return groups

    def _group(self, spot: Spot, shared_spots: Mapping[str, Spot], shared: dict[str, Any]) -> Group:
        """
        Args:
            shared_spots, shared: options under `engine`, which hold where the group does not give its own.
        """
        file, tables = self.file, self.tables
        spots = file.section(spot, [*_names(tables.instances), *self.group_settings])
        head = _defaults(tables.instances) | file.values(spots, tables.instances)
        if "url" in spots:
            return self._adopted_group(spots, head)
        for name in spots.keys() & (self.group_settings.keys() - self.engine_settings.keys()):
            file.complain(spots[name], f"{spots[name].shown}, allowed only beside url")
        given = file.values(spots, self.engine_settings.values())
        device = (_defaults(tables.engine) | shared | given)["device"]
        settings = tables.modelled if kind_of(device) == "modelled" else tables.engine
        for name in spots.keys() & (self.engine_settings.keys() - set(_names(settings))):
            file.complain(spots[name], f"{spots[name].shown}, allowed is nothing with device {device}")
        default_name = "engine" if head["role"] == "any" else head["role"]
        head["name"] = head["name"] or default_name
        self.group_spots.append({"": spot, **shared_spots, **spots})
        known = {setting.key for setting in settings}
        options = _defaults(settings) | {key: value for key, value in {**shared, **given}.items() if key in known}
        return Group(options=options, **head)

    def _adopted_group(self, spots: Mapping[str, Spot], head: dict[str, Any]) -> Group:
        """A running server, of which nothing else is set here than what it was started with."""
        file, settings = self.file, self.tables.adopted
        for name in spots.keys() & (self.engine_settings.keys() - set(_names(settings))):
            file.complain(spots[name], f"{spots[name].shown}, allowed is nothing beside url: that server is running")
        for name, allowed in (("count", 1), ("role", "any")):
            if name in spots and head[name] != allowed:
                file.complain(spots[name], f"{spots[name].shown}, allowed beside url is {allowed}")
        head["name"] = head["name"] or ADOPTED
        self.group_spots.append({"": spots["url"], **spots})
        options = _defaults(settings) | file.values(spots, settings) | {"device": ADOPTED}
        return Group(options=options, **head)

    # --- what does not go together

    def _check_ports(self, top: Mapping[str, Any]) -> None:
        last = top["port"] + top["frontends"] - 1
        if top["port"] and last > HIGHEST_PORT:
            spot = self.spots.get("port", self.spots.get("frontends", self.file.root))
            self.file.complain(
                spot,
                f"{top['port']}, allowed is at most {HIGHEST_PORT - top['frontends'] + 1} "
                f"with {top['frontends']} frontends, each on a port of its own",
            )

    def _check_groups(self, groups: Sequence[Group], alone: bool, ray: bool) -> None:
        """
        Args:
            alone: there are no other hosts.
            ray: instances run where Ray has room for them.
        """
        if not groups and "instances" in self.spots:
            self.file.complain(self.spots["instances"], "empty, allowed is a list of at least one group")
        self._check_names(groups)
        if alone:  # else the others may be elsewhere
            self._check_roles(groups)
        self._check_devices(groups)
        self._check_sizes(groups)
        self._check_launcher(groups, ray)
        if not ray:
            self._check_memory(groups)
            self._check_gpu_memory(groups)

    def _check_names(self, groups: Sequence[Group]) -> None:
        seen = set()
        for group, spots in zip(groups, self.group_spots, strict=True):
            spot = spots.get("name", spots[""])
            if not GROUP_NAME.fullmatch(group.name) or group.name in RESERVED_NAMES:
                self.file.complain(
                    spot,
                    f"{group.name!r}, allowed are up to 32 small letters, digits, dashes, dots and underscores, "
                    f"except {', '.join(RESERVED_NAMES)}",
                )
            elif group.name in seen:
                self.file.complain(spot, f"a second group called {group.name!r}, allowed is a name of its own")
            seen.add(group.name)

    def _check_roles(self, groups: Sequence[Group]) -> None:
        """The role "prefill" needs instances that decode, and "decode" needs instances that prefill."""
        roles = {group.role for group in groups}
        for role, other in (("decode", "prefill"), ("prefill", "decode")):
            if role in roles and not roles & {other, "any"}:
                at = next(i for i, group in enumerate(groups) if group.role == role)
                self.file.complain(
                    self.group_spots[at]["role"],
                    f"{role!r}, allowed only beside instances of the role {other!r} or 'any'",
                )

    def _check_devices(self, groups: Sequence[Group]) -> None:
        """Settings that need KV in the host's memory, and settings that must be equal for all groups."""
        for group, spots in zip(groups, self.group_spots, strict=True):
            device = spots.get("device", spots[""])
            if not group.shares_memory:
                if "kv-pool" in self.spots:
                    self.file.complain(self.spots["kv-pool"], _not_on(group, "a KV pool server"))
                if "transport" in self.spots:
                    self.file.complain(self.spots["transport"], _not_on(group, "a transport"))
                if group.role != "any":
                    self.file.complain(spots["role"], _not_on(group, f"the role {group.role!r}"))
            if group.adopted and group.more:
                self.file.complain(self.spots["scaling"], "given, allowed is nothing beside url: nobody starts those")
            if group.adopted != groups[0].adopted:
                self.file.complain(spots[""], f"group {group.name!r}, allowed is url in all groups or in none")
            elif group.modelled != groups[0].modelled:
                self.file.complain(device, f"{group.device!r}, allowed is only modelled or no modelled devices")
        sharing = [at for at, group in enumerate(groups) if group.shares_memory and not group.modelled]
        for name in ONE_LAYOUT:
            given = [self.group_spots[at][name] for at in sharing if name in self.group_spots[at]]
            for spot in given[1:]:
                if spot.shown != given[0].shown:
                    self.file.complain(spot, f"{spot.shown}, allowed is {given[0].shown} as in {given[0].path}")

    def _check_sizes(self, groups: Sequence[Group]) -> None:
        for group, spots in zip(groups, self.group_spots, strict=True):
            if group.modelled and group.options["kv_blocks"] and group.options["kv_cache_memory"]:
                spot = spots["kv-blocks"]
                self.file.complain(spot, f"{spot.shown}, allowed is nothing beside kv-cache-memory")

    def _check_launcher(self, groups: Sequence[Group], ray: bool) -> None:
        """Settings that only one kind of launcher has."""
        if ray and "kv-pool" in self.spots:
            spot = self.spots["kv-pool"]
            self.file.complain(spot, f"{spot.shown}, allowed is nothing with launcher ray: engines keep their KV")
        for group, spots in zip(groups, self.group_spots, strict=True):
            for name in ("cpus", "resources"):
                if name in spots and not ray:
                    self.file.complain(spots[name], f"{spots[name].shown}, allowed only with launcher ray")
            if "peer-weights" in spots and group.options.get("peer_weights") and not group.shares_weights:
                why = f"allowed {_whose_memory(group)} is false: group {group.name!r} has its weights from disk"
                self.file.complain(spots["peer-weights"], f"{spots['peer-weights'].shown}, {why}")
            if ray and group.adopted:
                self.file.complain(spots["url"], f"{spots['url'].shown}, allowed is nothing with launcher ray: it runs")
            if ray and kind_of(group.device) == "cuda" and group.device != "cuda":
                self.file.complain(spots["device"], f"{group.device!r}, allowed with launcher ray is cuda: Ray chooses")

    def _check_warm_pool(self, groups: Sequence[Group], ray: bool) -> None:
        spot = self.spots["warm-pool"]
        if ray:
            self.file.complain(spot, f"{spot.shown}, allowed with launcher ray is 0: Ray starts the processes")
        elif (at := next((group for group in groups if group.modelled or group.adopted), None)) is not None:
            where = "running servers" if at.adopted else f"{at.device}"
            self.file.complain(spot, f"{spot.shown}, allowed with {where} is 0: there is nothing to import")

    def _check_memory(self, groups: Sequence[Group]) -> None:
        """What is asked of the host's memory, by all instances together."""
        taken = 0
        for group, spots in zip(groups, self.group_spots, strict=True):
            name = "host-cache-memory" if kind_of(group.device) == "cuda" else "kv-cache-memory"
            asked = None if group.modelled or group.adopted else group.options[name.replace("-", "_")]
            if asked is None or self.memory is None:
                continue
            count = len(group.instances)
            taken += asked * count
            if taken > self.memory:
                spot = spots.get(name, spots[""])
                self.file.complain(
                    spot,
                    f"{asked / 2**30:.1f} GiB for each of {count}, {taken / 2**30:.1f} GiB up to here, allowed "
                    f"is what this machine has, {self.memory / 2**30:.1f} GiB",
                )

    def _check_gpu_memory(self, groups: Sequence[Group]) -> None:
        """Shares of one GPU add up, unless the cache's size is given."""
        shares: dict[str, float] = defaultdict(float)
        for group, spots in zip(groups, self.group_spots, strict=True):
            if kind_of(group.device) != "cuda" or group.options["kv_cache_memory"] is not None:
                continue
            device = "cuda:0" if group.device == "cuda" else group.device
            shares[device] += len(group.instances) * group.options["gpu_memory_utilization"]
            if shares[device] > 1 + 1e-9:
                spot = spots.get("gpu-memory-utilization", spots.get("device", spots[""]))
                self.file.complain(
                    spot, f"the shares of {device} add up to {shares[device]:g}, allowed is at most 1 in all"
                )


def _with_policy(group: Group, local_policy: str) -> Group:
    """With that scheduling policy, unless it was given one."""
    if group.adopted:
        return group
    key = "scheduling_policy"
    return replace(group, options={**group.options, key: group.options[key] or local_policy})


def _can_be_linked(groups: Sequence[Group]) -> bool:
    return sum(len(group.instances) for group in groups) > 1 and all(group.shares_memory for group in groups)


def _not_on(group: Group, what: str) -> str:
    return f"{what} holds blocks in the host's memory, and group {group.name!r} has them {_whose_memory(group)}"


def _whose_memory(group: Group) -> str:
    """Where a group has what it keeps, that has it not in one piece of the host's memory."""
    if group.adopted:
        return "in a server of another kind"
    return f"spread over {group.ranks} ranks" if group.ranks > 1 else f"on {group.device}"


def _names(settings: Iterable[Setting]) -> list[str]:
    return [setting.name for setting in settings]


def _defaults(settings: Iterable[Setting]) -> dict[str, Any]:
    return {setting.key: setting.default for setting in settings}
