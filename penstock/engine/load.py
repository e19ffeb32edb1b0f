"""What an engine says of itself: to frontends, to the master, and to whoever checks it."""

from __future__ import annotations

import os

from penstock.core.wire.engine import EngineStats, Inspection, Pool, Snapshot
from penstock.engine.loop import Engine
from penstock.sched.local.handoff import Handoffs


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
    )


def snapshot(engine: Engine, incarnation: int, pool: Pool, pool_generation: int, draining: bool) -> Snapshot:
    """Without a sequence number, so that two can be compared."""
    scheduler, recent = engine.scheduler, engine.recent
    waiting, prefill, running = scheduler.tokens_due()
    return Snapshot(
        incarnation=incarnation,
        sequence=0,
        pool=pool,
        pool_generation=pool_generation,
        draining=draining,
        running=scheduler.num_running,
        waiting=scheduler.num_waiting,
        leaving=scheduler.num_leaving,
        waiting_tokens=waiting,
        prefill_tokens=prefill,
        running_tokens=running,
        free_blocks=scheduler.pool.available,
        reserved_blocks=scheduler.num_reserved_blocks,
        num_blocks=scheduler.pool.num_blocks,
        ttft_ms=recent.ttft_ms,
        tpot_ms=recent.tpot_ms,
        interval_ms=recent.interval_ms,
        factors=dict(recent.factors),
    )


def inspection(engine: Engine, incarnation: int, handoffs: Handoffs | None, counts: dict[str, int]) -> Inspection:
    """Run every `check`.

    Args:
        counts: of the server, with "owners": requests that have one.
    """
    scheduler = engine.scheduler
    counts = {
        **counts,
        "running": scheduler.num_running,
        "waiting": scheduler.num_waiting,
        "leaving": scheduler.num_leaving,
        "open_files": len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0,
        **scheduler.pool.counts(),
        **(handoffs.counts() if handoffs is not None else {}),
        **engine.runner.counts(),
    }
    try:
        engine.check()
        if handoffs is not None:
            handoffs.check()
        here = counts["running"] + counts["waiting"] + counts["leaving"]
        assert counts["owners"] == here, "a request has no owner"
    except AssertionError as error:
        return Inspection(incarnation, counts, str(error) or "an invariant")
    return Inspection(incarnation, counts)
