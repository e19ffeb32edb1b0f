"""Runs a tool once in each of several processes, which share a memory."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence


def run(module: str, argv: Sequence[str] | None, count: int, size: int, number: str) -> int:
    """The worst of their exit statuses.

    Args:
        argv: the tool's arguments, as `main` has them; each process has them too, and `--memory` with the descriptor.
        size: of the memory, in bytes, which are zeros.
        number: the argument by which a process is told which of the `count` it is.
    """
    fd = os.memfd_create(module.replace(".", "-"))
    os.ftruncate(fd, size)
    given = list(argv) if argv is not None else sys.argv[1:]
    command = [sys.executable, "-m", module, *given, "--memory", str(fd), number]
    processes = [subprocess.Popen([*command, str(each)], pass_fds=[fd]) for each in range(count)]
    return max(process.wait() for process in processes)
