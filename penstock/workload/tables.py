"""Rows of CSV and JSONL files, plain or gzipped, with errors that name file, line and column."""

from __future__ import annotations

import csv
import gzip
import json
import math
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from penstock.core.errors import ConfigError

GZIP_MAGIC = b"\x1f\x8b"
_DIGITS = re.compile(r"\s*\d{1,18}\s*", re.ASCII)

ORIGINALS = (
    "public originals on GitHub: Azure/AzurePublicDataset (data/AzureLLMInferenceTrace_code.csv, _conv.csv), "
    "kvcache-ai/Mooncake (FAST25-release/traces/*.jsonl), alibaba/ServeGen (data/, sampled into requests); "
    "lengths: project-etalon/etalon, microsoft/vidur (data/processed_traces/*.csv)"
)


@dataclass(frozen=True, slots=True)
class Row:
    """One row: `cells` by column name, and its line, counted from 1."""

    path: Path
    line: int
    cells: Mapping[str, object]

    def whole(self, column: str, low: int = 0) -> int:
        """A whole number of at least `low`."""
        value = self.cells[column]
        if isinstance(value, str) and _DIGITS.fullmatch(value):
            value = int(value)
        if type(value) is not int or value < low:
            raise self.error(column, f"a whole number of at least {low}")
        return value

    def number(self, column: str) -> float:
        """A finite number of at least 0."""
        value = self.cells[column]
        try:
            number = float(value) if isinstance(value, int | float | str) else math.nan
        except ValueError:
            number = math.nan
        if isinstance(value, bool) or not (math.isfinite(number) and number >= 0):
            raise self.error(column, "a number of at least 0")
        return number

    def error(self, column: str, allowed: str) -> ConfigError:
        shown = repr(self.cells[column])
        shown = shown if len(shown) <= 60 else shown[:57] + "..."
        return ConfigError(f"{self.path}, line {self.line}, column {column}: {shown}, allowed is {allowed}", column)


def read_rows(path: str | Path) -> tuple[list[str], Iterator[Row]]:
    """(column names, rows) of a CSV file with a header, or of a JSONL file of objects (the first one's keys).

    Raises `ConfigError` when the file is missing or not such a file; a row's errors are raised on reaching it.
    """
    path = Path(path)
    lines = _read_text(path).splitlines()
    if not lines:
        raise ConfigError(f"{path}: empty, a header line or a JSON object per line is needed")
    if lines[0].lstrip().startswith("{"):
        first = _json_row(path, 1, lines[0])
        return list(first.cells), _json_rows(path, lines, set(first.cells))
    header = [name.strip() for name in next(csv.reader(lines[:1]))]
    return header, _csv_rows(path, lines, header)


def _csv_rows(path: Path, lines: list[str], header: list[str]) -> Iterator[Row]:
    reader = csv.reader(lines)
    next(reader)
    for cells in reader:
        if not cells:
            continue
        if len(cells) != len(header):
            raise ConfigError(f"{path}, line {reader.line_num}: {len(cells)} cells, the header has {len(header)}")
        yield Row(path, reader.line_num, dict(zip(header, cells, strict=True)))


def _json_rows(path: Path, lines: list[str], keys: set[str]) -> Iterator[Row]:
    for line, text in enumerate(lines, start=1):
        if not text.strip():
            continue
        row = _json_row(path, line, text)
        if missing := keys - set(row.cells):
            raise ConfigError(f"{path}, line {line}: no {sorted(missing)[0]}, which the first line has")
        yield row


def _json_row(path: Path, line: int, text: str) -> Row:
    try:
        cells = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{path}, line {line}: not JSON ({error})") from error
    if not isinstance(cells, dict):
        raise ConfigError(f"{path}, line {line}: a JSON {type(cells).__name__}, allowed is an object")
    return Row(path, line, cells)


def _read_text(path: Path) -> str:
    try:
        raw = path.read_bytes()
        return (gzip.decompress(raw) if raw.startswith(GZIP_MAGIC) else raw).decode("utf-8-sig")
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: no such file; {ORIGINALS}") from error
    except IsADirectoryError as error:
        names = ", ".join(sorted(entry.name for entry in path.iterdir() if entry.is_file())) or "none"
        raise ConfigError(f"{path}: a folder, name one file of it (files in it: {names}); {ORIGINALS}") from error
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"{path}: cannot be read ({error})") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not text in UTF-8 ({error.reason} at byte {error.start})") from error
