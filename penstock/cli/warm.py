"""A process of the warm pool: python -m penstock.cli.warm. Started by `penstock up`, not by people.

Its standard input is a socket to the launcher (`service.warm`). It imports what engines need, writes a byte, and reads
a line: the settings of `cli.engine`, and with them the descriptor of a public socket if there is one. It is that engine
from then on, and its command line looks like it. It ends where no line comes, as when its launcher has ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
from typing import Any

from setproctitle import setproctitle

from penstock.cli.engine import keep_few_kernels, main
from penstock.service.warm import ENGINE, WARM

STDIN = 0
PART = 1 << 16  # bytes


def prepare() -> None:
    """Import what an engine imports before it serves, and load its kernels."""
    keep_few_kernels()
    import penstock.core.clock
    import penstock.core.heartbeat
    import penstock.engine.build
    import penstock.engine.calibration
    import penstock.engine.modelled
    import penstock.engine.server
    import penstock.engine.weights
    import penstock.transfer.orphans
    import penstock.transfer.pool
    import penstock.transfer.transports  # noqa: F401
    from penstock.nn import native

    native.missing()


def receive(link: socket.socket) -> dict[str, Any] | None:
    """Settings of an engine; None where there are none to come."""
    try:
        told, descriptors, _, _ = socket.recv_fds(link, PART, 1)
        while not told.endswith(b"\n"):
            if not (part := link.recv(PART)):
                return None
            told += part
    except OSError:  # the launcher has ended
        return None
    settings: dict[str, Any] = json.loads(told)
    if descriptors:
        settings["public"]["fd"] = descriptors[0]  # its number here
    return settings


def run() -> int:
    """Returns what `engine.main` does, and 0 where this was never one."""
    setproctitle(" ".join(WARM).rstrip())  # moves the environment: libraries that are imported later may point into it
    prepare()
    with socket.socket(fileno=os.dup(STDIN)) as link:
        with contextlib.suppress(OSError):  # it was taken before, or its launcher has ended
            link.send(b"+")
        settings = receive(link)
    if settings is None:
        return 0
    setproctitle(" ".join((*ENGINE, json.dumps(settings))))
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), STDIN)
    return main(settings)


if __name__ == "__main__":
    sys.exit(run())
