"""Drill files: a deployment, the load on it, and what is to go wrong."""

from __future__ import annotations

import ipaddress
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from penstock.bench.dataset import NAMES, Dataset
from penstock.cli.options import Option, between, integer, number, one_of, read_text, text, words
from penstock.cli.reloaded import read_keys
from penstock.cli.up import read
from penstock.core.errors import ConfigError
from penstock.drill.faults import DISK, HOST, KINDS, OF_DISKS, Fault, Safety, on_host, suits
from penstock.drill.hosts import why_not
from penstock.drill.launched import Expected
from penstock.drill.run import Drill, Load
from penstock.service.programs import KV_POOL
from penstock.service.settings_file import SettingsFile, Spot

if TYPE_CHECKING:
    from penstock.service.deployment import Deployment

SECTIONS = ("deployment", "hosts", "load", "safety", "promises", "faults")
# that no other host has
OF_FIRST = ("instances", "frontends", "host", "port", "api-key", "flight-recorder", "scaling")
CLUSTER = {"host": "127.0.0.1", "secret": "of it"}  # in the place of what hosts get once they are started
LINE = re.compile(r".*?:\d+: ")  # before a message about another file


def kinds(value: str) -> tuple[str, ...]:
    for word in (named := words(value)):
        if word not in KINDS:
            raise ValueError(f"one or several of {', '.join(KINDS)}" + f", not {word!r}" * (len(named) > 1))
    return named


needed = partial(Option, default=None)
TOP = (
    needed("duration", number(0, 86_400), help="seconds of load"),
    Option("seed", integer(0, 2**32), 0, "of requests, arrivals and faults"),
)
LOAD = (
    needed("request-rate", number(0, 1e6), help="requests per second"),
    needed("share", number(0, 1), help="instead: of the requests per second that the deployment can complete"),
    Option("burstiness", number(0, 1e6), 1.0, "1 is Poisson, less is burstier"),
    Option("temperature", between(0, 2), 0.8, "each request has a seed of its own; 0 is greedy"),
    Option("max-concurrency", integer(1, 4096), 16, "on each instance in the undisturbed run"),
    Option("dataset-name", one_of(*NAMES), "random", "as for penstock bench serve, and so all that follow"),
    needed("dataset-path", text, help="for trace and lengths"),
    Option("random-input-len", integer(1), 256, "prompt tokens, for random and prefix"),
    Option("random-output-len", integer(1), 128, "output tokens"),
    Option("random-range-ratio", between(0, 1), 0.5, "lengths are drawn within this share of them"),
    Option("prefix-len", integer(1), 256, "tokens of a shared prefix"),
    Option("num-prefixes", integer(1), 10, "how many there are"),
    Option("prefix-zipf", between(0, 10), 0.0, "how unevenly they are taken"),
)
SAFETY = (
    Option("at-once", integer(1, 64), 1, "targets that may be broken at once"),
    Option("healthy", integer(0, 4096), 1, "instances of each group that are left"),
    Option("settle", between(0, 600), 8.0, "seconds after a fault in which its target counts as broken still"),
)
PROMISES = (needed("recovery-p99-ms", number(0, 1e7), help="that the longest gap of a stream may be at p99"),)
FAULTS = (
    needed("kind", kinds, help="one or several, of which one is drawn"),
    needed("every", number(0, 86_400), help="seconds in which it strikes once"),
    needed("targets", words, help="engines, frontends, master, kv-pool, a group, hosts, links, disks, or names of any"),
    Option("for", number(0, 3600), 3.0, "seconds that it lasts; a kill takes no time"),
    Option("speed", number(0, 0.95), 0.3, "share of the time in which a slow process runs"),
)


def _keys(deployment: Deployment) -> Sequence[str]:
    path = deployment.server["api_key_file"]
    return (*(deployment.server["api_key"] or ()), *(read_keys(path) if path is not None else ()))


def read_drill(path: str, overrides: Mapping[str, Any] | None = None) -> Drill:
    """Raises ConfigError, with a line for each mistake that can be told at once.

    Args:
        overrides: values of settings at the top by key, that go before the file's.
    """
    text_ = read_text(path, f"{path}:")
    return _Parser(path, text_).parse(dict(overrides or {}))


class _Parser:
    def __init__(self, path: str, content: str) -> None:
        self.path, self.content = path, content
        self.file = SettingsFile(path, content)
        self.spots = self.file.section(self.file.root, [option.name for option in TOP] + list(SECTIONS))

    def parse(self, overrides: dict[str, Any]) -> Drill:
        file, spots = self.file, self.spots
        top = {option.key: option.default for option in TOP} | file.values(spots, TOP) | overrides
        for name in ("deployment", "faults", "duration"):
            if name not in spots and name not in overrides:
                file.complain(file.root, f"{name}: missing, and there is no default")
        safety = self._section("safety", SAFETY)
        promises = self._section("promises", PROMISES)
        load = self._load()
        entries = [self._fault(entry) for entry in file.items(spots.get("faults"))]
        if "faults" in spots and not entries:
            file.complain(spots["faults"], "empty, allowed is a list of at least one fault")
        file.finish()
        assert load is not None
        content, deployment = self._deployment()
        file.finish()
        listed = [self._host(entry, content) for entry in file.items(spots.get("hosts"))]
        others = [found for found in listed if found is not None]
        hosts = [deployment, *(other for _, other in others)]
        if len(hosts) > 1:
            self._check_shared(content)
        file.finish()
        groups = self._groups(hosts)
        known = _Targets(hosts)
        if not groups:
            file.complain(spots["deployment"], "without instances, allowed is at least one")
        faults = tuple(self._fault_of(spots_, values, groups, known, safety["healthy"]) for spots_, values in entries)
        disks = any(kind in OF_DISKS for fault in faults for kind in fault.kinds)
        self._check_machine(len(hosts), disks)
        file.finish()
        own_secret = None if deployment.cluster is None else deployment.cluster.secret
        drill = Drill(
            name=Path(self.path).stem,
            deployments=(content, *(other for other, _ in others)),
            meets=known.meets,
            disks=disks,
            secret=secrets.token_hex(32) if others else own_secret,
            expected=Expected(
                instances=frozenset(name for members in groups.values() for name in members),
                frontends=deployment.frontends,
            ),
            drain_timeout=deployment.server["drain_timeout"],
            api_key=next(iter(_keys(deployment)), None),
            load=load,
            duration=top["duration"],
            seed=top["seed"],
            faults=faults,
            safety=Safety(**safety, groups=groups, breaks=known.breaks),
            most_recovery_ms=promises["recovery_p99_ms"],
        )
        if not drill.strikes:
            longest = max(fault.lasts for fault in faults) + safety["settle"]
            file.complain(
                spots.get("duration", file.root),
                f"{top['duration']:g}, no fault fits into it; allowed is more than the {longest:g} s that one takes "
                "with safety.settle",
            )
        file.finish()
        return drill

    def _section(self, name: str, options: Sequence[Option]) -> dict[str, Any]:
        spots = self.file.section(self.spots.get(name), [option.name for option in options])
        return {option.key: option.default for option in options} | self.file.values(spots, options)

    def _load(self) -> Load | None:
        values = self._section("load", LOAD)
        spot = self.spots.get("load", self.file.root)
        if values["request_rate"] is not None and values["share"] is not None:
            self.file.complain(spot, "request-rate and share are given, allowed is one of them")
        try:
            dataset = Dataset(
                name=values["dataset_name"],
                path=values["dataset_path"],
                input_len=values["random_input_len"],
                output_len=values["random_output_len"],
                range_ratio=values["random_range_ratio"],
                prefix_len=values["prefix_len"],
                num_prefixes=values["num_prefixes"],
                prefix_zipf=values["prefix_zipf"],
                burstiness=values["burstiness"],
            )
        except ConfigError as error:
            self.file.complain(spot, str(error).replace("--", ""))
            return None
        share = 0.7 if values["share"] is None else values["share"]
        return Load(
            dataset=dataset,
            rate=values["request_rate"],
            share=share,
            temperature=values["temperature"],
            at_once=values["max_concurrency"],
        )

    # --- deployments

    def _deployment(self) -> tuple[dict[str, Any], Deployment]:
        """Its content, and what that says. Raises ConfigError with lines of the file where it stands."""
        spot = self.spots["deployment"]
        if isinstance(spot.node, yaml.ScalarNode):
            path = Path(self.path).parent / spot.node.value
            name, content = str(path), read_text(str(path), f"{self.path}:{spot.line}: deployment: {path}")
        else:
            name, content = self.path, self._text_of(spot)
        own = yaml.safe_load(content)
        if "hosts" in self.spots and isinstance(own, dict):
            if "cluster" in own:
                why = "allowed with hosts is nothing: the drill says how they are reached"
                self.file.complain(spot, f"cluster: given, {why}")
                self.file.finish()
            inner = not isinstance(spot.node, yaml.ScalarNode)  # a section of this file, which is indented
            if not (isinstance(spot.node, yaml.MappingNode) and spot.node.flow_style):
                content += f"\n{' ' * (inner * spot.node.start_mark.column)}cluster: {json.dumps(CLUSTER)}"
        return own, self._checked(spot, read(name, content))

    def _checked(self, spot: Spot, deployment: Deployment) -> Deployment:
        if deployment.ray is not None:
            self.file.complain(spot, "launcher: 'ray', allowed is local: a drill only signals what it has started")
        if deployment.server["ssl_certfile"] is not None:
            self.file.complain(spot, "ssl-certfile: given, allowed is nothing: a drill's clients speak HTTP")
        if any(group.adopted for group in deployment.groups):
            self.file.complain(spot, "url: given, allowed are instances that a drill can start")
        if deployment.cluster is not None and deployment.cluster.host != "127.0.0.1":
            why = "allowed is 127.0.0.1: a drill only breaks what it has started"
            self.file.complain(spot, f"cluster.host: {deployment.cluster.host!r}, {why}")
        try:
            local = deployment.server["host"] in ("0.0.0.0", "localhost") or ipaddress.ip_address(
                deployment.server["host"]
            ) == ipaddress.ip_address("127.0.0.1")
        except ValueError:
            local = False
        if not local:
            self.file.complain(spot, f"host: {deployment.server['host']!r}, allowed is 127.0.0.1 or 0.0.0.0")
        return deployment

    def _host(self, entry: Spot, first: Mapping[str, Any]) -> tuple[dict[str, Any], Deployment] | None:
        """The same of another host, which has instances of its own, and all else as the first one has it."""
        spots = self.file.section(entry, ["instances"])
        if "instances" not in spots:
            self.file.complain(entry, "instances is missing, and there is no default")
            return None
        own = yaml.safe_load(self._text_of(entry))
        content = {key: value for key, value in first.items() if key.replace("_", "-") not in OF_FIRST} | own
        try:
            return content, read(self.path, yaml.safe_dump(content | {"cluster": CLUSTER}, sort_keys=False))
        except ConfigError as error:
            for line in str(error).splitlines():
                self.file.complain(entry, LINE.sub("", line))
        return None

    def _check_shared(self, content: Mapping[str, Any]) -> None:
        """Hosts of one machine could reach each other around their cables."""
        if (content.get("transport") or {}).get("kind") == "shared":
            why = "transport.kind: 'shared', allowed with hosts are tcp and mooncake"
            self.file.complain(self.spots["deployment"], why)

    def _check_machine(self, hosts: int, disks: bool) -> None:
        """Whether there can be such hosts here."""
        if (hosts > 1 or disks) and (why := why_not(cables=hosts > 1)):
            spot, what = (self.spots["hosts"], "a list") if hosts > 1 else (self.spots["faults"], " or ".join(OF_DISKS))
            self.file.complain(spot, f"{what}, allowed is where root may make namespaces: {why}")

    def _groups(self, hosts: Sequence[Deployment]) -> dict[str, frozenset[str]]:
        """Names of instances by group."""
        found: dict[str, frozenset[str]] = {}
        for host, deployment in enumerate(hosts):
            for group in deployment.groups:
                if group.name in found:
                    why = f"instances: {group.name!r} of {HOST}{host}, allowed is no name that another host has"
                    self.file.complain(self.spots["hosts"], why)
                found[group.name] = frozenset(group.instances[: group.count])
        return found

    def _text_of(self, spot: Spot) -> str:
        """What stands there, each line in its place, so that mistakes are found at their lines."""
        begin, end = spot.node.start_mark, spot.node.end_mark
        return "\n" * begin.line + " " * begin.column + self.content[begin.index : end.index]

    # --- faults

    def _fault(self, entry: Spot) -> tuple[Mapping[str, Spot], dict[str, Any]]:
        spots = self.file.section(entry, [option.name for option in FAULTS])
        values = {option.key: option.default for option in FAULTS} | self.file.values(spots, FAULTS)
        for name in ("kind", "every", "targets"):
            if name not in spots:
                self.file.complain(entry, f"{name} is missing, and there is no default")
        return spots, values

    def _fault_of(
        self,
        spots: Mapping[str, Spot],
        values: dict[str, Any],
        groups: Mapping[str, frozenset[str]],
        known: _Targets,
        healthy: int,
    ) -> Fault:
        kinds, targets = values["kind"], dict[str, None]()
        if "partition" in kinds and "hosts" not in self.spots:
            self.file.complain(spots["kind"], f"{spots['kind'].shown}, allowed is partition where hosts are listed")
            kinds = tuple(kind for kind in kinds if kind != "partition")
        fitting = [name for name in known.breaks if all(suits(kind, name, known.instances) for kind in kinds)]
        several = {word: names for word, names in known.several.items() if set(names) <= {*fitting} and names}
        for word in values["targets"]:
            named = several.get(word) or ([word] if word in fitting else [])
            targets |= dict.fromkeys(named)
            if not named and kinds:
                allowed = ", ".join(sorted({*fitting, *several})) or "none, as no target suits all of these kinds"
                self.file.complain(spots["targets"], f"{word!r}, allowed are {allowed}")
        alone = Safety(at_once=1, healthy=healthy, settle=0.0, groups=groups, breaks=known.breaks)
        if targets and not any(alone.allows(name, ()) for name in targets):
            self.file.complain(
                spots["targets"],
                f"{', '.join(targets)}, allowed is what leaves {healthy} of each group (safety.healthy)",
            )
        return Fault(
            kinds=values["kind"],
            every=values["every"],
            targets=tuple(targets),
            lasts=values["for"],
            speed=values["speed"],
        )


class _Targets:
    """What can be broken.

    Attributes:
        instances: of all hosts.
        breaks: target -> instances that do not serve without it.
        meets: target -> instances whose streams it meets; none for what may meet all.
        several: words that stand for more than one.
    """

    def __init__(self, hosts: Sequence[Deployment]) -> None:
        first = hosts[0]
        of_host = [frozenset(n for group in host.groups for n in group.instances[: group.count]) for host in hosts]
        self.instances = frozenset[str]().union(*of_host)
        frontends = [f"frontend-{number_}" for number_ in range(first.frontends)]
        masters = ["master", *(f"master-{n}" for n in range(1, (first.cluster and first.cluster.masters) or 1))]
        found = {name: frozenset({name}) for name in sorted(self.instances)}
        found |= dict.fromkeys([*frontends, *masters], frozenset())
        found |= {on_host(KV_POOL, n): of_host[n] for n, host in enumerate(hosts) if host.orphans is not None}
        disks = [on_host(DISK, n) for n in range(len(hosts))]
        cables = {f"{HOST}{n}": of_host[n] for n in range(1, len(hosts))}
        pairs = list(combinations(range(len(hosts)), 2)) if len(hosts) > 2 else []  # of two hosts it is the cable
        links = {f"{HOST}{one}/{HOST}{other}": (one, other) for one, other in pairs}
        found |= cables | dict.fromkeys(disks, frozenset())
        found |= {name: frozenset() if one else of_host[other] for name, (one, other) in links.items()}
        self.breaks: Mapping[str, frozenset[str]] = found
        self.meets = found | {name: of_host[one] | of_host[other] for name, (one, other) in links.items()}
        self.several = {
            "engines": sorted(self.instances),
            "frontends": frontends,
            "masters": masters,
            "hosts": [*cables],
            "links": [*links],
            "disks": disks,
            **{group.name: group.instances[: group.count] for host in hosts for group in host.groups},
        }
