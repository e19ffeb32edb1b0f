"""Files and batches on disk: rows in SQLite, contents in files beside it, for any number of processes of one host.

A batch that is not over is run by one process, which holds it under a lease. What that process says of the batch counts
only while it still holds it, by the transaction that says it: so each line has one answer, whoever is killed or stands
still meanwhile, and whenever it goes on. Answers stay in the database until a batch is over; then they become files.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import json
import logging
import os
import secrets
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from operator import add
from pathlib import Path
from typing import IO, Any, ParamSpec, TypeVar

import msgspec

from penstock.core.errors import ConfigError, Conflict, Unavailable
from penstock.service.batch_lines import LineError, not_run, read_lines

log = logging.getLogger("penstock.batches")
FIELD = "batch-dir"
LEASE = 8.0  # seconds; who runs a batch renews it every few
BUSY = 20.0  # seconds to wait for another process's transaction
STRAY = 86400.0  # seconds after which a file that no row names goes: its upload, or its batch's process, has died
OPEN = "('validating', 'in_progress', 'finalizing', 'cancelling')"
SCHEMA = """
PRAGMA auto_vacuum = INCREMENTAL;
PRAGMA journal_mode = WAL;
CREATE TABLE IF NOT EXISTS files (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, owner TEXT NOT NULL, purpose TEXT NOT NULL,
    filename TEXT NOT NULL, bytes INTEGER NOT NULL, created_at INTEGER NOT NULL, expires_at INTEGER
);
CREATE TABLE IF NOT EXISTS batches (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, owner TEXT NOT NULL, endpoint TEXT NOT NULL,
    input_file_id TEXT NOT NULL, completion_window TEXT NOT NULL, status TEXT NOT NULL, model TEXT, metadata TEXT,
    errors TEXT, output_file_id TEXT, error_file_id TEXT, keep_seconds INTEGER, created_at INTEGER NOT NULL,
    expires_at INTEGER NOT NULL, in_progress_at INTEGER, finalizing_at INTEGER, completed_at INTEGER,
    failed_at INTEGER, expired_at INTEGER, cancelling_at INTEGER, cancelled_at INTEGER,
    total INTEGER NOT NULL DEFAULT 0, completed INTEGER NOT NULL DEFAULT 0, failed INTEGER NOT NULL DEFAULT 0,
    holder TEXT, held_until REAL NOT NULL DEFAULT 0, input_tokens INTEGER NOT NULL DEFAULT 0,
    cached_tokens INTEGER NOT NULL DEFAULT 0, output_tokens INTEGER NOT NULL DEFAULT 0,
    reasoning_tokens INTEGER NOT NULL DEFAULT 0
);
CREATE TABLE IF NOT EXISTS answers (
    batch TEXT NOT NULL, line INTEGER NOT NULL, failed INTEGER NOT NULL, record BLOB NOT NULL,
    UNIQUE (batch, line)
);
"""
TOKENS = "input_tokens", "cached_tokens", "output_tokens", "reasoning_tokens"  # which older folders do not count
LEFT = {  # what ends a batch -> code and message of the lines that did not run
    "expired": ("batch_expired", "This request could not be executed before the completion window expired."),
    "cancelled": ("batch_cancelled", "This request was not executed before the batch was cancelled."),
}

Of = ParamSpec("Of")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class StoredFile:
    """Times are seconds since 1970; so below. `owner` is whose key it was uploaded with; "" is everybody."""

    seq: int
    id: str
    owner: str
    purpose: str
    filename: str
    bytes: int
    created_at: int
    expires_at: int | None


@dataclass(frozen=True, slots=True)
class Batch:
    """
    Attributes:
        metadata, errors: JSON.
        keep_seconds: how long its output files are kept; None is until they are deleted.
        holder: the process that runs it, until `held_until` at least.
    """

    seq: int
    id: str
    owner: str
    endpoint: str
    input_file_id: str
    completion_window: str
    status: str
    model: str | None
    metadata: str | None
    errors: str | None
    output_file_id: str | None
    error_file_id: str | None
    keep_seconds: int | None
    created_at: int
    expires_at: int
    in_progress_at: int | None
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    total: int
    completed: int
    failed: int
    holder: str | None
    held_until: float
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    reasoning_tokens: int


@dataclass(frozen=True, slots=True)
class Answered:
    """The answer to a line: `record` is its line of the output file, or of the error file if it failed; `tokens` are
    those that it took, as `TOKENS` names them."""

    line: int
    failed: bool
    record: bytes
    tokens: tuple[int, int, int, int] = (0, 0, 0, 0)


class Upload:
    """A file on its way in."""

    def __init__(self, path: Path) -> None:
        self.path, self.kept = path, False
        self._file: IO[bytes] = path.open("xb")

    def write(self, data: bytes) -> None:
        self._file.write(data)

    def done(self) -> None:
        """What was written is on the disk."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def discard(self) -> None:
        """Does nothing to a file that was kept."""
        with contextlib.suppress(OSError):  # what is left of it does not fit either
            self._file.close()
        if not self.kept:
            self.path.unlink(missing_ok=True)


class BatchStore:
    """Methods block, and are for one thread at a time: an event loop calls them by `aside`, but for `path`, which is
    quick, and `finish`, which takes long and may run beside the others.

    Args:
        folder: is made where it is missing.
        wall: seconds since 1970; processes that share the folder have to agree about it.
    """

    def __init__(self, folder: Path, wall: Callable[[], float] = time.time) -> None:
        self._folder, self._wall = folder, wall
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="batches")
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._contents.mkdir(mode=0o700, exist_ok=True)
            self._db = self._connect()
            self._db.executescript(SCHEMA)
            self._add_columns()
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(f"{FIELD}: {folder} cannot be used ({error})", FIELD) from None

    @property
    def now(self) -> float:
        return self._wall()

    @property
    def _contents(self) -> Path:
        return self._folder / "files"

    def _connect(self) -> sqlite3.Connection:
        db = sqlite3.connect(self._folder / "batches.sqlite", BUSY, isolation_level=None, check_same_thread=False)
        db.row_factory = sqlite3.Row
        db.execute("PRAGMA synchronous = NORMAL")  # after a loss of power the last answers may be computed again
        return db

    def _add_columns(self) -> None:
        with self._changing(self._db) as db:
            there = {row["name"] for row in db.execute("PRAGMA table_info(batches)")}
            for name in TOKENS:
                if name not in there:
                    db.execute(f"ALTER TABLE batches ADD COLUMN {name} INTEGER NOT NULL DEFAULT 0")

    async def aside(self, function: Callable[Of, Result], *args: Of.args, **options: Of.kwargs) -> Result:
        """Call a method in the thread for that."""
        return await asyncio.get_running_loop().run_in_executor(self._worker, lambda: function(*args, **options))

    async def asked(self, function: Callable[Of, Result], *args: Of.args, **options: Of.kwargs) -> Result:
        """The same for a client. Raises Unavailable where the disk fails."""
        with self.for_client():
            return await self.aside(function, *args, **options)

    @contextlib.contextmanager
    def for_client(self) -> Iterator[None]:
        """Raises Unavailable where the disk fails, as when it is full."""
        try:
            yield
        except (OSError, sqlite3.Error) as error:
            why = error.strerror if isinstance(error, OSError) else error
            log.error("%s cannot be used now: %s", self._folder, error)
            raise Unavailable(f"files and batches cannot be kept now ({why})") from error

    def close(self) -> None:
        self._worker.shutdown(wait=True)
        self._db.close()

    # --- files

    def path(self, file_id: str) -> Path:
        return self._contents / file_id

    def begin_upload(self) -> Upload:
        return Upload(self._contents / f"{secrets.token_hex(16)}.part")

    def keep_upload(
        self, upload: Upload, *, owner: str, purpose: str, filename: str, keep_seconds: int | None
    ) -> StoredFile:
        upload.done()
        file_id = f"file-{secrets.token_hex(16)}"
        upload.path = upload.path.replace(self.path(file_id))
        with self._changing(self._db):
            file = self._add_file(self._db, file_id, owner, purpose, filename, keep_seconds)
        upload.kept = True
        return file

    def _add_file(
        self, db: sqlite3.Connection, file_id: str, owner: str, purpose: str, filename: str, keep_seconds: int | None
    ) -> StoredFile:
        now = int(self._wall())
        row = db.execute(
            "INSERT INTO files (id, owner, purpose, filename, bytes, created_at, expires_at) "
            "VALUES (?, ?, ?, ?, ?, ?, ?) RETURNING *",
            (
                file_id,
                owner,
                purpose,
                filename,
                self.path(file_id).stat().st_size,
                now,
                None if keep_seconds is None else now + keep_seconds,
            ),
        ).fetchone()
        return StoredFile(**row)

    def file(self, owner: str, file_id: str) -> StoredFile | None:
        rows = self._db.execute("SELECT * FROM files WHERE id = ? AND owner = ?", (file_id, owner)).fetchall()
        return StoredFile(**rows[0]) if rows and not self._past(rows[0]["expires_at"]) else None

    def files(
        self, owner: str, purpose: str | None, after: str | None, limit: int, *, newest_first: bool
    ) -> tuple[list[StoredFile], bool]:
        """A page of them, and whether there are more. Those `after` one that there is not are none."""
        where = "owner = ? AND (? IS NULL OR purpose = ?) AND (expires_at IS NULL OR expires_at > ?)"
        values = [owner, purpose, purpose, self._wall()]
        found, more = self._page("files", where, values, after, limit, newest_first=newest_first)
        return [StoredFile(**row) for row in found], more

    def delete_file(self, owner: str, file_id: str) -> bool:
        """Whether there was one. Raises Conflict where a batch needs it."""
        with self._changing(self._db) as db:
            using = db.execute(f"SELECT id FROM batches WHERE input_file_id = ? AND status IN {OPEN}", (file_id,))
            if row := using.fetchone():
                raise Conflict(f"file_id: {file_id!r} is the input of {row['id']}, which is not over", "file_id")
            deleted = db.execute("DELETE FROM files WHERE id = ? AND owner = ? RETURNING seq", (file_id, owner))
            found = bool(deleted.fetchall())
        if found:
            self.path(file_id).unlink(missing_ok=True)
        return found

    # --- batches, as clients see them

    def create(
        self,
        owner: str,
        endpoint: str,
        input_file_id: str,
        *,
        window: str,
        seconds: int,
        metadata: dict[str, str] | None = None,
        keep_seconds: int | None = None,
    ) -> Batch:
        """
        Args:
            window, seconds: within which it ends, as it was asked for and as it is.
        """
        now = int(self._wall())
        said = None if metadata is None else json.dumps(metadata)
        row = self._db.execute(
            "INSERT INTO batches (id, owner, endpoint, input_file_id, completion_window, status, metadata, "
            "keep_seconds, created_at, expires_at) VALUES (?, ?, ?, ?, ?, 'validating', ?, ?, ?, ?) RETURNING *",
            (
                f"batch_{secrets.token_hex(16)}",
                owner,
                endpoint,
                input_file_id,
                window,
                said,
                keep_seconds,
                now,
                now + seconds,
            ),
        ).fetchall()
        return Batch(**row[0])

    def batch(self, owner: str, batch_id: str) -> Batch | None:
        rows = self._db.execute("SELECT * FROM batches WHERE id = ? AND owner = ?", (batch_id, owner)).fetchall()
        return Batch(**rows[0]) if rows else None

    def batches(self, owner: str, after: str | None, limit: int) -> tuple[list[Batch], bool]:
        """A page of them, the newest first, and whether there are more."""
        found, more = self._page("batches", "owner = ?", [owner], after, limit, newest_first=True)
        return [Batch(**row) for row in found], more

    def cancel(self, owner: str, batch_id: str) -> Batch | None:
        """None where there is no such batch. Raises Conflict where it is over already, or about to be."""
        with self._changing(self._db) as db:
            db.execute(
                "UPDATE batches SET status = 'cancelling', cancelling_at = ? "
                "WHERE id = ? AND owner = ? AND status IN ('validating', 'in_progress')",
                (int(self._wall()), batch_id, owner),
            )
        batch = self.batch(owner, batch_id)
        if batch is not None and batch.status not in ("cancelling", "cancelled"):
            raise Conflict(f"batch_id: {batch_id!r} is {batch.status}, and cannot be cancelled any more", "batch_id")
        return batch

    def _page(
        self, table: str, where: str, values: Sequence[Any], after: str | None, limit: int, *, newest_first: bool
    ) -> tuple[list[sqlite3.Row], bool]:
        sign, order = ("<", "DESC") if newest_first else (">", "ASC")
        beyond = f"AND seq {sign} (SELECT seq FROM {table} WHERE id = ?) " if after is not None else ""
        found = self._db.execute(
            f"SELECT * FROM {table} WHERE {where} {beyond}ORDER BY seq {order} LIMIT ?",
            (*values, *([after] if after is not None else []), limit + 1),
        ).fetchall()
        return found[:limit], len(found) > limit

    # --- batches, as those see them who run them

    def claim(self, holder: str, running: Sequence[str]) -> Batch | None:
        """The oldest batch that nobody runs, which `holder` does from now on.

        Args:
            running: by that holder already.
        """
        now = self._wall()
        with self._changing(self._db) as db:
            row = db.execute(
                "UPDATE batches SET holder = ?, held_until = ? WHERE seq = (SELECT seq FROM batches "
                f"WHERE status IN {OPEN} AND (holder IS NULL OR held_until < ?) "
                f"AND id NOT IN ({', '.join('?' * len(running))}) ORDER BY seq LIMIT 1) RETURNING *",
                (holder, now + LEASE, now, *running),
            ).fetchall()
        return Batch(**row[0]) if row else None

    def release(self, batch_id: str, holder: str) -> None:
        """Let others run it."""
        self._db.execute("UPDATE batches SET holder = NULL WHERE id = ? AND holder = ?", (batch_id, holder))

    def refuse(self, batch_id: str, holder: str, errors: Sequence[LineError]) -> None:
        """Its input is none."""
        said = msgspec.json.encode(errors).decode()
        self._db.execute(
            "UPDATE batches SET status = 'failed', failed_at = ?, errors = ?, holder = NULL "
            "WHERE id = ? AND holder = ? AND status IN ('validating', 'cancelling')",
            (int(self._wall()), said, batch_id, holder),
        )

    def begin(self, batch_id: str, holder: str, total: int, model: str | None) -> None:
        """Its input is good."""
        self._db.execute(
            "UPDATE batches SET total = ?, model = ?, in_progress_at = ?, "
            "status = CASE status WHEN 'validating' THEN 'in_progress' ELSE status END WHERE id = ? AND holder = ?",
            (total, model, int(self._wall()), batch_id, holder),
        )

    def answered(self, batch_id: str) -> set[int]:
        """Numbers of the lines that are answered."""
        return {row["line"] for row in self._db.execute("SELECT line FROM answers WHERE batch = ?", (batch_id,))}

    def total(self, batch_id: str) -> int:
        """How many lines it has."""
        return int(self._db.execute("SELECT total FROM batches WHERE id = ?", (batch_id,)).fetchone()["total"])

    def record(self, batch_id: str, holder: str, answers: Sequence[Answered] = ()) -> str | None:
        """Keep answers, and hold the batch for longer. Returns its status; None where another holds it by now, and then
        nothing is kept."""
        with self._changing(self._db) as db:
            batch = self._hold(db, batch_id, holder)
            if batch is None:
                return None
            counts = [0, 0, *(0 for _ in TOKENS)]
            for answer in answers:
                added = db.execute(
                    "INSERT OR IGNORE INTO answers VALUES (?, ?, ?, ?)",
                    (batch_id, answer.line, answer.failed, answer.record),
                )
                if added.rowcount:
                    counts[answer.failed] += 1
                    counts[2:] = map(add, counts[2:], answer.tokens)
            if answers:
                sums = ", ".join(f"{name} = {name} + ?" for name in ("completed", "failed", *TOKENS))
                db.execute(f"UPDATE batches SET {sums} WHERE id = ?", (*counts, batch_id))
            return batch.status

    def finalize(self, batch_id: str, holder: str) -> None:
        """No more lines run."""
        self._db.execute(
            "UPDATE batches SET status = 'finalizing', finalizing_at = ? "
            "WHERE id = ? AND holder = ? AND status = 'in_progress'",
            (int(self._wall()), batch_id, holder),
        )

    def finish(self, batch: Batch, holder: str, longest: int) -> None:
        """Write its files, and end it: completed, expired where some lines have not run, or cancelled.

        Args:
            batch: as it was claimed.
            longest: see `read_lines`.
        """
        written: list[str] = []  # until they have their rows
        try:
            with contextlib.closing(self._connect()) as db:
                db.execute("BEGIN")  # all that is read is of one moment
                now = Batch(**db.execute("SELECT * FROM batches WHERE id = ?", (batch.id,)).fetchone())
                end = "cancelled" if now.status == "cancelling" else "completed"
                if end == "completed" and now.completed + now.failed < now.total:
                    end = "expired"
                left = self._left(db, batch, longest, *LEFT[end]) if end in LEFT else iter(())
                outputs = self._write_results(written, _records(db, batch, 0))
                errors = self._write_results(written, heapq.merge(_records(db, batch, 1), left))
                db.execute("COMMIT")
                with self._changing(db):
                    held = self._hold(db, batch.id, holder)
                    if held is None or (held.status, held.completed, held.failed) != (
                        now.status,
                        now.completed,
                        now.failed,
                    ):
                        return  # it went on elsewhere meanwhile
                    for file_id, kind in ((outputs, "output"), (errors, "error")):
                        if file_id is not None:
                            name = f"{batch.id}_{kind}.jsonl"
                            self._add_file(db, file_id, batch.owner, "batch_output", name, batch.keep_seconds)
                    db.execute("DELETE FROM answers WHERE batch = ?", (batch.id,))
                    db.execute(
                        f"UPDATE batches SET status = ?, {end}_at = ?, failed = total - completed, output_file_id = ?, "
                        "error_file_id = ?, holder = NULL WHERE id = ?",
                        (end, int(self._wall()), outputs, errors, batch.id),
                    )
                written.clear()
        finally:
            for file_id in written:
                self.path(file_id).unlink(missing_ok=True)

    def _left(
        self, db: sqlite3.Connection, batch: Batch, longest: int, code: str, message: str
    ) -> Iterator[tuple[int, bytes]]:
        """Of every line without an answer its number and its line of the error file, in order."""
        done = {row["line"] for row in db.execute("SELECT line FROM answers WHERE batch = ?", (batch.id,))}
        for line in read_lines(self.path(batch.input_file_id), batch.endpoint, longest):
            if not isinstance(line, LineError) and line.number not in done:
                yield line.number, not_run(batch.id, line.number, line.custom_id, code, message)

    def _write_results(self, written: list[str], lines: Iterator[tuple[int, bytes]]) -> str | None:
        """A new file's id, which is among the `written`; None where there are no lines."""
        first = next(lines, None)
        if first is None:
            return None
        file_id = f"file-{secrets.token_hex(16)}"
        written.append(file_id)
        with self.path(file_id).open("xb") as file:
            for _, record in itertools.chain([first], lines):
                file.write(record + b"\n")
            file.flush()
            os.fsync(file.fileno())
        return file_id

    def sweep(self) -> None:
        """Delete what has expired, and what processes that died have left."""
        now = self._wall()
        expired = self._db.execute(
            "DELETE FROM files WHERE expires_at <= ? AND id NOT IN "
            f"(SELECT input_file_id FROM batches WHERE status IN {OPEN}) RETURNING id",
            (now,),
        ).fetchall()
        for row in expired:
            self.path(row["id"]).unlink(missing_ok=True)
        known = {row["id"] for row in self._db.execute("SELECT id FROM files")}
        for path in self._contents.iterdir():
            with contextlib.suppress(FileNotFoundError):
                if path.name not in known and path.stat().st_mtime < now - STRAY:
                    path.unlink()
        self._db.execute("PRAGMA incremental_vacuum").fetchall()

    def check(self) -> None:
        """Counts are those of the answers, and files have their contents."""
        counted = self._db.execute(
            "SELECT b.id FROM batches b LEFT JOIN answers a ON a.batch = b.id "
            f"WHERE b.status IN {OPEN} GROUP BY b.id "
            "HAVING b.completed + b.failed != count(a.line) OR b.failed != coalesce(sum(a.failed), 0)"
        ).fetchall()
        assert not counted, [row["id"] for row in counted]
        for row in self._db.execute("SELECT id, bytes FROM files"):
            assert self.path(row["id"]).stat().st_size == row["bytes"], row["id"]

    def _past(self, at: int | None) -> bool:
        return at is not None and at <= self._wall()

    def _hold(self, db: sqlite3.Connection, batch_id: str, holder: str) -> Batch | None:
        """Renew the lease; None where it is not the holder's, or over."""
        row = db.execute(
            f"UPDATE batches SET held_until = ? WHERE id = ? AND holder = ? AND status IN {OPEN} RETURNING *",
            (self._wall() + LEASE, batch_id, holder),
        ).fetchall()
        return Batch(**row[0]) if row else None

    @contextlib.contextmanager
    def _changing(self, db: sqlite3.Connection) -> Iterator[sqlite3.Connection]:
        """A transaction."""
        db.execute("BEGIN IMMEDIATE")
        try:
            yield db
            db.execute("COMMIT")
        except BaseException:
            if db.in_transaction:
                db.execute("ROLLBACK")
            raise


def _records(db: sqlite3.Connection, batch: Batch, failed: int) -> Iterator[tuple[int, bytes]]:
    """(number of the line, its record), in order."""
    rows = db.execute(
        "SELECT line, record FROM answers WHERE batch = ? AND failed = ? ORDER BY line", (batch.id, failed)
    )
    for row in rows:
        yield row["line"], row["record"]
