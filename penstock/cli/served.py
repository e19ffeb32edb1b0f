"""`penstock serve` while it runs: the HTTP server and the master in this process, and what keeps the others running."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Sequence

from penstock.cli.http import ModelOptions, OwnMaster, ServerOptions, Site, make_site
from penstock.core.clock import Clock
from penstock.core.errors import EngineFailure
from penstock.core.wire.master import Endpoint
from penstock.service.flight import AGAIN
from penstock.service.launcher import LOOK, Launcher
from penstock.service.master_pump import LocalPlacement
from penstock.service.process import has_terminal
from penstock.service.registry import LocalRegistry
from penstock.service.supervisor import CANNOT_BE_SERVED, Program, Supervisor

log = logging.getLogger("penstock.server")


class Engines:
    """Restarts the engines, and what they need.

    Attributes:
        endpoints: where they are.
        began: when that was begun, by the clock.
    """

    def __init__(self, programs: Sequence[Program], launcher: Launcher, supervisor: Supervisor, clock: Clock) -> None:
        self.endpoints = [Endpoint(p.name, p.address, devices=p.devices) for p in programs if p.address is not None]
        self._launcher, self._supervisor, self._clock = launcher, supervisor, clock
        self.began = clock.now()

    async def run(self, site: Site) -> None:
        """Run until the engines have failed for good; then all requests end with an error, and then the server."""
        (frontend,), (placement,) = site.models.frontends, site.placements
        assert isinstance(placement, LocalPlacement)
        engine_client = frontend.engine_client
        while not self._supervisor.failure:
            ended = self._launcher.step()
            for engine in self._launcher.ended:
                engine_client.engine_ended(engine)
            for name, sentence in ended:
                if name in engine_client.instances:
                    engine_client.instance_lost(name, sentence)
                    engine_client.instances[name].lost = sentence  # more specific than the end of the connection
            placement.suspect(self._supervisor.troubles)
            await asyncio.sleep(LOOK)
        frontend.end_all(EngineFailure(f"{self._supervisor.failure}; {AGAIN}"))
        if self._supervisor.exit_code != CANNOT_BE_SERVED:  # then the engine has logged why
            log.error("the server ends: %s", self._supervisor.failure)
        site.stop()

    async def end(self) -> int:
        """Stop the engines; returns the server's exit code."""
        if not self._supervisor.stopping:
            self._supervisor.stop(self._clock.now())
        while not self._supervisor.over:
            self._launcher.step()
            await asyncio.sleep(LOOK)
        return self._supervisor.exit_code


async def serve(
    options: ServerOptions,
    model: ModelOptions,
    engines: Engines,
    listener: socket.socket,
    policy: str,
    flight_recorder: str | None,
) -> int:
    """Run the HTTP server until a signal, or until the engines cannot be kept up; returns the exit code."""
    master = OwnMaster(LocalRegistry(engines.endpoints), policy, flight_recorder)
    site = make_site(options, [(model, master)], listener, "frontend-0", engines.began)
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, site.drain)
    if not has_terminal():
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, site.reload)
    try:
        await site.run(engines.run(site))
    finally:
        await site.close()
    return await engines.end()
