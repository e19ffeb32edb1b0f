"""The engine's process: python -m penstock.cli.engine JSON. Started by `penstock serve`, not by people.

JSON: {"address": ZMQ endpoint, "parent": process id, "options": fields of EngineOptions, "log_level", "log_format"}.
It ends when it is told to over the wire, or when its parent has gone.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from typing import Any

from penstock.cli.options import in_flags
from penstock.cli.serve import OPTIONS
from penstock.core.errors import ConfigError
from penstock.obs.logs import setup_logging

log = logging.getLogger("penstock.engine")


def main(settings: dict[str, Any]) -> int:
    """Returns 0 when told to stop, 1 after a failure, 2 when the options cannot be served."""
    setup_logging(settings["log_level"], settings["log_format"])
    # a terminal's Ctrl-C and a supervisor's SIGTERM reach every process of the group, and the server drains first
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    from penstock.core.clock import SystemClock
    from penstock.core.messages import PROTOCOL, Ready
    from penstock.engine.build import EngineOptions, build_engine
    from penstock.engine.server import EngineServer

    clock = SystemClock()
    try:
        engine, runner = build_engine(EngineOptions(**settings["options"]), clock)
    except ConfigError as error:
        print(f"penstock: {in_flags(error, OPTIONS)}", file=sys.stderr)
        return 2
    limits = engine.scheduler.limits
    ready = Ready(
        protocol=PROTOCOL,
        max_model_len=limits.max_model_len,
        vocab_size=runner.model.config.vocab_size,
        num_blocks=engine.scheduler.pool.num_blocks,
        token_budget=limits.token_budget,
        device=str(runner.device),
        dtype=str(runner.model.dtype).removeprefix("torch."),
    )
    server = EngineServer(settings["address"], clock)
    try:
        server.run(engine, ready, orphaned=lambda: os.getppid() != settings["parent"])
    except Exception as error:
        log.exception("the engine failed")
        server.fail(f"{type(error).__name__}: {error}")
        return 1
    finally:
        server.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
