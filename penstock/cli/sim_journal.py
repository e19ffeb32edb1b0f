"""Simulations of `penstock sim compare` on disk as they end, for `--journal`: one that is stopped loses little."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from penstock import __version__
from penstock.cli.sim import Given
from penstock.cli.sim_workers import Run
from penstock.core.errors import ConfigError

Result = dict[str, Any]


def about(given: Given) -> dict[str, Any]:
    """What is simulated, wherever its file lies: the same for two comparisons whose simulations are the same."""
    scenario = replace(given.scenario, name="", description="")
    content = sha256(repr((scenario, given.trace)).encode()).hexdigest()
    return {"scenario": Path(given.scenario.name).name, "version": __version__, "content": content}


class Journal:
    """A line of JSON for what is simulated, and then one for each simulation that ended.

    What is written is on the disk before the next simulation is asked for. A line that was not finished is dropped.

    Args:
        path: of an earlier journal, or where there is to be one.
        about: what is simulated. Journals of anything else are refused.

    Attributes:
        results: that it had already.

    Raises ConfigError when it is of something else, or no journal, or another process's, or cannot be written.
    """

    def __init__(self, path: str, about: Mapping[str, Any]) -> None:
        self._path = path
        self.results: dict[Run, Result | None] = {}
        try:
            self._file = open(path, "a+b")  # noqa: SIM115 (closed by __exit__)
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # until it is closed
            self._file.seek(0)
            content = self._file.read()
        except BlockingIOError:
            self._file.close()
            raise ConfigError(f"--journal: {path} is written by another process", "--journal") from None
        except OSError as error:
            raise self._unwritable(error) from None
        whole = content[: content.rfind(b"\n") + 1]
        try:
            self._read(whole or content, about)
        except ConfigError:
            self._file.close()
            raise
        if len(content) > len(whole):
            self._file.truncate(len(whole))
        if not whole:
            self._write({"about": dict(about)})

    def _read(self, lines: bytes, about: Mapping[str, Any]) -> None:
        try:
            head, *entries = [json.loads(line) for line in lines.splitlines()] or [{"about": dict(about)}]
            found = dict(head["about"])
            self.results = {Run(**entry["run"]): entry["result"] for entry in entries}
        except (ValueError, LookupError, TypeError):
            message = f"--journal: {self._path} was not written by `penstock sim compare --journal`"
            raise ConfigError(message, "--journal") from None
        for name, wanted in about.items():
            if found.get(name) != wanted:
                message = f"--journal: {self._path} has {name} {found.get(name)!r}, and this {wanted!r}"
                raise ConfigError(message, "--journal")

    def add(self, run: Run, result: Result | None) -> None:
        """Raises ConfigError when it cannot be written."""
        self._write({"run": asdict(run), "result": result})

    def _write(self, line: Mapping[str, Any]) -> None:
        try:
            self._file.write(json.dumps(line, allow_nan=False).encode() + b"\n")
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise self._unwritable(error) from None

    def _unwritable(self, error: OSError) -> ConfigError:
        return ConfigError(f"--journal: {self._path} cannot be written ({error.strerror or error})", "--journal")

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
