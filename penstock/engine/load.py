"""What an engine says of itself: to frontends, and to whoever checks it."""

from __future__ import annotations

import os

from penstock.core.wire.engine import EngineStats, Inspection
from penstock.engine.loop import Engine
from penstock.sched.local.intake import Intake


def stats(engine: Engine) -> EngineStats:
    scheduler = engine.scheduler
    counters = scheduler.counters
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
    )


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
        "leaving": scheduler.num_leaving,
        "open_files": len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0,
        **scheduler.pool.counts(),
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
