"""The result of a benchmark as one JSON document, for machines and for later comparison."""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec

from penstock.bench.metrics import ClientRecord, Summary
from penstock.bench.serve import Bench, Measurement
from penstock.bench.slo import SearchResult
from penstock.core.errors import ConfigError

SCHEMA_VERSION = 1
PACKAGES = ("penstock", "aiohttp", "uvloop", "numpy", "torch")
SECRET_FLAGS = ("--api-key",)


def build(kind: str, config: Mapping[str, Any], result: Mapping[str, Any], command: Sequence[str]) -> dict[str, Any]:
    """The JSON object of one run, with what is needed to judge it.

    Args:
        kind: `serve`, `slo`, `latency`, `throughput` or `kernels`.
        config: every setting of the run, named as its flag. Secrets are left out, as in the command line.
        result: numbers; keys are stable within a schema version, units are in the keys.
    """
    return {
        "schema_version": SCHEMA_VERSION,
        "kind": kind,
        "command": redact(command),
        "versions": versions(),
        "client_host": host_facts(),
        "config": {
            name: "inf" if value == math.inf else value  # JSON has no infinity
            for name, value in config.items()
            if flag_of(name) not in SECRET_FLAGS
        },
        **result,
    }


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def write(path: str | Path, content: Mapping[str, Any]) -> None:
    """Raises `ConfigError` when the file cannot be written."""
    try:
        Path(path).write_bytes(msgspec.json.format(msgspec.json.encode(content), indent=1) + b"\n")
    except OSError as error:
        raise ConfigError(f"--json: {path} cannot be written ({error.strerror})") from error


def check_writable(path: str | Path | None, flag: str) -> None:
    """Raises `ConfigError` when nothing could be written there, so that a long run does not end without its result."""
    if path is None:
        return
    folder = Path(path).resolve().parent
    target = Path(path) if Path(path).exists() else folder
    if not folder.is_dir() or Path(path).is_dir() or not os.access(target, os.W_OK):
        raise ConfigError(f"{flag}: {path} cannot be written", flag)


def read(path: str | Path, kind: str, flag: str = "--compare") -> dict[str, Any]:
    """An earlier document of the same kind. Raises `ConfigError` naming `flag`."""
    try:
        content = msgspec.json.decode(Path(path).read_bytes(), type=dict[str, Any])
    except OSError as error:
        raise ConfigError(f"{flag}: {path} cannot be read ({error.strerror})", flag) from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"{flag}: {path} is not a JSON object ({error})", flag) from error
    found = (content.get("schema_version"), content.get("kind"))
    if found != (SCHEMA_VERSION, kind):
        raise ConfigError(
            f"{flag}: {path} holds schema_version {found[0]} of kind {found[1]}, allowed is {SCHEMA_VERSION} of {kind}",
            flag,
        )
    return content


def request_rows(records: Sequence[ClientRecord]) -> list[dict[str, Any]]:
    """One object per request; times in ms, `start_ms` from the start of the run."""
    origin = min((record.start for record in records), default=0.0)
    return [
        {
            "number": record.number,
            "start_ms": _ms(record.start - origin),
            "lag_ms": _ms(record.lag),
            "ttft_ms": _ms(record.ttft),
            "tpot_ms": _ms(record.tpot),
            "e2e_ms": _ms(record.e2e),
            "prompt_tokens": record.prompt_tokens,
            "cached_tokens": record.cached_tokens,
            "output_tokens": record.output_tokens,
            "event_ms": [_ms(time - record.start) for time, _ in record.events],
            "event_tokens": [tokens for _, tokens in record.events],
            "finish_reason": record.finish_reason,
            "error": record.error,
            "detail": record.detail,
        }
        for record in records
    ]


def serve_result(bench: Bench, measurement: Measurement) -> dict[str, Any]:
    """The result of a `serve` document."""
    details: dict[str, str] = {}
    for record in measurement.records:
        if record.error is not None:
            details.setdefault(record.error, record.detail)
    rows = [{**msgspec.to_builtins(row), "difference": row.difference} for row in measurement.server.rows]
    return {
        "model": bench.model.name,
        "max_model_len": bench.model.max_model_len,
        "counts_tokens": bench.counts_tokens,
        "summary": msgspec.to_builtins(measurement.summary),
        "failure_details": details,
        "server": {"missing": measurement.server.missing, "rows": rows},
        "workload": {
            "requests": len(measurement.records),
            "cut": measurement.cut,
            "reusable_tokens": measurement.reusable_tokens,
            "failed_warmups": measurement.failed_warmups,
        },
        "verification": msgspec.to_builtins(measurement.verification),
    }


def slo_result(
    found: SearchResult, summaries: Sequence[Summary], target: float, limits_ms: Mapping[str, float]
) -> dict[str, Any]:
    """The result of an `slo` document: every probe with the summary of its run."""
    probes = [
        {**msgspec.to_builtins(probe), "summary": msgspec.to_builtins(summary)}
        for probe, summary in zip(found.probes, summaries, strict=True)
    ]
    return {
        "best": found.best,
        "missed": found.missed,
        "target": target,
        "limits_ms": dict(limits_ms),
        "probes": probes,
    }


def redact(command: Sequence[str]) -> list[str]:
    """The command line without the values of secret flags."""
    shown: list[str] = []
    for word in command:
        flag, equals, _ = word.partition("=")
        if shown and shown[-1] in SECRET_FLAGS:
            shown.append("***")
        else:
            shown.append(f"{flag}=***" if equals and flag in SECRET_FLAGS else word)
    return shown


def versions() -> dict[str, str]:
    """Versions of what took part, of those packages that are installed."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def host_facts() -> dict[str, Any]:
    """The machine that the benchmark itself runs on; a server may be elsewhere."""
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "cores_usable": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": platform.platform(),
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 4)
