"""The process of an adopted server's instance: python -m penstock.cli.adopted JSON. Started by `penstock up`, not by
people.

JSON:
    name, address       of this instance; the ZMQ endpoint to bind
    shown_as            its name in the log
    public              {"address", "fd"}: one for other hosts, and a socket that it inherits; null for none
    secured             whether links are, by the deployment's secret; see `cli.curve`
    parent              process id; without that process this one ends
    options             fields of AdoptedOptions
    heartbeat           the heartbeat file, for hang detection
    log_level, log_format

The server's API key, if it needs one, is in PENSTOCK_ADOPTED_API_KEY. It ends on `Shutdown`, or when its parent has
ended; with 1 when the server is lost, and its next incarnation waits until that is back.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

from penstock.cli.curve import curve_of
from penstock.core.clock import RunningClock
from penstock.core.errors import ConfigError, PenstockError
from penstock.core.garbage import collect_rarely
from penstock.core.heartbeat import keep_beating
from penstock.obs.logs import setup_logging
from penstock.service.adopted.http import VllmServer
from penstock.service.adopted.server import AdoptedServer
from penstock.service.adopted.start import AdoptedOptions, adopt, until_there

log = logging.getLogger("penstock.engine")
API_KEY = "PENSTOCK_ADOPTED_API_KEY"
LOOK = 0.5  # seconds between two checks of the parent


def main(settings: dict[str, Any]) -> int:
    """Returns 0 when told to stop, 1 when the server is lost, 2 when it cannot be used."""
    setup_logging(settings["log_level"], settings["log_format"], settings.get("shown_as", ""))
    import uvloop

    try:
        uvloop.run(serve(settings))
    except PenstockError as error:
        log.error("%s", error)
        return 2 if isinstance(error, ConfigError) else 1
    return 0


async def serve(settings: dict[str, Any]) -> None:
    """Serve until told to stop. Raises ConfigError, Unavailable."""
    beating = asyncio.create_task(keep_beating(Path(settings["heartbeat"])))
    orphaned = asyncio.create_task(_until_orphaned(settings["parent"]))
    options, clock = AdoptedOptions(**settings["options"]), RunningClock()
    server = VllmServer(options.url, os.environ.get(API_KEY) or None)
    serving = asyncio.create_task(_serve(settings, options, server, clock))
    try:
        await asyncio.wait((serving, orphaned), return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            serving.result()
    finally:
        for task in (serving, orphaned, beating):
            task.cancel()
        await asyncio.gather(serving, orphaned, beating, return_exceptions=True)
        await server.close()


async def _serve(settings: dict[str, Any], options: AdoptedOptions, server: VllmServer, clock: RunningClock) -> None:
    await until_there(server)
    found = await adopt(server, options, settings["name"], time.time_ns(), clock)
    collect_rarely()
    public, curve = settings.get("public"), curve_of(settings)
    adopted = AdoptedServer(
        settings["address"],
        found.ready,
        server,
        found.model,
        found.load,
        clock,
        priorities=found.priorities,
        public=None if public is None else (public["address"], public["fd"]),
        protect=None if curve is None else curve.listen,
    )
    with closing(adopted):
        await adopted.run()


async def _until_orphaned(parent: int) -> None:
    while os.getppid() == parent:
        await asyncio.sleep(LOOK)
    log.info("the parent process has ended")


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
