"""The processes of deployments on this machine, as command lines."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from glob import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.core.host_port import join_host_port
from penstock.service.supervisor import ProcessKind, Program

if TYPE_CHECKING:
    from penstock.service.deployment import Deployment, Group

KV_POOL = "kv-pool"  # name of that process, and of its socket
GIVERS = "givers"  # file in which the launcher tells engines who of other hosts may give them weights


def plan(
    models: Sequence[tuple[Deployment, Path]],
    folder: Path,
    listeners: Sequence[socket.socket],
    engine_fields: Callable[[Path, Group, int], dict[str, Any]],
    doors: Sequence[socket.socket] = (),
    master: str | None = None,
    names: Mapping[str, str] | None = None,
) -> list[Program]:
    """Every process that serves these models, in the order in which they start.

    Args:
        models: each with the folder of its checkpoint.
        folder: for sockets; short, because the path of one has at most 107 bytes.
        listeners: bound, one for each frontend. They stay open here, so that a restarted frontend keeps its port.
        engine_fields: folder of the checkpoint, group, and number of an instance among all of the model -> fields of
            its engine's options.
        doors: bound, one for each instance that other hosts are to reach; they stay open here likewise.
        master: address of that of a deployment which this host joins; "" where a registry tells it, or where it is in
            this process; None to start one.
        names: instance -> name of its process, where that is another one; see `service.upgrade`.
    """
    programs: list[Program] = []
    free = list(doors)
    for deployment, directory in models:
        own = [free.pop(0) for group in deployment.groups for _ in group.instances] if doors else []
        programs += _plan_model(deployment, folder, partial(engine_fields, directory), own, master, names or {})
    told = [_model(*model, master or master_address(folder, model[0])) for model in models]
    deployment = models[0][0]  # of what all have in common
    for number, listener in enumerate(listeners):
        name = f"frontend-{number}"
        settings = {"name": name, "listen_fd": listener.fileno(), "models": told}
        settings["server"] = _server(deployment, listener, number)
        settings |= _common(deployment)
        descriptors = (settings["listen_fd"],)
        programs.append(make_program(name, "frontend", settings, _heartbeat(folder, name), descriptors=descriptors))
    return programs


def _plan_model(
    deployment: Deployment,
    folder: Path,
    engine_fields: Callable[[Group, int], dict[str, Any]],
    doors: Sequence[socket.socket],
    master: str | None,
    names: Mapping[str, str],
) -> Iterator[Program]:
    """The processes that are a model's alone; arguments as of `plan`."""
    common, prefix = _common(deployment), deployment.prefix

    def program(name: str, kind: ProcessKind, settings: Mapping[str, Any], **more: Any) -> Program:
        return make_program(name, kind, {**common, **settings}, _heartbeat(folder, name), model=prefix, **more)

    if deployment.orphans is not None:
        name = prefix + KV_POOL
        settings: dict[str, Any] = {"name": name, "path": str(folder / name), "orphan_seconds": deployment.orphans}
        yield program(name, "kv_pool", settings, socket=folder / name)
    places = [(group, name) for group in deployment.groups for name in group.instances]
    for number, (group, instance) in enumerate(places):
        name = names.get(instance, instance)
        settings, more = _engine(deployment, group, name, folder, doors[number] if doors else None, master is not None)
        settings["options"] = engine_fields(group, number)
        if group.layout.data > 1 and deployment.ray is None:
            settings["options"] |= way_of(group, instance, folder)
        yield program(name, "engine", settings, starts=instance not in group.spares, **more)
    cluster = deployment.cluster
    masters = None if cluster is None else cluster.masters
    for number in range(int(master is None) if masters is None else masters):
        name = f"{prefix}master-{number}" if number else f"{prefix}master"
        public = None if cluster is None else f"tcp://{join_host_port(cluster.host, cluster.port + number)}"
        own = {"name": name, "address": f"ipc://{folder}/{name}", "public": public}
        yield program(name, "master", _master(deployment) | own, socket=folder / name)


def _master(deployment: Deployment) -> dict[str, Any]:
    """What each of its masters is told."""
    import msgspec

    return {
        "policy": deployment.policy,
        "live_roles": deployment.live_roles,
        "seed": deployment.server["seed"],
        "media_route": None if deployment.media_route == "auto" else deployment.media_route,
        "priorities": msgspec.to_builtins(deployment.priorities, str_keys=True),
        "scaling": None if deployment.scaling is None else asdict(deployment.scaling),
        "slow_after": deployment.restart.slow_after,
        "flight_recorder": deployment.flight_recorder,
        "registry": None if deployment.cluster is None else deployment.cluster.registry,
    }


def _common(deployment: Deployment) -> dict[str, Any]:
    """What every process is told."""
    return {
        "parent": os.getpid(),
        "log_level": deployment.server["log_level"],
        "log_format": deployment.server["log_format"],
        "secured": deployment.secured,
    }


def _heartbeat(folder: Path, name: str) -> Path:
    return folder / f"{name}.heartbeat"


def _engine(
    deployment: Deployment, group: Group, name: str, folder: Path, door: socket.socket | None, joins: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Settings of an instance's process, but for its engine's options, and what its `Program` has beside them."""
    rayed = deployment.ray is not None
    pooled = group.shares_memory and deployment.orphans is not None
    place = {"address": f"ipc://{folder}/{name}", "role": group.role}
    settings: dict[str, Any] = {**place, "name": name, "lease_s": deployment.lease, "public": None}
    settings["shown_as"] = "" if deployment.lone else name
    settings["kv_pool"] = str(folder / (deployment.prefix + KV_POOL)) if pooled else None
    settings["transport"] = _transport(deployment, folder / f"{name}.transport") if group.shares_memory else None
    settings["seen"] = str(folder / f"{deployment.prefix}seen") if group.shares_memory and not rayed else None
    settings["weights"] = _weights(deployment, group, folder, name, joins)
    more: dict[str, Any] = {**place, "socket": folder / name, "devices": group.ranks}
    more["needs"] = deployment.prefix + KV_POOL if pooled else None
    more["module"] = "adopted" if group.adopted else None
    if rayed:
        more["address"] = ""  # on a node that Ray chooses
        more["resources"] = group.needs
    if door is not None:
        more["public"] = f"tcp://{join_host_port(*door.getsockname()[:2])}"
        settings["public"] = {"address": more["public"], "fd": door.fileno()}
        more["descriptors"] = (door.fileno(),)
    return settings, more


def way_of(group: Group, instance: str, folder: Path) -> dict[str, Any]:
    """Which data-parallel group an instance is, and where it meets the others: fields of its engine's options."""
    unit, rank = divmod(group.instances.index(instance), group.layout.data)
    return {"data_parallel_rank": rank, "data_parallel_address": str(folder / f"{group.name}.groups-{unit}")}


def threads(deployments: Sequence[Deployment]) -> dict[str, str]:
    """Of engines' environment. Those on CPUs share the cores; left alone, each would start a thread for every core."""
    groups = [group for each in deployments for group in each.groups]
    engines = sum(group.count for group in groups if group.shares_memory and not group.modelled)
    if engines < 2:
        return {}
    return {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // engines))}


def master_address(folder: Path, deployment: Deployment) -> str:
    return f"ipc://{folder}/{deployment.prefix}master"


def givers_file(folder: Path, deployment: Deployment) -> Path:
    return folder / (deployment.prefix + GIVERS)


def make_program(
    name: str,
    kind: ProcessKind,
    settings: Mapping[str, Any],
    heartbeat: Path,
    module: str | None = None,
    **more: Any,
) -> Program:
    """
    Args:
        settings: as the module of `penstock.cli` has them, but for the heartbeat.
        heartbeat: the file by which it is watched.
        module: which one; by default the kind's name.
    """
    told = json.dumps({**settings, "heartbeat": str(heartbeat)})
    command = (sys.executable, "-m", f"penstock.cli.{module or kind}", told)
    return Program(name=name, kind=kind, command=command, heartbeat=heartbeat, **more)


def _transport(deployment: Deployment, path: Path) -> dict[str, Any] | None:
    if deployment.transport is None:
        return None
    kind, host = deployment.transport.kind, "127.0.0.1" if deployment.cluster is None else deployment.cluster.host
    address = f"unix:{path}" if kind == "shared" else f"tcp:{join_host_port(host, 0)}"
    return {"kind": kind, "address": address, "tls": deployment.transport.tls, "faults": deployment.transport.faults}


def _weights(deployment: Deployment, group: Group, folder: Path, name: str, joins: bool) -> dict[str, Any] | None:
    pair = "" if deployment.transport is not None and deployment.transport.tls is not None else group.weights_pair
    if not group.shares_weights or (not pair and not group.shares_memory):
        return None
    places = {
        "pair": pair,
        "address": f"unix:{folder / name}.weights",
        "sockets": f"{escape(str(folder / deployment.prefix))}/*.weights",
    }
    if deployment.cluster is None and deployment.ray is None:
        return {**places, "public": None}
    transport, told = deployment.transport, {"givers": str(givers_file(folder, deployment)), "joins": joins}
    host = "127.0.0.1" if deployment.cluster is None else deployment.cluster.host  # a Ray node has its own
    address = join_host_port(host, 0)
    told["tls"] = None if transport is None else transport.tls
    told["mooncake"] = address.rpartition(":")[0] if transport is not None and transport.kind == "mooncake" else ""
    return {**places, "public": {"address": f"tcp:{address}", **told}}


def _model(deployment: Deployment, directory: Path, master: str) -> dict[str, Any]:
    """What a frontend is told of a model."""
    options = {key: value for key, value in deployment.options.items() if key != "served_model_name"}
    options |= {"directory": str(directory), "names": deployment.names, "prefix": deployment.prefix}
    registry = None if deployment.cluster is None else deployment.cluster.registry
    return {"options": options, "master": master, "registry": registry}


def _server(deployment: Deployment, listener: socket.socket, number: int) -> dict[str, Any]:
    """A frontend's `ServerOptions`, without the API keys. Each frontend chooses seeds of its own."""
    options = {key: value for key, value in deployment.server.items() if key != "api_key"}
    if options["seed"] is not None:
        options["seed"] += number
    return options | {"port": listener.getsockname()[1]}
