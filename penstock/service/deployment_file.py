"""The YAML file that describes a deployment, or several behind one endpoint: one for each of its models.

The allowed values of each setting are in the tables given to `parse`, which the command line makes of the same options
as its flags. This module knows the sections, and which settings are compatible; what a file says of one model
`model_section` reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from ipaddress import ip_address
from typing import Any

from penstock.core.errors import ConfigError
from penstock.service.deployment import Cluster, Common, Deployment, Ray
from penstock.service.model_section import MODEL_SECTIONS, ModelSection, Shares, defaults, names
from penstock.service.settings_file import Setting, SettingsFile
from penstock.service.supervisor import RestartPolicy
from penstock.service.tables import Tables

HIGHEST_PORT = 65535
SECTIONS = "limits", "restart", "cluster", "ray", "models"
MOST_MODELS = 64


def parse(
    name: str,
    text: str,
    tables: Tables,
    overrides: dict[str, Any] | None = None,
    memory: int | None = None,
    cluster: Mapping[str, Any] | None = None,
    common: Common | None = None,
) -> Deployment:
    """Of a file with one model. Arguments and errors as of `parse_all`."""
    deployments = parse_all(name, text, tables, overrides, memory, cluster, common)
    if len(deployments) > 1:
        raise ConfigError(f"{name}: models: {len(deployments)} of them, allowed here is one: a file for each", "models")
    return deployments[0]


def parse_all(
    name: str,
    text: str,
    tables: Tables,
    overrides: dict[str, Any] | None = None,
    memory: int | None = None,
    cluster: Mapping[str, Any] | None = None,
    common: Common | None = None,
) -> list[Deployment]:
    """One for each model.

    Args:
        name: of the file, for messages.
        overrides: values of settings at the top, and of models, by key, that go before the file's.
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
    section = file.section(file.section(file.root, ["cluster"]).get("cluster"), names(tables.cluster))
    return file.values(section, tables.cluster).get("registry")


class _Parser:
    def __init__(self, file: SettingsFile, tables: Tables, memory: int | None, common: Common | None = None) -> None:
        self.file, self.tables, self.memory, self.common = file, tables, memory, common
        self.of_model = [*names(tables.model), *MODEL_SECTIONS]
        engine = names([*tables.engine, *tables.modelled])
        self.elsewhere = dict.fromkeys(engine, "engine") | dict.fromkeys(names(tables.limits), "limits")
        self.spots = file.section(file.root, [*names(tables.top), *SECTIONS, *self.of_model], self.elsewhere)

    def parse(self, overrides: dict[str, Any], cluster_defaults: Mapping[str, Any]) -> list[Deployment]:
        file, tables = self.file, self.tables
        of_models = {key: value for key, value in overrides.items() if key in defaults(tables.model)}
        top = defaults(tables.top) | file.values(self.spots, tables.top)
        top |= {key: value for key, value in overrides.items() if key not in of_models}
        limits = self._section("limits", tables.limits)
        restart = RestartPolicy(**self._section("restart", tables.restart))
        cluster = self._cluster(cluster_defaults)
        ray = self._ray(top.pop("launcher"))
        self._check_ports(top)
        names_ = ("frontends", "warm_pool")
        frontends, warm_pool = (top.pop(key) for key in names_)
        shares = Shares(self.memory)
        deployments = [
            section.parse(
                of_models,
                shares,
                frontends=frontends,
                warm_pool=warm_pool,
                server=top | limits,
                cluster=cluster if cluster is None else replace(cluster, port=cluster.port + number),
                ray=ray,
                restart=restart,
            )
            for number, section in enumerate(self._sections())
        ]
        if len(deployments) > 1:
            self._check_several(deployments)
        file.finish()
        return deployments

    def _sections(self) -> list[ModelSection]:
        """What is said of each model: at the top, where there is no list of them."""
        spot, file, tables = self.spots.get("models"), self.file, self.tables
        if spot is None:
            return [ModelSection(file, tables, self.common, file.root, self.spots, self.spots)]
        for name in self.spots.keys() & set(self.of_model):
            why = f"allowed is {name} in each entry of models, beside nothing of the kind here"
            file.complain(self.spots[name], f"{self.spots[name].shown}, {why}")
        known = [*names(tables.models), *self.of_model]
        top = dict.fromkeys([*names(tables.top), *SECTIONS], "the top of the file")
        entries = file.items(spot)
        if not 1 <= len(entries) <= MOST_MODELS:
            file.complain(spot, f"{len(entries)} entries, allowed is a list of 1 to {MOST_MODELS} models")
        spots = [file.section(entry, known, self.elsewhere | top) for entry in entries]
        pairs = zip(entries, spots, strict=True)
        return [ModelSection(file, tables, self.common, entry, own, self.spots) for entry, own in pairs]

    def _check_several(self, deployments: Sequence[Deployment]) -> None:
        """What each of several models has for itself, and what there is for one alone."""
        file, spot = self.file, self.spots["models"]
        entries = file.items(spot)
        for what, found in (
            ("name", [[deployment.prefix] for deployment in deployments]),
            ("served-model-name", [deployment.names for deployment in deployments]),
        ):
            seen: set[str] = set()
            for entry, own in zip(entries, found, strict=True):
                for name in own:
                    if name in seen:
                        shown = name.rstrip("/") if what == "name" else name
                        file.complain(entry, f"{what}: {shown!r} is another entry's too, allowed is one of its own")
                seen |= set(own)
        first = deployments[0]
        if first.cluster is not None and first.cluster.registry is not None:
            why = f"allowed with {len(deployments)} models is none: the master of each is its registry"
            file.complain(self.spots["cluster"], f"registry: {first.cluster.registry!r}, {why}")
        if first.cluster is not None and (last := first.cluster.port + len(deployments) - 1) > HIGHEST_PORT:
            why = f"{first.cluster.port}, allowed is at most {HIGHEST_PORT - len(deployments) + 1}"
            file.complain(self.spots["cluster"], f"port: {why}: the masters of all models listen up to {last}")
        if first.ray is not None:
            why = "allowed with several models is local; with ray, start a deployment for each"
            file.complain(self.spots["launcher"], f"'ray', {why}")

    def _section(self, name: str, settings: Sequence[Setting]) -> dict[str, Any]:
        spots = self.file.section(self.spots.get(name), names(settings))
        return defaults(settings) | self.file.values(spots, settings)

    def _cluster(self, otherwise: Mapping[str, Any]) -> Cluster | None:
        """
        Args:
            otherwise: for what the file does not give.
        """
        spot, settings = self.spots.get("cluster"), self.tables.cluster
        if spot is None:
            return None
        spots = self.file.section(spot, names(settings))
        cluster = Cluster(**defaults(settings) | dict(otherwise) | self.file.values(spots, settings))
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

    def _check_ports(self, top: Mapping[str, Any]) -> None:
        last = top["port"] + top["frontends"] - 1
        if top["port"] and last > HIGHEST_PORT:
            spot = self.spots.get("port", self.spots.get("frontends", self.file.root))
            self.file.complain(
                spot,
                f"{top['port']}, allowed is at most {HIGHEST_PORT - top['frontends'] + 1} "
                f"with {top['frontends']} frontends, each on a port of its own",
            )
