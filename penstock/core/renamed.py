"""Settings that once had another name. Under the old one a setting is refused, by an error that names the new one."""

from __future__ import annotations

from collections.abc import Collection

# old name -> new name, as written in a file; of flags and environment variables too
RENAMED = {"heartbeat": "status-reports", "keeper": "kv-pool", "pool": "role"}


def new_name(name: str, known: Collection[str]) -> str | None:
    """What a setting is called now, where one of the known settings once had this name."""
    new = RENAMED.get(name)
    return new if new in known and name not in known else None
