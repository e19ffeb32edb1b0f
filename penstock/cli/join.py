"""`penstock join MASTER FILE`: instances on this host for a deployment that runs on others."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from penstock.cli.options import read_text
from penstock.core.errors import ConfigError
from penstock.core.host_port import split_host_port


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("join", help="add this host's instances to a running deployment", allow_abbrev=False)
    parser.add_argument("master", nargs="?", help="HOST:PORT of its master; by default of the file, or the registry")
    parser.add_argument("file", help="a YAML file as for penstock up, with the instances of this host")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM; then what runs here may finish. Exit codes as of `penstock up`."""
    from penstock.cli.deployment import TABLES
    from penstock.cli.up import launch, read
    from penstock.service.deployment_file import registry_in
    from penstock.service.etcd import read_settings

    text = read_text(args.file, f"{args.file}:")
    try:
        registry = registry_in(args.file, text, TABLES)
        common = None if registry is None else read_settings(registry)
        deployment = read(args.file, text, common=common)
        if common is not None and (why := deployment.common.difference(common)):
            raise ConfigError(f"{args.file}: {why}, in the deployment; allowed is the same, or nothing")
        cluster = deployment.cluster
        if cluster is None or not (deployment.groups or cluster.masters):
            missing = "cluster" if cluster is None else "instances"
            raise ConfigError(f"{args.file}:1: {missing}: missing, and there is no default", missing)
        if cluster.registry is None and cluster.masters:
            raise ConfigError(
                "cluster.masters: the deployment has its master, allowed is another one only with a registry"
            )
        master = "" if cluster.registry else args.master or cluster.master or ""
        master = master.removeprefix("tcp://")
        if cluster.registry is None:
            _check_place(master)
    except ConfigError as error:  # many lines, each with its place
        print(error, file=sys.stderr)
        return 2
    return launch(
        deployment,
        master and f"tcp://{master}",
        lambda model, policy: read(args.file, text, {"model": model} | ({"policy": policy} if policy else {}), common),
    )


def _check_place(master: str) -> None:
    try:
        _, port = split_host_port(master)
    except ValueError:
        port = 0
    if not port:
        raise ConfigError(
            f"cluster.master: {master!r}, allowed is HOST:PORT of a deployment's master, or [IPv6]:PORT", "master"
        )
