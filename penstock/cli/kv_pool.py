"""The KV pool server's process: python -m penstock.cli.kv_pool JSON. Started by `penstock serve` and `up`, not by
people.

JSON: {"name": of it, "path": of its Unix socket, "parent": process id, "orphan_seconds", "heartbeat": its file,
"log_level", "log_format"}.
Told to stop it ends as soon as no engine is attached; it ends at once when its parent has ended.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from penstock.core.errors import ConfigError
from penstock.core.heartbeat import Heartbeat
from penstock.obs.logs import setup_logging
from penstock.service.supervisor import STOP
from penstock.transfer.kv_pool_server import KVPoolServer


def main(settings: dict[str, Any]) -> int:
    """Returns 0 when told to stop or after the parent's end, 2 when the path cannot be bound."""
    setup_logging(settings["log_level"], settings["log_format"])
    asked_to_end = False

    def on_stop(number: int, frame: object) -> None:
        nonlocal asked_to_end
        asked_to_end = True

    signal.signal(STOP, on_stop)  # engines that drain need their blocks until they are done
    try:
        server = KVPoolServer(settings["path"], settings["orphan_seconds"])
    except ConfigError as error:
        print(f"penstock: kv-pool: {error}", file=sys.stderr)
        return 2
    try:
        beat = Heartbeat(Path(settings["heartbeat"])).beat
        server.run(lambda: os.getppid() != settings["parent"] or (asked_to_end and server.clients == 0), beat=beat)
    finally:
        server.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
