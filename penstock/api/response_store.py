"""Answers of /v1/responses that later requests go on from: in SQLite, which the frontends of a host share."""

from __future__ import annotations

import contextlib
import sqlite3
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from penstock.core.errors import Unavailable

MAX_BYTES = 256 << 20
MAX_AGE = 30 * 24 * 3600.0  # seconds, as OpenAI keeps them

SCHEMA = """
CREATE TABLE IF NOT EXISTS response (
    tenant TEXT NOT NULL, id TEXT NOT NULL, at REAL NOT NULL, size INTEGER NOT NULL, response BLOB NOT NULL,
    messages BLOB NOT NULL, PRIMARY KEY (tenant, id)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS by_age ON response (at, size);
CREATE TABLE IF NOT EXISTS total (bytes INTEGER NOT NULL);
INSERT INTO total SELECT 0 WHERE NOT EXISTS (SELECT * FROM total);
CREATE TRIGGER IF NOT EXISTS more AFTER INSERT ON response BEGIN UPDATE total SET bytes = bytes + new.size; END;
CREATE TRIGGER IF NOT EXISTS less AFTER DELETE ON response BEGIN UPDATE total SET bytes = bytes - old.size; END;
"""


class Kept(NamedTuple):
    """
    Attributes:
        response: as it was answered, JSON.
        messages: of the conversation up to it, its own included.
        at: when it was put or updated, in seconds since 1970.
    """

    response: bytes
    messages: list[dict[str, Any]]
    at: float


class ResponseStore:
    """The oldest go when there are more than so many bytes. What changes it raises Unavailable where it cannot be
    written, as to a full disk.

    Args:
        file: None keeps them in this process's memory.
    """

    def __init__(self, file: Path | None = None, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._base = sqlite3.connect(file or ":memory:", timeout=5, isolation_level=None, check_same_thread=False)
        for pragma in ("journal_mode=WAL", "synchronous=OFF"):  # what is lost in a crash of the machine may be
            self._base.execute(f"PRAGMA {pragma}")
        self._base.executescript(SCHEMA)

    def put(self, tenant: str, name: str, response: bytes, messages: list[dict[str, Any]]) -> None:
        """Nothing that is larger than all of it is kept. Of one name the newest is."""
        packed = msgspec.msgpack.encode(messages)
        size = len(response) + len(packed)
        if size > self._max_bytes:
            return
        with self._change() as base:
            row = (tenant, name, time.time(), size, response, packed)
            base.execute("DELETE FROM response WHERE tenant = ? AND id = ?", (tenant, name))
            base.execute("INSERT INTO response VALUES (?, ?, ?, ?, ?, ?)", row)
            base.execute("DELETE FROM response WHERE at < ?", (time.time() - MAX_AGE,))
            while self.bytes > self._max_bytes:
                tenant_, name_ = base.execute("SELECT tenant, id FROM response ORDER BY at LIMIT 1").fetchone()
                base.execute("DELETE FROM response WHERE tenant = ? AND id = ?", (tenant_, name_))

    def get(self, tenant: str, name: str) -> Kept | None:
        with self._lock:
            query = "SELECT response, messages, at FROM response WHERE tenant = ? AND id = ? AND at >= ?"
            row = self._base.execute(query, (tenant, name, time.time() - MAX_AGE)).fetchone()
        return None if row is None else Kept(row[0], msgspec.msgpack.decode(row[1]), row[2])

    def update(self, tenant: str, name: str, response: bytes) -> None:
        """Of one that is kept: it is another one now. Its size is counted as it was."""
        with self._change() as base:
            values = (response, time.time(), tenant, name)
            base.execute("UPDATE response SET response = ?, at = ? WHERE tenant = ? AND id = ?", values)

    def delete(self, tenant: str, name: str) -> bool:
        """Whether there was one."""
        with self._change() as base:
            return base.execute("DELETE FROM response WHERE tenant = ? AND id = ?", (tenant, name)).rowcount > 0

    @property
    def bytes(self) -> int:
        return int(self._base.execute("SELECT bytes FROM total").fetchone()[0])

    def close(self) -> None:
        self._base.close()

    @contextlib.contextmanager
    def _change(self) -> Any:
        with self._lock:
            try:
                self._base.execute("BEGIN IMMEDIATE")
                yield self._base
                self._base.execute("COMMIT")
            except sqlite3.Error as error:
                raise Unavailable(f"responses cannot be kept now ({error})") from error
            finally:
                if self._base.in_transaction:  # where SQLite has not rolled it back itself
                    self._base.execute("ROLLBACK")
