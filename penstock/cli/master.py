"""The master's process: python -m penstock.cli.master JSON. Started by `penstock up`, not by people.

JSON:
    name                of this master, for the log
    address             the ZMQ endpoint to bind, for frontends, and for launchers, which register their instances
    public              one for other hosts; null for none
    registry            address of the etcd where instances are registered and masters are elected; null for none
    secured             whether links are protected by the deployment's secret, in PENSTOCK_CLUSTER_SECRET
    parent              process id; without that process this one ends
    policy              a name in `service.policies.BUNDLES`
    priorities          {priority: {"ttft": {"low", "high"}, "tpot": the same}, ...}, in seconds; may be empty
    scaling             {"least", "most", "start_seconds", "devices", "interval", "cooldown_out", "cooldown_in"}; null
                        where nobody starts or stops instances
    flight_recorder     file where every decision is written; null for none
    seed                of randomised policies; null for an unpredictable one
    heartbeat           the heartbeat file, for hang detection
    log_level, log_format

It ends when its launcher tells it to, or has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

import msgspec

from penstock.cli.curve import curve_of
from penstock.cli.http import allow_connections, make_master
from penstock.core.clock import RunningClock
from penstock.core.errors import PenstockError
from penstock.core.garbage import collect_rarely
from penstock.core.heartbeat import keep_beating
from penstock.core.service_level import Bounds
from penstock.obs.logs import setup_logging
from penstock.sched.cluster import SlowInstances
from penstock.service.policies import BUNDLES, Circumstances
from penstock.service.registry import LocalRegistry
from penstock.service.session import FleetLimits
from penstock.service.supervisor import STOP

log = logging.getLogger("penstock.master")
LOOK = 0.5  # seconds between two checks of the parent


def main(settings: dict[str, Any]) -> int:
    """Returns 0 when told to stop, 1 when another master leads, 2 when the settings cannot be used."""
    setup_logging(settings["log_level"], settings["log_format"], settings["name"])
    import uvloop

    try:
        return uvloop.run(serve(settings))
    except PenstockError as error:
        print(f"penstock: {error}", file=sys.stderr)
        return 2


async def serve(settings: dict[str, Any]) -> int:
    """Decide until told to stop, or until the parent process has ended; 1 when another master leads."""
    working = asyncio.create_task(_lead(settings) if settings["registry"] else _decide(settings, LocalRegistry()))
    asyncio.get_running_loop().add_signal_handler(STOP, working.cancel)
    beating = asyncio.create_task(keep_beating(Path(settings["heartbeat"])))
    watching = asyncio.create_task(_until_orphaned(settings["parent"], working))
    try:
        with contextlib.suppress(asyncio.CancelledError):
            return await working
    finally:
        watching.cancel()
        beating.cancel()
    return 0


async def _lead(settings: dict[str, Any]) -> int:
    """Decide once this master is elected, as long as it leads."""
    from penstock.service.etcd import INSTANCES, Etcd, EtcdRegistry

    etcd, registry = Etcd(settings["registry"]), EtcdRegistry()
    tasks: set[asyncio.Task[Any]] = {asyncio.create_task(etcd.follow(INSTANCES, registry.read))}
    lease = None
    try:
        await registry.loaded.wait()
        log.info("this master stands by")
        lease = await etcd.elect(settings["public"])
        log.info("this master leads")
        tasks |= {
            asyncio.create_task(_decide(settings, registry, registers=False)),
            asyncio.create_task(etcd.stay(lease)),
        }
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
        log.error("this master does not lead any more")
        return 1
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if lease is not None:
            await etcd.end(lease)


async def _decide(settings: dict[str, Any], registry: LocalRegistry, registers: bool = True) -> int:
    """
    Args:
        registers: whether launchers register their instances here.
    """
    from penstock.service.channel import make_context
    from penstock.service.master_pump import serve_frontends
    from penstock.service.process import host_of

    allow_connections()  # there is one to every engine
    context = make_context()
    recording = settings["flight_recorder"]
    priorities = msgspec.convert(settings["priorities"], dict[int, Bounds], strict=False)
    scaling = dict(settings["scaling"] or {})
    pace = {name: scaling.pop(name, None) for name in ("interval", "cooldown_out", "cooldown_in")}
    circumstances = Circumstances(
        **pace, priorities=priorities, live_roles=settings["live_roles"], media_route=settings["media_route"]
    )
    policies = BUNDLES[settings["policy"]].make(circumstances)
    fleet = FleetLimits(**scaling) if scaling else None
    after, least = settings["slow_after"], 1 if fleet is None else fleet.least
    slow = SlowInstances(after, least) if after else None
    curve, seed, public = curve_of(settings), settings["seed"], settings["public"]
    name = "master" if registers else f"master {public}"  # engines tell two masters apart by it
    # by this clock a master that was stopped forgets no frontend for it
    pump = make_master(
        context,
        registry,
        policies,
        seed,
        RunningClock(),
        name,
        flight_recorder=recording,
        fleet=fleet,
        slow=slow,
        curve=curve,
        media_route=settings["media_route"],
    )
    pump.start()
    collect_rarely()
    addresses = [address for address in (public, settings["address"]) if address is not None]
    try:
        own = host_of(settings["parent"])
        await serve_frontends(pump, registry, context, *addresses, curve=curve, registers=registers, own=own)
    finally:
        await pump.close()
        context.term()
    return 0


async def _until_orphaned(parent: int, serving: asyncio.Task[int]) -> None:
    while os.getppid() == parent:
        await asyncio.sleep(LOOK)
    log.info("the parent process has ended")
    serving.cancel()


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
