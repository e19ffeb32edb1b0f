"""A frontend's process: python -m penstock.cli.frontend JSON. Started by `penstock up`, not by people.

JSON:
    name                of this frontend, the same in every incarnation
    listen_fd           a bound socket that it inherits
    parent              process id; without that process this one ends
    secured             whether links are protected by the deployment's secret, in PENSTOCK_CLUSTER_SECRET
    server              fields of ServerOptions, but for the API keys: those come in PENSTOCK_API_KEY, which other users
                        of the host cannot see
    models              of each that is served:
        options         fields of ModelOptions
        master          its master's ZMQ endpoint
        registry        address of the etcd where that is found; null where it is at `master`
    heartbeat           the heartbeat file, for hang detection

Its standard input is a socket to the launcher, which ends its answers if it is killed (`service.answer_guard`).

Told to stop it drains; told again it ends the running requests. At SIGHUP it reads API keys and certificates again.
The loss of an engine does not end it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

from penstock.cli.curve import curve_of
from penstock.cli.http import ModelOptions, ServerOptions, Site, allow_connections, make_site, set_up_logging
from penstock.cli.options import words
from penstock.core.clock import SystemClock
from penstock.core.errors import PenstockError
from penstock.core.heartbeat import keep_beating
from penstock.service.placement import Placement
from penstock.service.supervisor import STOP

log = logging.getLogger("penstock.server")
LOOK = 0.5  # seconds between two checks of the parent


def main(settings: dict[str, Any]) -> int:
    """Returns 0 when told to stop, 2 when the options cannot be served."""
    began = SystemClock().now()  # engines start at the same time; a restarted frontend finds them ready
    keys = os.environ.get("PENSTOCK_API_KEY")
    options = ServerOptions(**settings["server"], api_key=words(keys) if keys else ())
    set_up_logging(options, settings["name"])
    allow_connections()
    import uvloop

    try:
        return uvloop.run(serve(settings, options, began))
    except PenstockError as error:
        print(f"penstock: {error}", file=sys.stderr)
        return 2


async def serve(settings: dict[str, Any], options: ServerOptions, began: float) -> int:
    listener = socket.socket(fileno=settings["listen_fd"])
    link = socket.socket(fileno=sys.stdin.fileno())
    name, curve = settings["name"], curve_of(settings)
    models = [
        (
            ModelOptions(**{**told["options"], "directory": Path(told["options"]["directory"])}),
            "" if told["registry"] else told["master"],
        )
        for told in settings["models"]
    ]
    responses = Path(settings["heartbeat"]).parent / "responses"  # of all frontends here
    site = make_site(options, models, listener, name, began, link=link, curve=curve, kept_responses=responses)
    watches = [watch_parent(settings["parent"], site), keep_beating(Path(settings["heartbeat"]))]
    for told, placement in zip(settings["models"], site.placements, strict=True):
        if told["registry"]:
            watches.append(follow_master(told["registry"], placement))
    asyncio.get_running_loop().add_signal_handler(STOP, site.drain)
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, site.reload)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})  # only its launcher sends it
    try:
        await site.run(*watches)
    finally:
        await site.close()
    return 0


async def follow_master(registry: str, placement: Placement) -> None:
    from penstock.service.etcd import MASTER, Etcd
    from penstock.service.placement import RemotePlacement

    assert isinstance(placement, RemotePlacement)
    await Etcd(registry).follow(MASTER, lambda found: placement.move(found.get("", b"").decode()))


async def watch_parent(parent: int, site: Site) -> None:
    while os.getppid() == parent:
        await asyncio.sleep(LOOK)
    log.info("the parent process has ended")
    site.drain()
    site.drain()  # at once


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
