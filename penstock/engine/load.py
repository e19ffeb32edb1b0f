"""What an engine says of itself: to frontends, to the master, and to whoever checks it."""

from __future__ import annotations

import os
from collections.abc import Iterator

from penstock.core.wire.engine import CacheDelta, EngineStats, Inspection
from penstock.engine.cache_log import CacheLog
from penstock.engine.loop import Engine
from penstock.sched.local.intake import Intake


def stats(engine: Engine) -> EngineStats:
    scheduler, offload, mover = engine.scheduler, engine.scheduler.offload, engine.mover
    counters = scheduler.counters
    block_bytes = mover.block_bytes if mover is not None else 0
    return EngineStats(
        running=scheduler.num_running,
        waiting=scheduler.num_waiting,
        used_blocks=scheduler.pool.used,
        num_blocks=scheduler.pool.num_blocks,
        preemptions=counters.preemptions,
        prefix_queries=counters.prefix_queries,
        prefix_hits=counters.prefix_hits,
        steps=engine.steps,
        busy=engine.busy,
        idle=engine.idle,
        prefix_loads=counters.prefix_loads,
        stored_bytes=offload.stored_blocks * block_bytes if offload is not None else 0,
        loaded_bytes=offload.loaded_blocks * block_bytes if offload is not None else 0,
    )


def open_logs(engine: Engine) -> None:
    """From now on it is kept what came and went in each tier of its cache."""
    engine.cache_log = CacheLog()
    if engine.scheduler.offload is not None:
        engine.tier_log = CacheLog()


def has_news(engine: Engine) -> bool:
    """Whether `cache_news` has something."""
    return any(log.changed for _, log in _logs(engine))


def cache_news(engine: Engine, incarnation: int) -> list[CacheDelta]:
    """What came and went in each tier since the last time."""
    return [
        CacheDelta(incarnation, log.sequence, *changes, tier=tier)
        for tier, log in _logs(engine)
        if (changes := log.take()) is not None
    ]


def whole_cache(engine: Engine, incarnation: int) -> list[CacheDelta]:
    """Everything that can be found in each tier, numbered like the last of its deltas, so that the next one follows it.

    Whoever else listens misses what would have been in the next one, and will see the gap.
    """
    deltas = []
    for tier, log in _logs(engine):
        log.take()
        offload = engine.scheduler.offload
        keys = offload.tier.keys() if tier == "host" and offload is not None else engine.scheduler.pool.keys()
        deltas.append(CacheDelta(incarnation, log.sequence, keys, [], tier=tier, whole=True))
    return deltas


def _logs(engine: Engine) -> Iterator[tuple[str, CacheLog]]:
    """By the names of their tiers."""
    if engine.cache_log is not None:
        yield "device", engine.cache_log
    if engine.tier_log is not None:
        yield "host", engine.tier_log


def inspection(engine: Engine, intake: Intake, counts: dict[str, int]) -> Inspection:
    """Run every `check`.

    Args:
        counts: of the server.
    """
    scheduler, handoffs = engine.scheduler, intake.handoffs
    counts = {
        **counts,
        "owners": len(intake),
        "running": scheduler.num_running,
        "waiting": scheduler.num_waiting,
        "migrating": scheduler.num_migrating,
        "open_files": len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0,
        **scheduler.pool.counts(),
        **(scheduler.offload.counts() if scheduler.offload is not None else {}),
        **(handoffs.counts() if handoffs is not None else {}),
        **engine.runner.counts(),
    }
    incarnation = intake.peer.incarnation
    try:
        engine.check()
        intake.check()
    except AssertionError as error:
        return Inspection(incarnation, counts, str(error) or "an invariant")
    return Inspection(incarnation, counts)
