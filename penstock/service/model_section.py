"""What a deployment file says of one model: at its top, or in an entry of `models`."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from penstock.core.parallel import DATA, EXPERTS
from penstock.core.service_level import Bounds, Range
from penstock.service.deployment import (
    ADOPTED,
    DEFAULT_POLICY,
    WEIGHTS_PAIRS,
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
from penstock.service.tables import Tables

# part of process names, socket paths and metrics' labels; short, because a socket's path has at most 107 bytes
GROUP_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]{0,31}")
MODEL_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,15}")  # likewise, and a folder's
RESERVED_NAMES = ("kv-pool", "master", "frontend")
RESERVED_FOLDERS = ("address", "control", "givers", "lock", "responses")  # files of a run that are beside it
# of all instances that share a KV pool server's memory
ONE_LAYOUT = ("dtype", "quantization", "kv-cache-dtype", "kv-layout")
MODEL_SECTIONS = "engine", "instances", "priorities", "transport", "kv-pool", "scaling"


@dataclass(slots=True)
class Shares:
    """What the instances of all models ask of one host.

    Attributes:
        memory: bytes that it has; None when that is not known.
        taken: bytes that are asked for, so far.
        gpus: of each, the share of its memory likewise.
    """

    memory: int | None
    taken: int = 0
    gpus: dict[str, float] = field(default_factory=lambda: defaultdict(float))


class ModelSection:
    """
    Args:
        common: of a deployment that this host joins, for what the file does not give.
        at: where the model is described.
        spots: what stands there.
        top: what stands at the top of the file.
    """

    def __init__(
        self,
        file: SettingsFile,
        tables: Tables,
        common: Common | None,
        at: Spot,
        spots: Mapping[str, Spot],
        top: Mapping[str, Spot],
    ) -> None:
        self.file, self.tables, self.common, self.at, self.spots, self.top = file, tables, common, at, spots, top
        self.engine_settings = {s.name: s for s in (*tables.engine, *tables.modelled)}
        self.group_settings = {s.name: s for s in tables.adopted} | self.engine_settings
        self.group_spots: list[Mapping[str, Spot]] = []  # beside the groups: every option, wherever it was given

    def parse(
        self,
        overrides: Mapping[str, Any],
        shares: Shares,
        *,
        frontends: int,
        warm_pool: int,
        server: Mapping[str, Any],
        cluster: Cluster | None,
        ray: Ray | None,
        restart: RestartPolicy,
    ) -> Deployment:
        """
        Args:
            overrides: values of its settings by key, that go before the file's.
            shares: of the models before it; its own are added.
            frontends, ...: see `Deployment`.
        """
        file, tables, spots = self.file, self.tables, self.spots
        known: dict[str, Any] = {}
        if (common := self.common) is not None:
            known = {"model": common.model, "policy": common.policy, "live_roles": common.live_roles}
            known["media_route"] = common.media_route
        own = defaults(tables.model) | known | file.values(spots, tables.model) | dict(overrides)
        prefix = self._prefix(own)
        priorities = self._priorities() if common is None or "priorities" in spots else dict(common.priorities)
        transport_spots = file.section(spots.get("transport"), [*names(tables.transport), "tls", "faults"])
        known = {} if common is None else {"kind": common.transport, "lease": common.lease}
        transport = defaults(tables.transport) | known | file.values(transport_spots, tables.transport)
        faults = self._faults(transport_spots.get("faults"))
        orphan_spots = file.section(spots.get("kv-pool"), names(tables.kv_pool))
        orphans = (defaults(tables.kv_pool) | file.values(orphan_spots, tables.kv_pool))["orphans"]
        groups = self._groups()
        roles = {group.role for group in groups} - {"any"}
        policy = own.pop("policy") or DEFAULT_POLICY
        groups = [_with_policy(group, BUNDLES[policy].local_policy) for group in groups]
        scaling = self._scaling(policy, groups)
        if scaling is not None and groups and "scaling" in spots:
            more = scaling.most - sum(group.count for group in groups)
            groups[0] = replace(groups[0], more=max(0, more))
        for needed in ("model", "instances"):
            if needed not in spots and (common is None if needed == "model" else cluster is None):
                file.complain(self.at, f"{needed}: missing, and there is no default")
        if warm_pool:
            self._check_warm_pool(groups)
        self._check_groups(groups, shares, alone=cluster is None, ray=ray is not None)
        self._check_meetings(groups, ray is not None, server["enable_sleep_mode"])
        moves = BUNDLES[policy].moves or any(group.layout.meets for group in groups)
        linked = "transport" in spots or bool(roles) or (moves and _can_be_linked(groups))
        if cluster is not None:
            linked |= bool(groups) and all(group.shares_memory for group in groups)
        if common is None and (cluster is not None or ray is not None):
            transport["kind"] = transport["kind"] if "kind" in transport_spots else "tcp"
        if ray is not None and transport["kind"] == "shared":
            why = "allowed with launcher ray is tcp or mooncake: its nodes share no memory"
            file.complain(transport_spots["kind"], f"'shared', {why}")
        tls = self._tls(transport_spots.get("tls"), transport["kind"])
        self._check_peer_weights(groups, tls is not None)
        warnings = [f"{prefix}transport.faults: messages between engines are damaged on purpose"] if faults else []
        model, flight_recorder = own.pop("model"), own.pop("flight_recorder")
        live_roles, media_route = own.pop("live_roles"), own.pop("media_route")
        return Deployment(
            model=model,
            prefix=prefix,
            common=Common(
                model=model,
                policy=policy,
                live_roles=live_roles,
                media_route=media_route,
                priorities=priorities,
                scaling=scaling,
                transport=transport["kind"],
                lease=transport["lease"],
            ),
            frontends=frontends,
            warm_pool=warm_pool,
            server=server,
            options=own,
            groups=tuple(replace(group, name=prefix + group.name) for group in groups),
            policy=policy,
            live_roles=live_roles,
            media_route=media_route,
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

    def _prefix(self, own: dict[str, Any]) -> str:
        """See `Deployment`. An entry of `models` is called by its name, unless it says what clients call it."""
        if self.spots is self.top:
            return ""
        name = self.file.values(self.spots, self.tables.models).get("name")
        if name is None:
            self.file.complain(self.at, "name: missing, and there is no default")
            return ""
        if not MODEL_NAME.fullmatch(name) or name in RESERVED_FOLDERS:
            allowed = "allowed are up to 16 small letters, digits, dashes and underscores"
            self.file.complain(self.spots["name"], f"{name!r}, {allowed}, except {', '.join(RESERVED_FOLDERS)}")
        own["served_model_name"] = own["served_model_name"] or (name,)
        return f"{name}/"

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
        spots = self.file.section(spot, names(self.tables.scaling))
        scaling = Scaling(**defaults(self.tables.scaling) | self.file.values(spots, self.tables.scaling))
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
            spots = self.file.section(entry, names(settings))
            values = self.file.values(spots, settings)
            for name in names(settings):
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
        spots = self.file.section(spot, names(self.tables.tls))
        for name in names(self.tables.tls):
            if name not in spots:
                self.file.complain(spot, f"{name}: missing, and there is no default")
        return self.file.values(spots, self.tables.tls)

    def _faults(self, spot: Spot | None) -> dict[str, Any] | None:
        """The faults that are given."""
        spots = self.file.section(spot, [*names(self.tables.faults), "partition"])
        faults = self.file.values(spots, self.tables.faults)
        if "partition" in spots:
            partition = self.file.section(spots["partition"], names(self.tables.partition))
            faults["partition"] = defaults(self.tables.partition) | self.file.values(partition, self.tables.partition)
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
        spots = file.section(spot, [*names(tables.instances), *self.group_settings])
        head = defaults(tables.instances) | file.values(spots, tables.instances)
        if "url" in spots:
            return self._adopted_group(spots, head)
        for name in spots.keys() & (self.group_settings.keys() - self.engine_settings.keys()):
            file.complain(spots[name], f"{spots[name].shown}, allowed only beside url")
        given = file.values(spots, self.engine_settings.values())
        device = (defaults(tables.engine) | shared | given)["device"]
        settings = tables.modelled if kind_of(device) == "modelled" else tables.engine
        for name in spots.keys() & (self.engine_settings.keys() - set(names(settings))):
            file.complain(spots[name], f"{spots[name].shown}, allowed is nothing with device {device}")
        default_name = "engine" if head["role"] == "any" else head["role"]
        head["name"] = head["name"] or default_name
        self.group_spots.append({"": spot, **shared_spots, **spots})
        known = {setting.key for setting in settings}
        options = defaults(settings) | {key: value for key, value in {**shared, **given}.items() if key in known}
        head["count"] *= options.get("data_parallel_size", 1)
        return Group(options=options, **head)

    def _adopted_group(self, spots: Mapping[str, Spot], head: dict[str, Any]) -> Group:
        """A running server, of which nothing else is set here than what it was started with."""
        file, settings = self.file, self.tables.adopted
        for name in spots.keys() & (self.engine_settings.keys() - set(names(settings))):
            file.complain(spots[name], f"{spots[name].shown}, allowed is nothing beside url: that server is running")
        for name, allowed in (("count", 1), ("role", "any")):
            if name in spots and head[name] != allowed:
                file.complain(spots[name], f"{spots[name].shown}, allowed beside url is {allowed}")
        head["name"] = head["name"] or ADOPTED
        self.group_spots.append({"": spots["url"], **spots})
        options = defaults(settings) | file.values(spots, settings) | {"device": ADOPTED}
        return Group(options=options, **head)

    # --- what does not go together

    def _check_groups(self, groups: Sequence[Group], shares: Shares, alone: bool, ray: bool) -> None:
        """
        Args:
            shares: see `parse`.
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
            self._check_memory(groups, shares)
            self._check_gpu_memory(groups, shares)

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
        """The role "prefill" needs instances that decode, "decode" and "encode" need instances that prefill."""
        roles = {group.role for group in groups}
        for role, other in (("decode", "prefill"), ("prefill", "decode"), ("encode", "prefill")):
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
            if ray and group.adopted:
                self.file.complain(spots["url"], f"{spots['url'].shown}, allowed is nothing with launcher ray: it runs")
            if ray and kind_of(group.device) == "cuda" and group.device != "cuda":
                self.file.complain(spots["device"], f"{group.device!r}, allowed with launcher ray is cuda: Ray chooses")

    def _check_peer_weights(self, groups: Sequence[Group], tls: bool) -> None:
        for group, spots in zip(groups, self.group_spots, strict=True):
            asked = group.options.get("peer_weights")
            if "peer-weights" not in spots or not asked:
                continue
            spot, why = spots["peer-weights"], ""
            kind = kind_of(group.device)
            if kind not in WEIGHTS_PAIRS:
                why = f"{_whose_memory(group)} is false: group {group.name!r} has no weights to give"
            elif not group.shares_weights:
                why = f"{_whose_memory(group)} is {'true, ' * (kind == 'cpu')}{WEIGHTS_PAIRS[kind]} or false"
            elif tls and group.weights_pair:
                why = f"with transport.tls {_whose_memory(group)} is {'true or ' * (kind == 'cpu')}false: "
                why += "a process group sends in the clear"
            if why:
                self.file.complain(spot, f"{spot.shown}, allowed {why}")

    def _check_meetings(self, groups: Sequence[Group], ray: bool, sleeps: bool) -> None:
        """Data-parallel groups among which experts are spread start, compute and end together."""
        for group, spots in zip(groups, self.group_spots, strict=True):
            if not group.layout.meets:
                continue
            spot, together = spots.get(DATA, spots[""]), f"with {DATA} and {EXPERTS}"
            if ray:
                self.file.complain(spot, f"{spot.shown}, allowed {together} is launcher local: they share memory")
            if group.more:
                self.file.complain(self.spots["scaling"], f"given, allowed is nothing {together}: all start together")
            if sleeps:
                why = f"allowed is false {together}: who sleeps cannot compute for the others"
                self.file.complain(self.top["enable-sleep-mode"], f"true, {why}")

    def _check_warm_pool(self, groups: Sequence[Group]) -> None:
        spot = self.top["warm-pool"]
        if (at := next((group for group in groups if group.modelled or group.adopted), None)) is not None:
            where = "running servers" if at.adopted else f"{at.device}"
            self.file.complain(spot, f"{spot.shown}, allowed with {where} is 0: there is nothing to import")

    def _check_memory(self, groups: Sequence[Group], shares: Shares) -> None:
        """What is asked of the host's memory, by all instances together."""
        for group, spots in zip(groups, self.group_spots, strict=True):
            name = "host-cache-memory" if kind_of(group.device) == "cuda" else "kv-cache-memory"
            asked = None if group.modelled or group.adopted else group.options[name.replace("-", "_")]
            if asked is None or shares.memory is None:
                continue
            count = len(group.instances)
            shares.taken += asked * count
            if shares.taken > shares.memory:
                spot = spots.get(name, spots[""])
                self.file.complain(
                    spot,
                    f"{asked / 2**30:.1f} GiB for each of {count}, {shares.taken / 2**30:.1f} GiB up to here, allowed "
                    f"is what this machine has, {shares.memory / 2**30:.1f} GiB",
                )

    def _check_gpu_memory(self, groups: Sequence[Group], shares: Shares) -> None:
        """Shares of one GPU add up, unless the cache's size is given."""
        for group, spots in zip(groups, self.group_spots, strict=True):
            if kind_of(group.device) != "cuda" or group.options["kv_cache_memory"] is not None:
                continue
            for device, instances in group.gpus.items():
                shares.gpus[device] += instances * group.options["gpu_memory_utilization"]
                if shares.gpus[device] > 1 + 1e-9:
                    spot = spots.get("gpu-memory-utilization", spots.get("device", spots[""]))
                    self.file.complain(
                        spot, f"the shares of {device} add up to {shares.gpus[device]:g}, allowed is at most 1 in all"
                    )
                    break


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


def names(settings: Iterable[Setting]) -> list[str]:
    return [setting.name for setting in settings]


def defaults(settings: Iterable[Setting]) -> dict[str, Any]:
    return {setting.key: setting.default for setting in settings}
