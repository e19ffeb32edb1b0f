"""Recorded traces: Azure 2023, Mooncake and ServeGen files as lists of requests."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from fractions import Fraction
from pathlib import Path

from msgspec.structs import replace

from penstock.core.errors import ConfigError
from penstock.workload.requests import WorkImage, WorkRequest
from penstock.workload.tables import Row, read_rows

MOONCAKE_BLOCK = 512  # tokens that one of its hash ids stands for
IMAGE_BITS = 10  # of an image's number, below those of its request

_TIMESTAMP = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:\.(\d+))?(Z|[+-]\d\d:\d\d)?", re.ASCII)


def read_trace(path: str | Path) -> list[WorkRequest]:
    """The requests of a trace, plain or .gz, in order of arrival, the first at 0 s, numbered by place in the file.

    The format is recognised by the header: Azure (TIMESTAMP, ContextTokens, GeneratedTokens), Mooncake JSONL
    (timestamp in ms, input_length, output_length, hash_ids), ServeGen sampled (arrival_s, input_tokens or
    text_tokens and image_tokens, output_tokens, and image_count, by default one where there are image_tokens, over
    which these are spread; images count as the prompt tokens they take, and text as one token at least).

    Raises `ConfigError` naming file, line, column and value.
    """
    header, rows = read_rows(path)
    for columns, read in FORMATS.items():
        if columns <= set(header):
            return _in_order(path, rows, read)
    allowed = "; ".join(",".join(sorted(columns)) for columns in FORMATS)
    raise ConfigError(f"{path}: columns {','.join(header)} are no known trace, allowed are: {allowed}")


def _in_order(
    path: str | Path, rows: Iterable[Row], read: Callable[[Row, int], tuple[Fraction, WorkRequest]]
) -> list[WorkRequest]:
    timed = sorted((read(row, number) for number, row in enumerate(rows)), key=lambda pair: pair[0])
    if not timed:
        raise ConfigError(f"{path}: no rows after the header")
    start = timed[0][0]
    return [replace(request, at=float(at - start)) for at, request in timed]


def _azure(row: Row, number: int) -> tuple[Fraction, WorkRequest]:
    return _timestamp(row, "TIMESTAMP"), WorkRequest(
        number=number,
        at=0.0,
        prompt_tokens=row.whole("ContextTokens", 1),
        output_tokens=row.whole("GeneratedTokens", 1),
    )


def _mooncake(row: Row, number: int) -> tuple[Fraction, WorkRequest]:
    prompt = row.whole("input_length", 1)
    blocks = row.cells["hash_ids"]
    needed = -(-prompt // MOONCAKE_BLOCK)
    good = isinstance(blocks, list) and len(blocks) == needed and all(type(b) is int and b >= 0 for b in blocks)
    if not isinstance(blocks, list) or not good:
        raise row.error(
            "hash_ids", f"a list of {needed} ids of at least 0, one per {MOONCAKE_BLOCK} tokens of {prompt}"
        )
    return Fraction(row.number("timestamp")) / 1000, WorkRequest(
        number=number,
        at=0.0,
        prompt_tokens=prompt,
        output_tokens=row.whole("output_length", 1),
        prefix=tuple(blocks),
        block_tokens=MOONCAKE_BLOCK,
    )


def _servegen(row: Row, number: int) -> tuple[Fraction, WorkRequest]:
    return Fraction(row.number("arrival_s")), WorkRequest(
        number=number, at=0.0, prompt_tokens=row.whole("input_tokens", 1), output_tokens=row.whole("output_tokens", 1)
    )


def _servegen_images(row: Row, number: int) -> tuple[Fraction, WorkRequest]:
    text, tokens = row.whole("text_tokens"), row.whole("image_tokens")
    if text + tokens == 0:
        raise row.error("text_tokens", "at least 1 together with image_tokens")
    count = row.whole("image_count") if "image_count" in row.cells else int(tokens > 0)
    if count > tokens or (tokens and not count):
        raise row.error("image_count", f"from 1 to image_tokens, {tokens}, and 0 without")
    images = tuple(WorkImage(number << IMAGE_BITS | i, tokens // count + (i < tokens % count)) for i in range(count))
    return Fraction(row.number("arrival_s")), WorkRequest(
        number=number,
        at=0.0,
        prompt_tokens=max(1, text) + tokens,
        output_tokens=row.whole("output_tokens", 1),
        images=images,
    )


FORMATS: Mapping[frozenset[str], Callable[[Row, int], tuple[Fraction, WorkRequest]]] = {
    frozenset({"TIMESTAMP", "ContextTokens", "GeneratedTokens"}): _azure,
    frozenset({"timestamp", "input_length", "output_length", "hash_ids"}): _mooncake,
    frozenset({"arrival_s", "input_tokens", "output_tokens"}): _servegen,
    frozenset({"arrival_s", "text_tokens", "image_tokens", "output_tokens"}): _servegen_images,
}


def _timestamp(row: Row, column: str) -> Fraction:
    """Seconds since some origin. Exact: the 100 ns digits of a date would not survive in a float."""
    match = _TIMESTAMP.fullmatch(str(row.cells[column]).strip())
    try:
        if match is None:
            raise ValueError
        whole = datetime.fromisoformat(match[1] + (match[3] or "+00:00"))
    except ValueError:
        raise row.error(column, "a time such as 2023-11-16 18:17:03.9799600") from None
    digits = match[2] or "0"
    return int(whole.timestamp()) + Fraction(int(digits), 10 ** len(digits))
