"""How a launcher starts a process of a deployment, and how it is named."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence

TO_ALL = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def has_terminal() -> bool:
    """Whether there is one that could be closed, which SIGHUP tells of; else that signal has files read again."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True


def host_of(launcher: int) -> str:
    """The name of a launcher's host, by the launcher's process id: there may be several on a machine."""
    return f"{socket.gethostname()}/{launcher}"


def begin(
    command: Sequence[str],
    environment: Mapping[str, str] | None,
    stdin: int = subprocess.DEVNULL,
    stderr: int | None = None,
    descriptors: Sequence[int] = (),
) -> subprocess.Popen[bytes]:
    """One in a process group of its own.

    Args:
        environment: None for this process's own.
        stdin, stderr: as `subprocess` has them.
        descriptors: that it inherits.
    """
    # Signals that a terminal or a service manager sends to all are the launcher's: frontends drain before others
    # stop. Who is started while they are blocked has them blocked for good, from its first instruction on.
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, TO_ALL)
    try:
        return subprocess.Popen(
            command, stdin=stdin, stderr=stderr, pass_fds=descriptors, process_group=0, env=environment
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
