"""The settings of each section of a deployment file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.service.settings_file import Setting


@dataclass(frozen=True, slots=True, kw_only=True)
class Tables:
    """
    Attributes:
        top: of the file itself; at least frontends, host, port.
        model: of its model, at the top too, or of each entry of `models`; at least model, policy, live-roles.
        models: of each of these entries besides those; at least name.
        engine: of an instance on a real device; at least device.
        modelled: of one on a modelled device; at least device.
        adopted: of a running server that becomes one; at least url.
        instances: of a group besides those: name, count, role, cpus, resources.
        priorities: of each entry in that list; all are needed.
        tls: of `transport.tls`; all are needed.
        faults: of `transport.faults`, `partition` of the section in it.
    """

    top: Sequence[Setting]
    model: Sequence[Setting]
    models: Sequence[Setting]
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
