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
import threading
from collections.abc import Callable, Mapping, Sequence
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
from penstock.core.errors import ConfigError, PenstockError
from penstock.core.host_port import join_host_port
from penstock.core.memory import total_memory
from penstock.service.checkpoint import find_checkpoint
from penstock.service.programs import threads

if TYPE_CHECKING:
    from penstock.cli.ray_spawner import RaySpawner
    from penstock.service.change import Found, Running
    from penstock.service.deployment import Common, Deployment, Group
    from penstock.service.follower import Follower
    from penstock.service.launcher import Launcher, Registration
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
        read_architecture(directory, group.layout, group.options["max_model_len"], group.options["quantization"])


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


def launch(
    deployments: Sequence[Deployment],
    master: str | None = None,
    read_again: Callable[[str, str], Deployment] | None = None,
) -> int:
    """Run what is on this host, until SIGINT or SIGTERM; the exit code as of `run`.

    Args:
        deployments: of models behind one endpoint.
        master: address of that of a deployment which this host joins, "" where a registry tells it; None to begin one.
        read_again: then what its file describes with another model and policy.
    """
    from penstock.obs.logs import setup_logging

    deployment = deployments[0]  # of what all have in common
    server, joins = deployment.server, master is not None
    setup_logging(server["log_level"], server["log_format"])
    for warning in warnings_about(deployments, os.environ):
        log.warning("%s", warning)
    allow_connections()  # the launcher holds those of all frontends
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # until the launcher handles it: exit cleanly
    models = [(each, find_checkpoint(each.model)) for each in deployments]
    with contextlib.ExitStack() as stack:
        listeners = [
            stack.enter_context(bind(server["host"], server["port"] and server["port"] + i))
            for i in range(0 if joins else deployment.frontends)
        ]
        surroundings = environments(deployments, os.environ)
        ground = _Ground(stack.enter_context(run_folder()), listeners, surroundings, server["seed"] or 0, master)
        stack.callback(ground.close)
        engines = ground.ray_of(deployment)
        if engines is not None:
            stack.callback(engines.close)
        if sys.stdout.isatty():
            _show(deployments, listeners, joins=joins)
        registrations = [ground.registration(*model) for model in models]
        launcher = _launcher(models, registrations, ground, engines)
        running = [
            (registration, _running(*model, registration))
            for registration, model in zip(registrations, models, strict=True)
        ]
        changes: Follower | Upgrades
        if read_again is not None:
            changes = _follower(read_again, *running[0], launcher, ground)
        else:
            changes = _upgrades(running, launcher, ground)
        stack.callback(changes.close)
        return launcher.run(changes.look)


class _Ground:
    """What the processes of this host are made with, whatever the deployment becomes.

    Args:
        folder: of this run.
        surroundings: environments, by kind of process; those of engines change.
        master: as of `launch`.
    """

    def __init__(
        self,
        folder: Path,
        listeners: Sequence[socket.socket],
        surroundings: dict[ProcessKind, Mapping[str, str]],
        seed: int,
        master: str | None,
    ) -> None:
        self.folder, self.listeners, self.surroundings, self.master = folder, listeners, surroundings, master
        self.launcher: Launcher | None = None
        self._seed = seed
        self._doors: dict[str, socket.socket] = {}  # process -> where other hosts reach it

    def plan(self, models: Sequence[tuple[Deployment, Path]], names: Mapping[str, str]) -> list[Program]:
        """See `programs.plan`; names of all instances."""
        from penstock.service.programs import plan

        cluster, doors = models[0][0].cluster, []
        if cluster is not None and models[0][0].ray is None:
            for process in names.values():
                if process not in self._doors:
                    self._doors[process] = bind(cluster.host, 0, "cluster.host")
                    self._doors[process].listen()  # as ZMQ wants it
            doors = [self._doors[process] for process in names.values()]
        for deployment, _ in models:
            (self.folder / deployment.prefix).mkdir(exist_ok=True)
        fields = partial(_engine_fields, self._seed)
        return plan(models, self.folder, self.listeners, fields, doors, self.master, names)

    def ray_of(self, deployment: Deployment) -> RaySpawner | None:
        """What starts its engines, if Ray does."""
        if deployment.ray is None:
            return None
        from penstock.cli.ray_spawner import RaySpawner
        from penstock.service.programs import givers_file

        secret, timeout = self.surroundings["engine"][SECRET], deployment.restart.heartbeat_timeout
        givers = givers_file(self.folder, deployment)
        return RaySpawner(
            deployment.ray.address, _anywhere(deployment.model), secret, timeout, givers, deployment.warm_pool
        )

    def registration(self, deployment: Deployment, directory: Path) -> Registration:
        from penstock.service.checkpoint import fingerprint
        from penstock.service.launcher import Registration
        from penstock.service.programs import givers_file, master_address

        spread = deployment.cluster is not None or deployment.ray is not None
        return Registration(
            prefix=deployment.prefix,
            master=master_address(self.folder, deployment) if self.master is None else self.master or None,
            digest=fingerprint(directory),
            givers_file=givers_file(self.folder, deployment) if spread else None,
        )

    def surround(self, wanted: Sequence[Deployment]) -> None:
        """Make room for what they need."""
        secret = self.surroundings["engine"][SECRET]
        self.surroundings["engine"] = {**threads(wanted), **os.environ, SECRET: secret}

    def tidy(self) -> None:
        """Close what belongs to no process any more."""
        assert self.launcher is not None
        for process in self._doors.keys() - self.launcher.programs.keys():
            self._doors.pop(process).close()

    def close(self) -> None:
        for door in self._doors.values():
            door.close()


def _launcher(
    models: Sequence[tuple[Deployment, Path]],
    registrations: Sequence[Registration],
    ground: _Ground,
    engines: RaySpawner | None,
) -> Launcher:
    from penstock.service.launcher import Launcher
    from penstock.service.supervisor import Supervisor

    deployment = models[0][0]  # of what all have in common
    cluster, drain = deployment.cluster, deployment.server["drain_timeout"]
    programs = ground.plan(models, {name: name for each, _ in models for name in _instances(each)})
    ground.launcher = Launcher(
        programs,
        Supervisor(programs, deployment.restart, drain),
        SystemClock(),
        ground.surroundings,
        ground.listeners,
        registrations,
        secret=ground.surroundings["engine"][SECRET] if deployment.secured else None,
        drain=drain if ground.master is not None else None,
        registry=cluster.registry if cluster is not None else None,
        engines=engines,
        warm=deployment.warm_pool,
    )
    return ground.launcher


def _running(deployment: Deployment, directory: Path, registration: Registration) -> Running:
    """What has just been started."""
    from penstock.service.change import Running
    from penstock.service.checkpoint import file_states

    return Running(
        deployment=_placed(deployment),
        directory=directory.resolve(),
        digest=registration.digest,
        files=file_states(directory),
        names={name: name for name in _instances(deployment)},
    )


def _instances(deployment: Deployment) -> list[str]:
    return [name for group in deployment.groups for name in group.instances]


def _follower(
    read_again: Callable[[str, str], Deployment],
    registration: Registration,
    running: Running,
    launcher: Launcher,
    ground: _Ground,
) -> Follower:
    """What changes this host's instances as the one that began the deployment orders."""
    from penstock.service.follower import Follower

    def read_with(model: str, policy: str) -> tuple[Deployment, Path]:
        wanted = _placed(read_again(model, policy))
        return wanted, find_checkpoint(wanted.model).resolve()

    return Follower(launcher, registration, running, read_with, ground.plan, ground.surround, ground.tidy)


def _upgrades(models: Sequence[tuple[Registration, Running]], launcher: Launcher, ground: _Ground) -> Upgrades:
    """What changes the deployment while it runs."""
    from penstock.cli.apply import ADDRESS
    from penstock.service.control import ControlSocket, Question
    from penstock.service.upgrade import Upgrades

    server, ports = models[0][1].deployment.server, [listener.getsockname()[1] for listener in ground.listeners]

    def read_question(question: Question) -> list[Found]:
        with contextlib.chdir(question["folder"]):
            wanted = [_placed(each) for each in read_all(question["file"], question["text"])]
            port = {"port": server["port"]}  # by which it was found
            return [
                (replace(each, server={**each.server, **port}), find_checkpoint(each.model).resolve())
                for each in wanted
            ]

    (ground.folder / ADDRESS).write_text(json.dumps([server["host"], ports[0]]))
    return Upgrades(
        ControlSocket(ground.folder),
        launcher,
        models,
        read_question,
        ground.plan,
        [_reached(listener) for listener in ground.listeners],
        ground.surround,
        ground.tidy,
        _tell_registry,
    )


def _tell_registry(running: Running) -> None:
    """Those that join later are told by etcd which model this is."""
    cluster = running.deployment.cluster
    if cluster is None or cluster.registry is None:
        return
    from penstock.service.etcd import write_settings

    def write(address: str, common: Common) -> None:
        try:
            write_settings(address, common)
        except PenstockError as error:
            log.warning("the model is another one, which files for penstock join have to say now: %s", error)

    common = replace(running.deployment.common, model=running.deployment.model)
    threading.Thread(target=write, args=(cluster.registry, common), daemon=True).start()


def _placed(deployment: Deployment) -> Deployment:
    """Its model as other hosts find it, and clients as before."""
    names = {"served_model_name": tuple(deployment.names)}
    return replace(deployment, model=_anywhere(deployment.model), options={**deployment.options, **names})


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
        "engine": {**threads(deployments), **ours, SECRET: secret},
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
