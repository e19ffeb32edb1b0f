"""What an engine says of its load to the master."""

from __future__ import annotations

from penstock.core.wire.engine import Snapshot
from penstock.sched.local.intake import Intake


def snapshot(intake: Intake) -> Snapshot:
    """Without a sequence number, so that two can be compared."""
    scheduler, recent = intake.scheduler, intake.recent
    waiting, prefill, running = scheduler.tokens_due()
    return Snapshot(
        incarnation=intake.peer.incarnation,
        sequence=0,
        role=intake.role,
        role_generation=intake.role_generation,
        draining=intake.draining,
        running=scheduler.num_running,
        waiting=scheduler.num_waiting,
        migrating=scheduler.num_migrating,
        waiting_tokens=waiting,
        prefill_tokens=prefill,
        running_tokens=running,
        free_blocks=scheduler.pool.available,
        reserved_blocks=scheduler.num_reserved_blocks,
        num_blocks=scheduler.pool.num_blocks,
        token_budget=scheduler.limits.token_budget,
        ttft_ms=recent.ttft_ms,
        tpot_ms=recent.tpot_ms,
        interval_ms=recent.interval_ms,
        factors=recent.factors,
    )
