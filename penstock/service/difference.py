"""What has to happen so that a running deployment becomes another one, from the two files alone."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.core.errors import ConfigError
from penstock.core.parallel import DATA, EXPERTS
from penstock.service.deployment import Deployment, Group

RUNS_IT = ("policy", "live_roles", "media_route", "priorities")  # what only the master needs to know


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """
    Attributes:
        added, removed: instances.
        changed: instances, each with the settings for which another process takes its place.
        master: settings for which the master is started anew.
        prefix: of the master's name.
    """

    added: Sequence[str] = ()
    removed: Sequence[str] = ()
    changed: Mapping[str, Sequence[str]] = field(default_factory=dict)
    master: Sequence[str] = ()
    prefix: str = ""

    @property
    def lines(self) -> list[str]:
        """For people, one for each thing that happens."""
        return [
            *(f"{name} is added" for name in self.added),
            *(f"{name} is replaced: {', '.join(settings)}" for name, settings in self.changed.items()),
            *(f"{name} is removed" for name in self.removed),
            *([f"{self.prefix}master is started anew: {', '.join(self.master)}"] if self.master else []),
        ]


def difference(
    file: str, running: Deployment, wanted: Deployment, *, new_model: bool = False, missing: Collection[str] = ()
) -> Difference:
    """
    Args:
        file: name of the one that describes `wanted`, for messages.
        new_model: whether the checkpoint is another one, which is not said by its name.
        missing: instances of `running` that do not run, after all.

    Raises:
        ConfigError: a line "FILE: setting: ..." for each that cannot change while the deployment runs.
    """
    if wrong := [f"{file}: {line}" for line in _fixed(running, wanted, new_model)]:
        raise ConfigError("\n".join(wrong))
    before = {name: settings for name, settings in _settings(running).items() if name not in missing}
    after = _settings(wanted)
    changed = {
        name: [*(["model"] if new_model else []), *_unlike(before[name], after[name])]
        for name in after
        if name in before
    }
    return Difference(
        added=[name for name in after if name not in before],
        removed=[name for name in before if name not in after],
        changed={name: settings for name, settings in changed.items() if settings},
        master=[_shown(key) for key in RUNS_IT if getattr(running, key) != getattr(wanted, key)],
        prefix=running.prefix,
    )


def _fixed(running: Deployment, wanted: Deployment, new_model: bool) -> Iterator[str]:
    """What cannot change."""
    before, after = ({**each.options, **each.server} for each in (running, wanted))
    for key, value in before.items():
        if key != "served_model_name" and after[key] != value:
            yield _refusal(_shown(key), "another value" if key == "api_key" else after[key], value, key)
    if wanted.prefix != running.prefix:
        yield _refusal("models: name", *(each.prefix.rstrip("/") or "no list of them" for each in (wanted, running)))
    if wanted.names != running.names:
        why = ", which clients use; served-model-name sets it for any model"
        yield _refusal("served-model-name", ",".join(wanted.names), ",".join(running.names)) + why
    for key in ("frontends", "warm_pool", "flight_recorder", "restart", "scaling", "cluster", "ray"):
        if getattr(wanted, key) != getattr(running, key):
            yield _refusal(_shown(key), "another value", "what it began with")
    if running.server["ssl_cert_reqs"] == "required":
        yield "ssl-cert-reqs: required, allowed is none or optional: frontends have to say that they know an instance"
    if running.scaling is not None:
        yield "scaling: given, allowed is nothing: the policy decides which instances run"
    if running.cluster is not None and running.cluster.registry is not None:
        for key in RUNS_IT:
            if getattr(wanted, key) != getattr(running, key):
                why = "what it began with: with a registry masters of other hosts go by it too"
                yield _refusal(_shown(key), "another value", why)
    if running.ray is not None and new_model:
        yield "model: another checkpoint, allowed with launcher ray is the same: its nodes are not asked what they have"
    meeting = [[group for group in deployment.groups if group.layout.meets] for deployment in (running, wanted)]
    if meeting[0] != meeting[1] or (new_model and meeting[0]):
        yield f"{DATA}: another group, with {EXPERTS} allowed is what it began with: its instances start together"
    if wanted.orphans != running.orphans:
        yield _refusal("kv-pool.orphans", wanted.orphans, running.orphans)
    if None not in (wanted.transport, running.transport) and wanted.transport != running.transport:
        yield _refusal("transport", "another value", "what it began with")
    kinds = [{group.adopted for group in deployment.groups} for deployment in (running, wanted)]
    if kinds[0] != kinds[1]:
        yield "instances: some have a url, allowed is url in all groups before and after, or in none"


def _refusal(name: str, wanted: Any, running: Any, key: str = "") -> str:
    kept = "what it began with" if key == "api_key" else running  # which nobody needs to see
    return f"{name}: {wanted}, allowed while the deployment runs is {kept}"


def _settings(deployment: Deployment) -> dict[str, dict[str, Any]]:
    """All that each instance is told when it starts, by its name."""
    return {name: _of_group(deployment, group) for group in deployment.groups for name in group.instances}


def _of_group(deployment: Deployment, group: Group) -> dict[str, Any]:
    hands_over = {"transport": deployment.transport, "lease": deployment.lease} if group.shares_memory else {}
    set_apart = {"cpus": group.cpus, "resources": group.resources} if deployment.ray is not None else {}
    return {"role": group.role, **group.options, **hands_over, **set_apart}


def _unlike(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Names of settings that differ."""
    return [_shown(key) for key in {**one, **other} if one.get(key) != other.get(key)]


def _shown(key: str) -> str:
    return key.replace("_", "-")
