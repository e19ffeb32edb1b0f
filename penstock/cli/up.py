"""`penstock up FILE`: a whole deployment on this machine, from one file."""

from __future__ import annotations

import argparse
import contextlib
import ipaddress
import json
import logging
import os
import secrets
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli.curve import SECRET
from penstock.cli.http import allow_connections, bind
from penstock.cli.options import add_flag, number, read_text
from penstock.cli.reloaded import check_files
from penstock.cli.run_folder import run_folder
from penstock.cli.serve import SERVER_OPTIONS, engine_options
from penstock.core.clock import SystemClock
from penstock.core.errors import ConfigError
from penstock.core.host_port import join_host_port
from penstock.core.memory import total_memory
from penstock.service.checkpoint import find_checkpoint

if TYPE_CHECKING:
    from penstock.service.deployment import Common, Deployment, Group
    from penstock.service.launcher import Launcher
    from penstock.service.supervisor import ProcessKind, Program
    from penstock.service.upgrade import Upgrades

log = logging.getLogger("penstock.up")
OPTION = {option.name: option for option in SERVER_OPTIONS}


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("up", help="run a deployment that a file describes", allow_abbrev=False)
    parser.add_argument("file", help="a YAML file; recipes/ has some to start from")
    parser.add_argument("--check", action="store_true", help="say what is wrong with the file, and start nothing")
    parser.add_argument("--port", help="instead of the file's; 0 takes free ones")
    parser.add_argument(
        "--apply",
        action="store_true",
        help="change the deployment that runs there into what the file says, without failing a request; with --check, "
        "say what would change",
    )
    add_flag(
        parser,
        "start-timeout",
        number(0),
        default=600.0,
        help="with --apply: seconds that a new instance has until it takes requests; else all returns to what it was",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM. 0 after that, 2 when something cannot be served, 1 when it cannot be kept up."""
    overrides = {} if args.port is None else {"port": OPTION["port"].read(args.port, "--port")}
    text = read_text(args.file, f"{args.file}:")
    try:
        deployments = read_all(args.file, text, overrides)
    except ConfigError as error:  # many lines, each with its place
        print(error, file=sys.stderr)
        return 2
    if args.apply:
        from penstock.cli.apply import apply

        _check_engines(deployments)
        return apply(args.file, text, deployments[0], check=args.check, limit=args.start_timeout)
    check_files(deployments[0].server)
    if args.check:
        _check_engines(deployments)
        _show(deployments)
        for warning in warnings_about(deployments, os.environ):
            print(f"{args.file}: warning: {warning}", file=sys.stderr)
        return 0
    for deployment in deployments:
        if deployment.cluster is not None and deployment.cluster.registry is not None:
            from penstock.service.etcd import write_settings

            write_settings(deployment.cluster.registry, deployment.common)
    return launch(deployments)


def _check_engines(deployments: Sequence[Deployment]) -> None:
    """Raise ConfigError, as an engine would at its start, where settings do not fit the model, or the device."""
    groups = [(deployment, group) for deployment in deployments for group in deployment.groups]
    real = [(deployment, group) for deployment, group in groups if not (group.modelled or group.adopted)]
    if not real:
        return
    import torch

    from penstock.engine.build import EngineOptions, check_engine
    from penstock.nn.loader import read_architecture

    for deployment, group in real:
        directory = find_checkpoint(deployment.model)
        check_engine(EngineOptions(**engine_options(directory, dict(group.options))), torch.device(group.device))
        read_architecture(directory, group.ranks, group.options["max_model_len"])


def read(file: str, text: str, overrides: dict[str, Any] | None = None, common: Common | None = None) -> Deployment:
    """Of a file with one model. Raises ConfigError, with a line for each mistake."""
    from penstock.cli.deployment import TABLES
    from penstock.service.deployment_file import parse

    return parse(file, text, TABLES, overrides, total_memory(), _cluster_defaults(), common)


def read_all(file: str, text: str, overrides: dict[str, Any] | None = None) -> list[Deployment]:
    """One for each model. Raises ConfigError likewise."""
    from penstock.cli.deployment import TABLES
    from penstock.service.deployment_file import parse_all

    return parse_all(file, text, TABLES, overrides, total_memory(), _cluster_defaults())


def _cluster_defaults() -> dict[str, Any]:
    return {"secret": os.environ.get(SECRET) or None}


def launch(deployments: Sequence[Deployment], master: str | None = None) -> int:
    """Run what is on this host, until SIGINT or SIGTERM; the exit code as of `run`.

    Args:
        deployments: of models behind one endpoint.
        master: address of that of a deployment which this host joins, "" where a registry tells it; None to begin one.
    """
    from penstock.obs.logs import setup_logging
    from penstock.service.checkpoint import fingerprint
    from penstock.service.launcher import Launcher, Registration
    from penstock.service.programs import givers_file, master_address, plan
    from penstock.service.supervisor import Supervisor

    deployment = deployments[0]  # of what all have in common
    server = deployment.server
    setup_logging(server["log_level"], server["log_format"])
    for warning in warnings_about(deployments, os.environ):
        log.warning("%s", warning)
    allow_connections()  # the launcher holds those of all frontends
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # until the launcher handles it: exit cleanly
    models = [(each, find_checkpoint(each.model)) for each in deployments]
    with contextlib.ExitStack() as stack:
        listeners = [
            stack.enter_context(bind(server["host"], server["port"] and server["port"] + i))
            for i in range(0 if master is not None else deployment.frontends)
        ]
        cluster, doors = deployment.cluster, []
        surroundings = environments(deployments, os.environ)
        secret = surroundings["engine"][SECRET]
        folder = stack.enter_context(run_folder())
        for each in deployments:
            (folder / each.prefix).mkdir(exist_ok=True)
        engines = None
        if deployment.ray is not None:
            from penstock.cli.ray_spawner import RaySpawner

            timeout, givers = deployment.restart.heartbeat_timeout, givers_file(folder, deployment)
            engines = RaySpawner(deployment.ray.address, _anywhere(deployment.model), secret, timeout, givers)
            stack.callback(engines.close)
        elif cluster is not None:
            count = sum(len(group.instances) for each in deployments for group in each.groups)
            doors = [stack.enter_context(bind(cluster.host, 0, "cluster.host")) for _ in range(count)]
            for door in doors:
                door.listen()  # as ZMQ wants it
        if sys.stdout.isatty():
            _show(deployments, listeners, joins=master is not None)
        fields = partial(_engine_fields, server["seed"] or 0)
        programs = plan(models, folder, listeners, fields, doors, master)
        spread = cluster is not None or engines is not None
        registrations = [
            Registration(
                prefix=each.prefix,
                master=master or master_address(folder, each),
                digest=fingerprint(directory),
                givers_file=givers_file(folder, each) if spread else None,
            )
            for each, directory in models
        ]
        supervisor = Supervisor(programs, deployment.restart, server["drain_timeout"])
        launcher = Launcher(
            programs,
            supervisor,
            SystemClock(),
            surroundings,
            listeners,
            registrations,
            secret=secret if deployment.secured else None,
            drain=server["drain_timeout"] if master is not None else None,
            registry=cluster.registry if cluster is not None else None,
            engines=engines,
            warm=deployment.warm_pool,
        )
        if master is not None:  # the deployment was begun elsewhere
            return launcher.run()
        upgrades = _upgrades(models, registrations[0].digest, folder, listeners, launcher, surroundings)
        stack.callback(upgrades.close)
        return launcher.run(upgrades.look)


def _upgrades(
    models: Sequence[tuple[Deployment, Path]],
    digest: str,
    folder: Path,
    listeners: Sequence[socket.socket],
    launcher: Launcher,
    surroundings: dict[ProcessKind, Mapping[str, str]],
) -> Upgrades:
    """What changes the deployment while it runs, which is of one model."""
    from penstock.cli.apply import ADDRESS
    from penstock.service.checkpoint import file_states
    from penstock.service.control import ControlSocket, Question
    from penstock.service.programs import plan
    from penstock.service.upgrade import Running, Upgrades

    deployment, directory = models[0]
    server, ports = deployment.server, [listener.getsockname()[1] for listener in listeners]

    def read_question(question: Question) -> tuple[Deployment, Path]:
        if len(models) > 1:
            raise ConfigError(f"--apply: {len(models)} models are served there, allowed is one: start it anew instead")
        with contextlib.chdir(question["folder"]):
            wanted = read(question["file"], question["text"])
            settings = {**wanted.server, "port": server["port"]}  # it was found by its port
            return replace(wanted, server=settings), find_checkpoint(wanted.model).resolve()

    def plan_anew(wanted: Deployment, directory: Path, names: Mapping[str, str]) -> list[Program]:
        fields = partial(_engine_fields, server["seed"] or 0)
        return plan([(wanted, directory)], folder, listeners, fields, names=names)

    def surround(wanted: Deployment) -> None:
        surroundings["engine"] = {**_threads([wanted]), **os.environ, SECRET: surroundings["engine"][SECRET]}

    (folder / ADDRESS).write_text(json.dumps([server["host"], ports[0]]))
    names = {name: name for group in deployment.groups for name in group.instances}
    running = Running(
        deployment=deployment,
        directory=directory.resolve(),
        digest=digest,
        files=file_states(directory),
        names=names,
    )
    frontends = [_reached(listener) for listener in listeners]
    return Upgrades(ControlSocket(folder), launcher, running, read_question, plan_anew, frontends, surround)


def _reached(listener: socket.socket) -> tuple[str, int]:
    """Where this host finds it."""
    host, port = listener.getsockname()[:2]
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host), port


def _engine_fields(seed: int, directory: Path, group: Group, number_: int) -> dict[str, Any]:
    """Fields of its kind of options. The noise of each modelled engine is its own."""
    if group.adopted:
        return {"model": str(directory), **{key: value for key, value in group.options.items() if key != "device"}}
    if not group.modelled:
        return engine_options(directory, dict(group.options))
    fields = dict(group.options)
    fields["prefix_cache"] = fields.pop("enable_prefix_caching")
    return {"model": str(directory), "seed": seed + number_, **fields}


def _anywhere(model: str) -> str:
    """The model as another machine knows it, if it is a folder that is there too."""
    return str(Path(model).resolve()) if Path(model).is_dir() else model


def environments(deployments: Sequence[Deployment], ours: Mapping[str, str]) -> dict[ProcessKind, Mapping[str, str]]:
    """Of each kind of process. What is secret travels here, where other users of the host do not see it: the API keys,
    and what processes know one another by, which is new in every run of a deployment on one host."""
    deployment = deployments[0]  # of what all have in common
    secret = (deployment.cluster.secret if deployment.cluster is not None else None) or secrets.token_hex(32)
    to_all = {SECRET: secret} if deployment.secured else {}
    return {
        "engine": {**_threads(deployments), **ours, SECRET: secret},
        "master": {**ours, **to_all},
        "frontend": {**ours, **to_all, "PENSTOCK_API_KEY": ",".join(_api_keys(deployment, ours))},
    }


def _api_keys(deployment: Deployment, ours: Mapping[str, str]) -> tuple[str, ...]:
    """The file's, or else the environment's. Raises ConfigError when that has none in it."""
    option = OPTION["api-key"]
    keys: tuple[str, ...] = deployment.server["api_key"] or ()
    return keys if keys or not ours.get(option.variable) else option.read(ours[option.variable], option.variable)


def warnings_about(deployments: Sequence[Deployment], ours: Mapping[str, str]) -> list[str]:
    server, warnings = deployments[0].server, [warning for each in deployments for warning in each.warnings]
    host = server["host"]
    if _is_loopback(host) or server["api_key_file"] is not None or _api_keys(deployments[0], ours):
        return warnings
    return [*warnings, f"host: {host} can be reached from other machines, and there is no api-key"]


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:  # some name
        return False


def _threads(deployments: Sequence[Deployment]) -> dict[str, str]:
    """CPU engines share the cores; left alone, each would start a thread for every core."""
    engines = sum(group.count for each in deployments for group in each.groups if group.device == "cpu")
    if engines < 2:
        return {}
    return {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // engines))}


def _show(deployments: Sequence[Deployment], listeners: Sequence[socket.socket] = (), *, joins: bool = False) -> None:
    """What runs where, as a table; with `joins` frontends run elsewhere, and a master unless it is asked for."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    deployment = deployments[0]  # of what all have in common
    host, port = deployment.server["host"], deployment.server["port"]
    ports = [listener.getsockname()[1] for listener in listeners] or [
        port and port + i for i in range(deployment.frontends)
    ]
    names = [name for each in deployments for name in each.names]
    table = Table(
        title=f"penstock {'join' if joins else 'up'}: {escape(', '.join(names))}",
        title_justify="left",
        box=None,
        padding=(0, 2),
    )
    for column in ("process", "count", "role", "device or address"):
        table.add_column(column, justify="right" if column == "count" else "left")
    if not joins:
        shown = ", ".join(join_host_port(host, p or "a free port") for p in ports)
        table.add_row("frontend", str(len(ports)), "", escape(shown))
    for each in deployments:
        masters = None if each.cluster is None else each.cluster.masters
        masters = int(not joins) if masters is None else masters
        if masters:
            table.add_row(f"{each.prefix}master", str(masters), "", f"policy {each.policy}")
        for group in each.groups:
            where = str(group.options["url"]) if group.adopted else group.device
            table.add_row(group.name, str(group.count), group.role, escape(where))
        if each.orphans is not None:
            kept = f"keeps the blocks of failed engines for {each.orphans:g} s"
            table.add_row(f"{each.prefix}kv-pool", "1", "", kept)
    if deployment.warm_pool:
        table.add_row("warm", str(deployment.warm_pool), "", "taken when an instance starts")
    if deployment.ray is not None:
        table.add_row(
            "", "", "", f"Ray runs the engines, cluster {escape(deployment.ray.address or 'of this machine')}"
        )
    for each in deployments:
        if each.transport is not None:
            table.add_row(each.prefix.rstrip("/"), "", "", f"transport {each.transport.kind}, lease {each.lease:g} s")
    Console().print(table)
