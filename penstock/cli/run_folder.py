"""Where the sockets and heartbeats of a run are."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

PREFIX, LOCK = "penstock-", "lock"
LONGEST = 60  # characters of the folder for temporary files, with which a socket's path stays under Unix's 107 bytes

log = logging.getLogger("penstock.up")


@contextlib.contextmanager
def run_folder() -> Iterator[Path]:
    """A new folder, removed at the end. Those of runs that were killed are removed at the beginning: a run holds the
    lock of its folder as long as its process lives, however that ends."""
    parent = temporary_folder()
    _remove_left(parent)
    with tempfile.TemporaryDirectory(prefix=PREFIX, dir=parent) as folder:
        new = Path(folder, f"{LOCK}.new")
        with new.open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            new.rename(Path(folder, LOCK))  # only now: nobody finds it without its lock
            yield Path(folder)


def temporary_folder() -> Path:
    """Where the folders of all runs are."""
    folder = Path(tempfile.gettempdir())
    return Path("/tmp") if len(str(folder)) > LONGEST else folder


def _remove_left(parent: Path) -> None:
    """Folders of ours whose lock nobody holds."""
    for path in parent.glob(f"{PREFIX}*/{LOCK}"):
        folder = path.parent
        with contextlib.suppress(OSError):  # it is held, or just removed by its run or by another one
            if folder.is_symlink() or folder.stat().st_uid != os.geteuid():
                continue
            with path.open() as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)
                log.info("removed %s, which a run that was killed has left", folder)
